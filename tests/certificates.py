"""A site's certificates for tests: a CA, its broker, and whoever connects."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from shared.runtime.clock import utc_of_stamp, utc_stamp
from shared.transport.tls import Tls

DAY = dt.timedelta(days=1)
NOW = dt.datetime.fromtimestamp(utc_of_stamp(utc_stamp()) or 0.0, dt.UTC)
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
        made = self._signed(called(self.name), self.key, NOW - 3650 * DAY, NOW + 3650 * DAY, is_authority=True)
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
    ) -> Tls:
        """Write a pair; return it with this CA, for a client.

        Args:
            name: Whose.
            role: As what it takes part.
            file: What its files are called; as the name, unless told otherwise.
            names: Names and addresses that it is for.
            days: Since when and until when it is valid, from now.
            password: Encrypts the key.
        """
        key, stem = ec.generate_private_key(ec.SECP256R1()), self.folder / (file or name)
        places = [x509.IPAddress(ip_address(one)) if one[0].isdigit() else x509.DNSName(one) for one in names or []]
        made = self._signed(called(name, role), key, NOW + days[0] * DAY, NOW + days[1] * DAY, names=places)
        self._issued[name] = made
        private(key, stem.with_name(f"{stem.name}.key"), password)
        stem.with_name(f"{stem.name}.crt").write_bytes(made.public_bytes(Encoding.PEM))
        return self.known_as(file or name)

    def known_as(self, file: str) -> Tls:
        """Return the settings of whoever has that pair."""
        here = self.folder
        return Tls(ca=str(here / "ca.crt"), cert=str(here / f"{file}.crt"), key=str(here / f"{file}.key"))

    def revoke(self, *names: str) -> Path:
        """Write the list of revoked certificates, anew and whole; return its path."""
        builder = x509.CertificateRevocationListBuilder(called(self.name), NOW - DAY, NOW + 3650 * DAY)
        for name in names:
            revoked = x509.RevokedCertificateBuilder(self._issued[name].serial_number, NOW - DAY).build()
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
