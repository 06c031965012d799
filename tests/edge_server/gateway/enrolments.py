"""Test gateway in memory, with boards that join it and a CA.

Power is cut at every step of what a board writes.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CURRENT, read_membership
from device_agent.identity.join import Join
from edge_server.gateway import authority
from edge_server.gateway.enrolment.ledger import EnrolmentLedger
from edge_server.gateway.enrolment.rate_limit import RENEWALS, RENEWALS_PER_S, RateLimit
from edge_server.gateway.enrolment.registrar import Answer, Holder, Registrar, Request, SiteInfo
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.tokens import EnrolmentEndpoint, make_token
from shared.errors import EnrolmentFailed
from shared.protocol.enrolment import Token
from shared.runtime.clock import parse_utc_stamp, utc_seconds, utc_stamp
from shared.transport.tls import TlsSettings

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
            site=lambda: SiteInfo("roof", site + root, "gateway.local", 8883),
            edit=self.edit,
            issue=self.issue,
            find_holder=self.holders.get,
            is_denied=self.denied.__contains__,
            utc_s=lambda: self.now,
            limit=self.limit,
            renewals=RateLimit(lambda: self.now, RENEWALS, RENEWALS_PER_S),
        )

    @contextmanager
    def edit(self) -> Iterator[EnrolmentLedger]:
        ledger = deepcopy(self.ledger)
        yield ledger
        self.ledger = ledger

    def issue(self, public: bytes, device: str) -> authority.IssuedCertificate:
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
        token, kept = make_token(device, EnrolmentEndpoint("127.0.0.1", port, root), ttl_s, self.now)
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


DAY_S = 86_400.0


class Board:
    """A board with its disk, its clock, and a broker that lets it in or not."""

    def __init__(self, folder: Path, clock: BoardClock | None = None) -> None:
        self.state = folder
        folder.mkdir(exist_ok=True)
        self.clock = clock or BoardClock(utc_s=lambda: NOW, synchronised=lambda: True)
        self.proven: list[str] = []
        self.refusal = ""

    @property
    def used(self) -> Path:
        return self.state / credentials.FOLDER / CURRENT

    async def prove(self, broker, membership) -> str:
        ssl.create_default_context(cafile=broker.tls.ca).load_cert_chain(broker.tls.cert, broker.tls.key)
        self.proven.append(f"{membership.device}@{broker.host}:{broker.port}")
        return self.refusal

    async def join(self, token, device=""):
        return await Join(token, self.state, device, self.clock, self.prove).run()

    def joins(self, gateway, context, token=None, device=""):
        """Join at a gateway that serves for as long as it takes."""

        async def run():
            async with serving(gateway, context) as port:
                return await self.join(replace(token or gateway.token(), port=port), device)

        return asyncio.run(run())

    def is_usable(self) -> bool:
        """Tell whether what is in use, if anything is, belongs together."""
        if read_membership(self.used) is None:
            return False
        tls = credentials.make_tls(self.used)
        ssl.create_default_context(cafile=tls.ca).load_cert_chain(tls.cert, tls.key)
        return True


def failure(run) -> EnrolmentFailed:
    with pytest.raises(EnrolmentFailed) as raised:
        run()
    return raised.value


STEPS = 60
"""More than there are."""


class Killed(BaseException):
    """As a power cut would: nothing is tidied up."""


@contextmanager
def killed_after(steps: int) -> Iterator[list[int]]:
    """Kill at one of the syncs, renames and links inside the block; yields how many are left."""
    left = [steps]

    def dying(real):
        def run(*given, **more):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return real(*given, **more)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "symlink"):
            patch.setattr(os, name, dying(getattr(os, name)))
        yield left


DAY = dt.timedelta(days=1)
ISSUED = dt.datetime.fromtimestamp(parse_utc_stamp(utc_stamp()) or 0.0, dt.UTC)
PRIVATE = 0o600


def called(name: str, role: str = "") -> x509.Name:
    """Return a certificate's subject."""
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if role:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role))
    return x509.Name(parts)


def private(key: ec.EllipticCurvePrivateKey, path: Path, password: str = "") -> None:
    """Write a key that its owner alone may read."""
    hidden = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    path.touch(mode=PRIVATE)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))


@dataclass
class Authority:
    """A CA in a folder, `ca.crt`, with a certificate for its broker, `broker.crt`."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    name: str = "test site"
    _issued: dict[str, x509.Certificate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self._signed(called(self.name), self.key, ISSUED - 3650 * DAY, ISSUED + 3650 * DAY, is_authority=True)
        (self.folder / "ca.crt").write_bytes(made.public_bytes(Encoding.PEM))
        self.issue("broker", names=["localhost", "127.0.0.1"])

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        begin: dt.datetime,
        end: dt.datetime,
        *,
        is_authority: bool = False,
        names: list[x509.GeneralName] | None = None,
    ) -> x509.Certificate:
        builder = x509.CertificateBuilder(called(self.name), subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(begin).not_valid_after(end)
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def issue(
        self,
        name: str,
        role: str = "",
        *,
        file: str = "",
        names: list[str] | None = None,
        days: tuple[int, int] = (-1, 90),
        password: str = "",
    ) -> TlsSettings:
        """Write a pair; return it with this CA, for a client.

        Args:
            role: As what it takes part.
            file: What its files are called; as the name, unless told otherwise.
            names: Names and addresses that it is for.
            days: Since when and until when it is valid, from now.
        """
        key, stem = ec.generate_private_key(ec.SECP256R1()), self.folder / (file or name)
        places = [x509.IPAddress(ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in names or []]
        made = self._signed(called(name, role), key, ISSUED + days[0] * DAY, ISSUED + days[1] * DAY, names=places)
        self._issued[name] = made
        private(key, stem.with_name(f"{stem.name}.key"), password)
        stem.with_name(f"{stem.name}.crt").write_bytes(made.public_bytes(Encoding.PEM))
        return self.known_as(file or name)

    def known_as(self, file: str) -> TlsSettings:
        """Return the settings of whoever has that pair."""
        here = self.folder
        return TlsSettings(ca=str(here / "ca.crt"), cert=str(here / f"{file}.crt"), key=str(here / f"{file}.key"))

    def revoke(self, *names: str) -> Path:
        """Write the list of revoked certificates, anew and whole; return its path."""
        builder = x509.CertificateRevocationListBuilder(called(self.name), ISSUED - DAY, ISSUED + 3650 * DAY)
        for name in names:
            revoked = x509.RevokedCertificateBuilder(self._issued[name].serial_number, ISSUED - DAY).build()
            builder = builder.add_revoked_certificate(revoked)
        path = self.folder / "crl.pem"
        beside = path.with_suffix(".new")
        beside.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return beside.replace(path)

    def lines(self, broker: str = "broker") -> list[str]:
        """Return the lines of mosquitto's configuration for a listener that wants certificates."""
        here = self.folder
        return [
            f"cafile {here}/ca.crt",
            f"certfile {here}/{broker}.crt",
            f"keyfile {here}/{broker}.key",
            f"crlfile {self.folder}/crl.pem" if (self.folder / "crl.pem").exists() else "",
            "require_certificate true",
            "use_identity_as_username true",
            "allow_anonymous false",
            "set_tcp_nodelay true",
        ]
