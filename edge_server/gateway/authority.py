"""The two certificate authorities of a site, over bytes and dates alone: root, site CA, certificates, revocation list.

The root signs site CAs and nothing else, and its key leaves the gateway; the site CA signs everybody. All keys are EC
P-256. Who somebody is, brokers read off the common name (mosquitto: `use_identity_as_username`), so that names are
refused here unless they are of their role's form; the forms exclude one another.

Dates: nothing is valid from the moment it was signed, since clocks of gateways and boards are wrong. All that a CA
signs is valid from that CA's own beginning, which lies `BACKDATED` before it was made. A revocation list is valid from
then until the CA's own end: mosquitto 2.0 turns everybody away while its list is of the future or has run out.

X.509 after RFC 5280; certificate requests are PKCS #10, RFC 2986.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.errors import ConfigError, WireError
from shared.protocol.packages import SIGNER_NAME

Role = Literal["device", "peer", "server", "probe", "gateway", "packages"]

BACKDATED = timedelta(days=7)
"""How far a gateway's clock may have been ahead when it made a CA, or fall behind later."""

YEAR = timedelta(days=365.25)
MAX_YEARS = 100
MAX_REQUEST_BYTES = 4096
"""A request for a P-256 key takes about 400."""

_WORD = "[a-z0-9][a-z0-9-]{0,31}"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
_MAX_HOST = 253
_RESERVED = frozenset({"edge-server", "probe", "gateway"})
_FORMS: Mapping[Role, str] = {
    "device": _WORD,
    "peer": f"_peer-{_WORD}",
    "server": "edge-server",
    "probe": "probe",
    "gateway": "gateway",
    "packages": SIGNER_NAME,
}
_PURPOSES: Mapping[Role, x509.ObjectIdentifier] = dict.fromkeys(_FORMS, ExtendedKeyUsageOID.CLIENT_AUTH) | {
    "gateway": ExtendedKeyUsageOID.SERVER_AUTH,  # and nobody else's: a device cannot pass for the gateway
    "packages": ExtendedKeyUsageOID.CODE_SIGNING,  # nor can who signs packages pass for anybody at the broker
}


@dataclass(frozen=True)
class Subject:
    """Whom a certificate is for.

    Attributes:
        name: Common name, of its role's form: a device's own, `_peer-<site>`, `_packages`, or the role itself.
        addresses: Names and IP addresses under which a gateway is reached.
    """

    name: str
    role: Role
    site: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Issued:
    """A certificate that was signed.

    Attributes:
        serial: Its number, by which it is revoked.
        not_after: Until when it is valid, UTC.
    """

    certificate: bytes
    serial: int
    not_after: datetime


def is_device_name(name: str) -> bool:
    """Tell whether a certificate may be issued to a device of this name: none that a broker or a shell misreads."""
    return re.fullmatch(_WORD, name) is not None and name not in _RESERVED


def check_device_name(name: str) -> str:
    """Return `name` if a device with a certificate may be called so.

    Raises:
        ConfigError: It may not.
    """
    if name in _RESERVED:
        raise ConfigError(f"device {name!r}: that name is the gateway's own; choose another")
    if not is_device_name(name):
        raise ConfigError(f"device {name!r}: use 1 to 32 of a-z, 0-9 and '-', not beginning with '-'")
    return name


def check_site_name(name: str) -> str:
    """Return `name` if a site with an authority of its own may be called so.

    Raises:
        ConfigError: It may not.
    """
    if not re.fullmatch(_WORD, name):
        raise ConfigError(f"site {name!r}: use 1 to 32 of a-z, 0-9 and '-', not beginning with '-'")
    return name


def make_key() -> bytes:
    """Return a new private key, EC P-256, as unencrypted PKCS #8 PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, none)


def public_key_of(key: bytes) -> bytes:
    """Return the public half of a private key in PEM, as `issue` takes it: SubjectPublicKeyInfo in DER."""
    return _spki(_private(key).public_key())


def make_root(name: str, now: datetime, years: float) -> tuple[bytes, bytes]:
    """Return a new root: its key and its certificate, PEM.

    Args:
        now: UTC.
        years: How long it is valid.

    Raises:
        ConfigError: The site may not be called so, or no clock reads such years.
    """
    key = make_key()
    private, subject = _private(key), _ca_name(name, "root")
    begin = _whole(now) - BACKDATED
    builder = _ca(subject, subject, private.public_key(), begin, _end(now, years), path_length=1)
    return key, _signed(builder, private, private.public_key())


def make_site(root_key: bytes, root_cert: bytes, name: str, now: datetime, years: float) -> tuple[bytes, bytes]:
    """Return a new site CA, signed by the root: its key and its certificate, PEM.

    Args:
        now: UTC.
        years: How long it is valid; never longer than the root.

    Raises:
        ConfigError: As `make_root`; the root's two files do not belong together, or it is not valid now.
    """
    root, signer = _authority(root_key, root_cert, now)
    key = make_key()
    public = _private(key).public_key()
    begin = max(_whole(now) - BACKDATED, root.not_valid_before_utc)
    end = min(_end(now, years), root.not_valid_after_utc)
    # Two CAs of one site, while it is rotated, are told apart by their names too.
    mark = x509.SubjectKeyIdentifier.from_public_key(public).digest.hex()[:8]
    builder = _ca(_ca_name(name, f"site CA {mark}"), root.subject, public, begin, end, path_length=0)
    return key, _signed(builder, signer, signer.public_key())


def issue(ca_key: bytes, ca_cert: bytes, public_key: bytes, subject: Subject, days: float, now: datetime) -> Issued:
    """Sign a certificate.

    Args:
        ca_key: Of the site CA, PEM.
        ca_cert: Of the site CA, PEM.
        public_key: EC P-256, SubjectPublicKeyInfo in DER, as `read_request` returns it.
        subject: Whom it is for.
        days: How long from now it is valid; never longer than the CA.
        now: UTC.

    Raises:
        ConfigError: The name is not of its role's form, an address is none, the CA's two files do not belong
            together, or the CA is not valid now.
        WireError: The key is no public key of EC P-256.
    """
    ca, signer = _authority(ca_key, ca_cert, now)
    _check_subject(subject)
    if not days > 0:
        raise ConfigError(f"{days} days: a certificate is valid for more than 0")
    end = min(_whole(now) + timedelta(days=min(days, MAX_YEARS * 366)), ca.not_valid_after_utc)
    builder = _unsigned(_name(subject), ca.subject, _public(public_key), ca.not_valid_before_utc, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(ca=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_PURPOSES[subject.role]]), critical=False)
    if subject.addresses:
        names = x509.SubjectAlternativeName([_alternative(one) for one in subject.addresses])
        builder = builder.add_extension(names, critical=False)
    data = _signed(builder, signer, signer.public_key())
    return Issued(data, x509.load_pem_x509_certificate(data).serial_number, end)


def sign_self(key: bytes, subject: Subject, ca_cert: bytes) -> bytes:
    """Return a certificate that its own key signs, PEM: a listener that trusts it trusts no other by it.

    Args:
        key: Private key of the certificate, PEM.
        subject: Whom it is for.
        ca_cert: Of the site CA, PEM: it is valid from that one's beginning, for `MAX_YEARS`.

    Raises:
        ConfigError: The name is not of its role's form.
    """
    _check_subject(subject)
    private, name = _private(key), _name(subject)
    begin = x509.load_pem_x509_certificate(ca_cert).not_valid_before_utc
    builder = _unsigned(name, name, private.public_key(), begin, begin + MAX_YEARS * YEAR)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_PURPOSES[subject.role]]), critical=False)
    return _signed(builder, private, private.public_key())


def read_request(csr_pem: bytes) -> bytes:
    """Return the public key of a certificate request, whose signature shows that the sender has the private one.

    The names it asks for are not read: who the sender is, its token says.

    Raises:
        WireError: It is no request, not for a key of EC P-256, or not signed by that key.
    """
    if len(csr_pem) > MAX_REQUEST_BYTES:
        raise WireError(f"a certificate request of {len(csr_pem)} bytes", reason="request")
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        if not _is_p256(key) or not request.is_signature_valid:
            raise WireError("the certificate request is not signed by a P-256 key of its own", reason="request")
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion) as error:
        raise WireError(f"no certificate request: {error}", reason="request") from error
    return _spki(key)


def revocations(ca_key: bytes, ca_cert: bytes, serials: Iterable[int]) -> bytes:
    """Return the list of revoked certificates, PEM; valid as long as the CA, whatever the clock says.

    Args:
        ca_key: Of the CA that signed them, PEM.
        serials: Of all that are revoked; the order does not matter.

    Raises:
        ConfigError: The CA's two files do not belong together.
    """
    ca, signer = _authority(ca_key, ca_cert, None)
    begin, numbers = ca.not_valid_before_utc, sorted(set(serials))
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.subject)
    builder = builder.last_update(begin).next_update(ca.not_valid_after_utc)
    for serial in numbers:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(begin)
        builder = builder.add_revoked_certificate(entry.build())
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(signed_by, critical=False)
    builder = builder.add_extension(x509.CRLNumber(len(numbers)), critical=False)  # of one CA, it only grows
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def fingerprint(cert_pem: bytes) -> bytes:
    """Return the SHA-256 of a certificate's DER, 32 bytes: what devices compare the root with."""
    return x509.load_pem_x509_certificate(cert_pem).fingerprint(hashes.SHA256())


def _check_subject(subject: Subject) -> None:
    check_site_name(subject.site)
    if subject.role == "device":
        check_device_name(subject.name)
    elif subject.role not in _FORMS or not re.fullmatch(_FORMS[subject.role], subject.name):
        raise ConfigError(f"no {subject.role} may be called {subject.name!r}")
    if (subject.role == "gateway") != bool(subject.addresses):
        raise ConfigError("a gateway's certificate names its addresses, and no other does")


def _authority(key: bytes, cert: bytes, now: datetime | None) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a CA; with `now`, one that is valid then."""
    try:
        ca = x509.load_pem_x509_certificate(cert)
    except ValueError as error:
        raise ConfigError(f"the CA's certificate is none: {error}") from error
    private = _private(key)
    if ca.public_key() != private.public_key():
        raise ConfigError("the CA's key is not that of its certificate; restore both from one backup")
    if now is not None and not ca.not_valid_before_utc <= now <= ca.not_valid_after_utc:
        dates = f"{ca.not_valid_before_utc:%Y-%m-%d} to {ca.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"the CA is valid from {dates}, and this machine's clock reads {now:%Y-%m-%d}: set it right")
    return ca, private


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"a private key is none: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not _is_p256(private.public_key()):
        raise ConfigError("a private key is not of EC P-256")
    return private


def _public(spki: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(spki)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise WireError(f"no public key: {error}", reason="request") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_p256(key):
        raise WireError("the public key is not of EC P-256", reason="request")
    return key


def _is_p256(key: object) -> bool:
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)


def _spki(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _whole(now: datetime) -> datetime:
    return now.astimezone(UTC).replace(microsecond=0)


def _end(now: datetime, years: float) -> datetime:
    if not 0 < years <= MAX_YEARS:
        raise ConfigError(f"{years} years: a CA is valid for more than 0, and {MAX_YEARS} at most")
    return _whole(now) + years * YEAR


def _name(subject: Subject) -> x509.Name:
    pairs = ((NameOID.ORGANIZATION_NAME, subject.site), (NameOID.ORGANIZATIONAL_UNIT_NAME, subject.role))
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in (*pairs, (NameOID.COMMON_NAME, subject.name))])


def _ca_name(site: str, what: str) -> x509.Name:
    pairs = ((NameOID.ORGANIZATION_NAME, check_site_name(site)), (NameOID.COMMON_NAME, f"{site} {what}"))
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in pairs])


def check_address(address: str) -> str:
    """Return `address` if a gateway's certificate may name it.

    Raises:
        ConfigError: It is neither a host's name nor an IP address.
    """
    _alternative(address)
    return address


def _alternative(address: str) -> x509.GeneralName:
    if "%" in address:
        raise ConfigError(f"address {address!r}: one that is good on a single link only; boards need another")
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        if len(address) > _MAX_HOST or not re.fullmatch(_HOST, address):
            raise ConfigError(f"address {address!r}: neither a host's name nor an IP address") from None
        return x509.DNSName(address)


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), begin, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _ca(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
    *,
    path_length: int,
) -> x509.CertificateBuilder:
    builder = _unsigned(subject, issuer, key, begin, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
    return builder.add_extension(_usage(ca=True), critical=True)


def _signed(
    builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePublicKey
) -> bytes:
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(by)
    certificate = builder.add_extension(signed_by, critical=False).sign(signer, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)
