"""A site's registrar in memory, and boards that ask it."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from edge_server.gateway import authority
from edge_server.gateway.enrolment.ledger import EnrolmentLedger
from edge_server.gateway.enrolment.rate_limit import RateLimit
from edge_server.gateway.enrolment.registrar import Answer, Holder, Registrar, Request, SiteFacts
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.tokens import make_token
from shared.protocol.enrolment import Token
from shared.runtime.clock import utc_seconds

NOW = float(int(utc_seconds()))
"""OpenSSL judges dates by this machine's own clock, which no test can move; so the others are moved instead."""
CURVE = ec.SECP256R1()


def authorities(at: float = NOW) -> tuple[bytes, bytes, bytes, bytes]:
    """Return root key and certificate, site key and certificate, of a site that was made then."""
    return _authorities(at)


@lru_cache
def _authorities(at: float) -> tuple[bytes, bytes, bytes, bytes]:
    now = datetime.fromtimestamp(at, UTC)
    root_key, root = authority.make_root("roof", now, 20)
    return root_key, root, *authority.make_site(root_key, root, "roof", now, 10)


@dataclass
class Gateway:
    """A site in memory; its clock stands still until it is moved."""

    now: float = NOW
    made: float = NOW
    ledger: EnrolmentLedger = field(default_factory=EnrolmentLedger)
    issued: list[tuple[bytes, str]] = field(default_factory=list)
    holders: dict[str, Holder] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        _, root, _, site = authorities(self.made)
        self.limit = RateLimit(lambda: self.now)
        self.registrar = Registrar(
            site=lambda: SiteFacts("roof", site + root, "gateway.local", 8883),
            edit=self.edit,
            issue=self.issue,
            find_holder=self.holders.get,
            is_denied=self.denied.__contains__,
            utc_s=lambda: self.now,
            limit=self.limit,
        )

    @contextmanager
    def edit(self) -> Iterator[EnrolmentLedger]:
        ledger = deepcopy(self.ledger)
        yield ledger
        self.ledger = ledger

    def issue(self, public: bytes, device: str) -> authority.Issued:
        _, _, key, cert = authorities(self.made)
        self.issued.append((public, device))
        subject = authority.Subject(device, "device", "roof")
        issued = authority.issue(key, cert, public, subject, 365, datetime.fromtimestamp(self.now, UTC))
        digest = hashlib.sha256(public).hexdigest()
        self.holders[digest] = Holder(device, issued.not_after.timestamp(), revoked=False)
        return replace(issued, certificate=issued.certificate + cert)

    def revoke(self, key: ec.EllipticCurvePrivateKey) -> None:
        digest = hashlib.sha256(public_of(key)).hexdigest()
        self.holders[digest] = replace(self.holders[digest], revoked=True)

    def token(self, device: str = "pi-03", ttl_s: float = 900.0, port: int = 8443) -> Token:
        root = authority.fingerprint(authorities(self.made)[1])
        token, kept = make_token(device, ("127.0.0.1", port, root), ttl_s, self.now)
        self.ledger.tokens[token.id] = kept
        return token

    def post(self, path: str, body: object, source: str = "192.0.2.7", peer: bytes = b"") -> Answer:
        return self.registrar.answer(Request("POST", path, msgspec.json.encode(body), source, peer))

    def join(
        self, token: Token, key: ec.EllipticCurvePrivateKey, more: Mapping[str, object] = MappingProxyType({})
    ) -> Answer:
        return self.post(
            "/join", {"token": token.id, "secret": token.secret, "request": request_of(key).decode()} | dict(more)
        )


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(CURVE)


def request_of(key: ec.EllipticCurvePrivateKey, name: str = "whatever") -> bytes:
    """Return a certificate request; whatever name it asks for."""
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def public_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@lru_cache
def server_pair(*addresses: str, days: float = 365, at: float = NOW, made: float = NOW) -> tuple[bytes, bytes]:
    """Return key and certificate, with the CA's behind it, of a gateway at these addresses."""
    _, _, ca_key, ca = authorities(made)
    key = authority.make_key()
    subject = authority.Subject("gateway", "gateway", "roof", addresses)
    now = datetime.fromtimestamp(at, UTC)
    return key, authority.issue(ca_key, ca, authority.public_key_of(key), subject, days, now).certificate + ca


def server_context(folder: Path, pair: tuple[bytes, bytes] | None = None, made: float = NOW) -> ssl.SSLContext:
    """Return what a gateway on loopback, or somebody who passes for one, accepts connections with."""
    key, certificate = pair or server_pair("127.0.0.1", made=made)
    folder.mkdir(exist_ok=True)
    for name, data in (("server.key", key), ("server.crt", certificate), ("chain.pem", authorities(made)[1])):
        (folder / name).write_bytes(data)
    return service_context(folder / "server.crt", folder / "server.key", folder / "chain.pem")


@asynccontextmanager
async def serving(gateway: Gateway, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Serve a gateway on loopback; yields the port."""
    async with EnrolmentService(gateway.registrar, lambda: context).running("127.0.0.1", 0) as port:
        yield port
