"""Requests to the enrolment service as they are read off a connection, CAs that boards are shown, and tokens.

Whatever comes: an answer, and no certificate but for a token whose secret came, to the key that signed the request,
under the token's name; or anew to a key that has one. No file but what the index of packages names, and of the roots
that boards trust none is noted but of the board whose certificate the connection has.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import os
import re
from copy import deepcopy
from functools import cache
from random import Random

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from device_agent.identity.certificates import select_trusted_chain
from edge_server.gateway.enrolment.ledger import EnrolmentLedger
from edge_server.gateway.enrolment.registrar import LATE_S, Answer, Holder, Request, refusal
from edge_server.gateway.enrolment.service import read_http_request
from edge_server.gateway.enrolment.tokens import TokenRecord, secret_digest
from edge_server.gateway.packages.download import Download, PackageCatalogue, open_file
from edge_server.gateway.packages.store import INDEX, WHEELS, PackageIndex, WheelFile, packages_folder
from shared.errors import ConfigError, EnrolmentFailed, WireError
from shared.protocol.enrolment import MOST_HEAD, JoinAnswer, Refusal, RenewAnswer, Token, format_token, parse_token
from shared.protocol.packages import AGENT, Build, PackageManifest, SignedManifest, canonical_bytes
from tests.edge_server.gateway.enrolments import NOW, Gateway, authorities, new_key, public_of, request_of
from tests.fuzz.frames import folder
from tests.fuzz.trees import cut_and_spliced, damaged

OPEN, CLOSED, LATE, WITHDRAWN = "aaaaaa", "bbbbbb", "cccccc", "dddddd"
SECRETS = {name: name[0].upper() * 22 for name in (OPEN, CLOSED, LATE, WITHDRAWN)}
NAMES = {OPEN: "pi-03", CLOSED: "pi-04", LATE: "pi-05", WITHDRAWN: "pi-06"}
APPROVED, ASKING, REVOKED = LATE_KEYS = ("pi-07", "pi-08", "pi-09")
"""Boards that were away for more than the 180 days."""
GRANTS = ("/join", "/renew", "/renew-expired")


@cache
def _late() -> dict[str, bytes]:
    """Return requests of keys whose certificates ended long ago: approved by the operator, not, and revoked."""
    return {name: request_of(new_key()) for name in LATE_KEYS}


@cache
def _before() -> tuple[Gateway, bytes, bytes, bytes]:
    """Return a gateway with a board that has a certificate: the request of its key, and the certificate (DER)."""
    gateway, key = Gateway(), new_key()
    issued = gateway.issue(public_of(key), NAMES[CLOSED])
    for name, secret in SECRETS.items():
        expires = NOW - 1 if name == LATE else NOW + 900
        gateway.ledger.tokens[name] = TokenRecord(
            device=NAMES[name], digest=secret_digest(secret), made_utc_s=NOW - 9, expires_utc_s=expires,
            revoked=name == WITHDRAWN, closed=name == CLOSED, key="0" * 64 if name == CLOSED else "",
        )  # fmt: skip
    for name, pem in _late().items():
        holder = Holder(name, NOW - 2 * LATE_S, revoked=name == REVOKED)
        gateway.holders[hashlib.sha256(public_of_request(pem)).hexdigest()] = holder
    digests = {holder.device: digest for digest, holder in gateway.holders.items()}
    gateway.ledger.approved = {APPROVED: digests[APPROVED], REVOKED: digests[REVOKED], ASKING: digests[APPROVED]}
    peer = x509.load_pem_x509_certificate(issued.certificate).public_bytes(Encoding.DER)
    return gateway, request_of(key), peer, request_of(new_key())


def _post(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def seeds() -> list[bytes]:
    """Return a request of each kind that is granted."""
    _, known, _, new = _before()
    said = {"token": OPEN, "secret": SECRETS[OPEN], "request": new.decode()}
    return [
        b"GET /ca.pem HTTP/1.1\r\nHost: a\r\n\r\n",
        _post("/join", said),
        _post("/join", said | {"device": NAMES[OPEN]}),
        _post("/joined", {"token": CLOSED, "secret": SECRETS[CLOSED]}),
        _post("/renew", {"request": known.decode()}),
        _post("/renew-expired", {"request": known.decode()}),
        _post("/renew-expired", {"request": _late()[APPROVED].decode()}),
        _post("/moved", {"root": "ab" * 32}),
        _get("/install.sh"),
        _get("/packages/index.json"),
        _get("/packages/wheels/torch/"),
        _get(f"/packages/{PACKAGE}"),
        _get(f"/packages/wheels/{WHEEL}", "bytes=3-5"),
    ]


PACKAGE, WHEEL, FILE_BYTES = "fieldfleet-agent_1_arm64.deb", "torch-2.10.0+cpu-cp311-cp311-linux_aarch64.whl", 9


def _get(path: str, part: str = "") -> bytes:
    line = f"Range: {part}\r\n" if part else ""
    return f"GET {path} HTTP/1.1\r\nHost: a\r\n{line}\r\n".encode()


@cache
def _shelf() -> PackageCatalogue:
    """Return what a gateway has for its boards, beside files that are nobody's."""
    site = folder() / "site"
    place = packages_folder(site)
    (place / WHEELS).mkdir(parents=True)
    for path in (place / PACKAGE, place / WHEELS / WHEEL, place / "secret.deb", site / "state.json"):
        path.write_bytes(bytes(FILE_BYTES))
    build = Build(file=PACKAGE, arch="arm64", python="3.11", sha256="ab" * 32, size=FILE_BYTES)
    manifest = PackageManifest(
        name=AGENT, version="1", serial=1, site="roof", created="20261123T000000Z", builds=(build,), formats={}
    )
    index = PackageIndex(
        releases=(SignedManifest(manifest=canonical_bytes(manifest), signature=b"s", certificates="c"),),
        wheels=(WheelFile(file=WHEEL, sha256="cd" * 32, size=FILE_BYTES),),
    )
    (place / INDEX).write_bytes(msgspec.json.encode(index))
    return PackageCatalogue(site)


def _fetched(found: Answer | Download) -> str:
    """What of the files was given: a part of one that the index names."""
    if isinstance(found, Answer):
        return f"accepted: {found.kind}" if found.status == 200 else f"refused: {found.status}"
    place = packages_folder(_shelf().site)
    assert found.path in (place / PACKAGE, place / WHEELS / WHEEL)
    assert 0 <= found.begin < found.begin + found.count <= FILE_BYTES == found.size
    os.close(open_file(found.path))
    assert all(line.isascii() and line.isprintable() for line in found.lines())
    return "accepted: a file"


def read(data: bytes) -> str:
    """Answer a request; what is granted is checked against what came."""
    before, _, peer, _ = _before()
    ledger = EnrolmentLedger(tokens=dict(before.ledger.tokens), approved=dict(before.ledger.approved))
    gateway = Gateway(ledger=ledger, holders=dict(before.holders))
    request = _request(data, peer)
    logging.disable(logging.CRITICAL)  # a million alarms help nobody
    try:
        if request and (found := _shelf().find(request)):
            return _fetched(found)
        answer = refusal("malformed") if request is None else gateway.registrar.answer(request)
    finally:
        logging.disable(logging.NOTSET)
    if answer.status != 200:
        assert not gateway.issued
        assert gateway.ledger.approved == before.ledger.approved  # an approval is used up by a certificate alone
        assert gateway.ledger.pending.keys() <= {ASKING}
        assert not gateway.ledger.roots
        return msgspec.json.decode(answer.body, type=Refusal).reason
    assert request is not None
    assert len(gateway.issued) == (request.path in GRANTS)
    assert gateway.ledger.roots.keys() <= {NAMES[CLOSED]}
    assert all(re.fullmatch("[0-9a-f]{64}", root) for root in gateway.ledger.roots.values())
    if gateway.issued:
        _require_right(gateway, request, answer)
    return f"accepted: {request.path}"


def _request(data: bytes, peer: bytes) -> Request | None:
    """Return what the service reads of a connection that says this and ends."""
    reader = asyncio.StreamReader(limit=MOST_HEAD, loop=_loop())
    reader.feed_data(data)
    reader.feed_eof()
    reading = read_http_request(reader, "192.0.2.7", peer)
    try:
        reading.send(None)
    except StopIteration as done:
        found: Request = done.value
        return found
    except (WireError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None
    raise AssertionError("it waits for more, and there is no more")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _require_right(gateway: Gateway, request: Request, answer: Answer) -> None:
    """A certificate was given: to the key that signed the request, under the name that is its due."""
    [(public, device)] = gateway.issued
    said = json.loads(request.body)
    asked = x509.load_pem_x509_csr(said["request"].encode())
    assert asked.is_signature_valid
    given = x509.load_pem_x509_certificate(msgspec.json.decode(answer.body, type=RenewAnswer).certificate.encode())
    names = [one.value for one in given.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    assert given.public_key() == asked.public_key()
    assert names == [device]
    if request.path == "/join":
        assert said["token"] == OPEN
        assert said["secret"] == SECRETS[OPEN]
        assert msgspec.json.decode(answer.body, type=JoinAnswer).device == device == NAMES[OPEN]
    elif device == APPROVED:
        assert request.path == "/renew-expired"
        assert public == public_of_request(_late()[APPROVED])
        assert APPROVED not in gateway.ledger.approved
    else:
        assert device == NAMES[CLOSED]
        assert public == public_of_request(_before()[1])


def public_of_request(pem: bytes) -> bytes:
    """Return the public key of a certificate request, DER."""
    return x509.load_pem_x509_csr(pem).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def mutate(data: bytes, random: Random) -> bytes:
    """Damage what a body says, the certificate request in it, or the bytes."""
    head, _, body = data.partition(b"\r\n\r\n")
    if head.startswith(b"GET ") and random.random() < 0.7:
        return _elsewhere(head.split(b" ")[1].decode("latin-1"), random)
    if random.random() < 0.3 or not head.startswith(b"POST "):
        return cut_and_spliced(data, random)
    try:
        tree = json.loads(body)
        which = random.random()
        if which < 0.3 and "token" in tree:
            tree["token"], tree["secret"] = random.choice([*SECRETS.items(), (OPEN, SECRETS[CLOSED])])
        elif which < 0.6 and "request" in tree:
            others = random.choice([pem.decode() for pem in _late().values()])
            tree["request"] = _rotten(tree["request"], random) if random.random() < 0.8 else others
        else:
            tree = damaged(deepcopy(tree), random)
        path = head.split(b" ")[1].decode()
        return _post(random.choice((path, path, path, *GRANTS)), tree)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return cut_and_spliced(data, random)


WAYS = (
    "..",
    ".",
    "",
    "%2e%2e",
    "%2f",
    "%00",
    "wheels",
    "secret.deb",
    "state.json",
    "torch",
    PACKAGE,
    WHEEL,
    "\xe9",
    "~",
)
PARTS = ("", "bytes=0-", "bytes=-1", "bytes=9-", "bytes=5-3", "bytes=-0", "bytes=0-1,2-3", "bytes=99999999999999-", "x")


def _elsewhere(path: str, random: Random) -> bytes:
    """Return a request for something beside what a request is for."""
    words = path.split("/")
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(words))
        words[place : place + random.randint(0, 1)] = [random.choice(WAYS)]
    return _get("/".join(words), random.choice(PARTS))


def _rotten(pem: str, random: Random) -> str:
    """Return a certificate request with a few bytes of its DER changed."""
    lines = pem.strip().splitlines()
    der = bytearray(base64.b64decode("".join(lines[1:-1])))
    for _ in range(random.randint(1, 3)):
        der[random.randrange(len(der))] = random.randrange(256)
    return "\n".join([lines[0], base64.b64encode(bytes(der)).decode(), lines[-1], ""])


def chain_seeds() -> list[bytes]:
    """Return what a gateway shows to whoever asks: its own CA certificates, alone and among others."""
    _, root, _, site = authorities()
    return [site + root, root, root + site, b"text\n" + site + root]


def read_chain(data: bytes) -> str:
    """What a board takes of it: the root that its token names and what that signed, or nothing."""
    root = x509.load_pem_x509_certificate(authorities()[1])
    try:
        taken = x509.load_pem_x509_certificates(select_trusted_chain(data, root.fingerprint(SHA256())))
    except EnrolmentFailed:
        return "another CA"
    assert taken[-1] == root
    for one in taken:
        one.verify_directly_issued_by(root)
    return "accepted"


def token_seeds() -> list[bytes]:
    """Return tokens."""
    made = [Token(host, 8443, bytes(32), OPEN, "A" * 22) for host in ("gateway.local", "192.0.2.7", "fe80::1")]
    return [format_token(one).encode() for one in made]


def read_token(data: bytes) -> str:
    """A token that can be written the same, or refused in a line."""
    text = data.decode(errors="replace")
    try:
        token = parse_token(text)
    except ConfigError as error:
        return str(error)
    assert format_token(token) == text.strip()
    return "accepted"
