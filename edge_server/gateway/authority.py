"""X.509 certificate authorities of a site: root, site CA, certificates, revocation list.

Pure functions over bytes and dates. The root signs site CAs only, and its key leaves the gateway; the site CA signs
everything else. All keys are EC P-256. Brokers take the account from the common name (mosquitto:
`use_identity_as_username`), so a name must have the form of its role; the forms exclude one another.

Clocks of gateways and boards may be wrong, so nothing becomes valid at the moment of its signature: a CA is valid from
`BACKDATED` before it was made, and what it signs from the same moment. A revocation list is valid until the CA's end,
since mosquitto 2.0 rejects every client while its list is expired or not yet valid.

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
"""Tolerated error of the gateway's clock, in either direction."""

YEAR = timedelta(days=365.25)
MAX_YEARS = 100
MAX_REQUEST_BYTES = 4096
"""A request for a P-256 key takes about 400 bytes."""

_NAME = "[a-z0-9][a-z0-9-]{0,31}"
_HOST = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
_MAX_HOST = 253
_RESERVED = frozenset({"edge-server", "probe", "gateway"})
_FORMS: Mapping[Role, str] = {
    "device": _NAME,
    "peer": f"_peer-{_NAME}",
    "server": "edge-server",
    "probe": "probe",
    "gateway": "gateway",
    "packages": SIGNER_NAME,
}
_PURPOSES: Mapping[Role, x509.ObjectIdentifier] = dict.fromkeys(_FORMS, ExtendedKeyUsageOID.CLIENT_AUTH) | {
    "gateway": ExtendedKeyUsageOID.SERVER_AUTH,  # of this role only: a device cannot impersonate the gateway
    "packages": ExtendedKeyUsageOID.CODE_SIGNING,  # the package signer cannot log in at the broker
}


@dataclass(frozen=True)
class Subject:
    """Subject of a certificate.

    Attributes:
        name: Common name in the form of its role: the device's name, `_peer-<site>`, `_packages`, or the role itself.
        addresses: Host names and IP addresses of a gateway; empty for other roles.
    """

    name: str
    role: Role
    site: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class IssuedCertificate:
    """A signed certificate.

    Attributes:
        certificate: The certificate alone, PEM.
        serial: Serial number, by which it is revoked.
        not_after: End of validity, UTC.
    """

    certificate: bytes
    serial: int
    not_after: datetime


def is_device_name(name: str) -> bool:
    """Check whether a device certificate may have this common name, which brokers and shells must not misread."""
    return re.fullmatch(_NAME, name) is not None and name not in _RESERVED


def check_device_name(name: str) -> str:
    """Return `name` if it is a valid name of a device.

    Raises:
        ConfigError: It is reserved or malformed.
    """
    if name in _RESERVED:
        raise ConfigError(f"device {name!r}: that name is reserved for the gateway; choose another")
    if not is_device_name(name):
        raise ConfigError(f"device {name!r}: use 1 to 32 characters of a-z, 0-9 and '-', not beginning with '-'")
    return name


def check_site_name(name: str) -> str:
    """Return `name` if it is a valid name of a site.

    Raises:
        ConfigError: It is malformed.
    """
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"site {name!r}: use 1 to 32 characters of a-z, 0-9 and '-', not beginning with '-'")
    return name


def make_key() -> bytes:
    """Return a new private key, EC P-256, as unencrypted PKCS #8 PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, none)


def public_key_of(key: bytes) -> bytes:
    """Return the public half of a private key in PEM, as SubjectPublicKeyInfo in DER."""
    return _spki(_private(key).public_key())


def make_root(name: str, now: datetime, years: float) -> tuple[bytes, bytes]:
    """Return the key and the certificate of a new root, PEM.

    Args:
        now: Start of validity plus `BACKDATED`, UTC.
        years: Period of validity, at most `MAX_YEARS`.

    Raises:
        ConfigError: The site's name is malformed, or `years` is out of range.
    """
    key = make_key()
    private, subject = _private(key), _ca_name(name, "root")
    begin = _truncate_to_second(now) - BACKDATED
    builder = _ca_builder(subject, subject, private.public_key(), begin, _expiry(now, years), path_length=1)
    return key, _sign(builder, private, private.public_key())


def make_site(root_key: bytes, root_cert: bytes, name: str, now: datetime, years: float) -> tuple[bytes, bytes]:
    """Return the key and the certificate of a new site CA, signed by the root, PEM.

    Args:
        now: Start of validity plus `BACKDATED`, UTC.
        years: Period of validity; the root's end limits it.

    Raises:
        ConfigError: As `make_root`; or the root's key does not match its certificate, or the root is not valid now.
    """
    root, signer = _authority(root_key, root_cert, now)
    key = make_key()
    public = _private(key).public_key()
    begin = max(_truncate_to_second(now) - BACKDATED, root.not_valid_before_utc)
    end = min(_expiry(now, years), root.not_valid_after_utc)
    # During a rotation a site has two CAs, which must differ in name too.
    mark = x509.SubjectKeyIdentifier.from_public_key(public).digest.hex()[:8]
    builder = _ca_builder(_ca_name(name, f"site CA {mark}"), root.subject, public, begin, end, path_length=0)
    return key, _sign(builder, signer, signer.public_key())


def issue(
    ca_key: bytes, ca_cert: bytes, public_key: bytes, subject: Subject, days: float, now: datetime
) -> IssuedCertificate:
    """Sign a certificate by a site CA.

    Args:
        ca_key: Private key of the site CA, PEM.
        ca_cert: Certificate of the site CA, PEM.
        public_key: EC P-256, SubjectPublicKeyInfo in DER, as `read_request` returns it.
        days: Period of validity from `now`; the CA's end limits it.
        now: Current time in UTC.

    Raises:
        ConfigError: The name does not have its role's form, an address is malformed, the CA's key does not match its
            certificate, or the CA is not valid now.
        WireError: The key is not a public key of EC P-256.
    """
    ca, signer = _authority(ca_key, ca_cert, now)
    _check_subject(subject)
    if not days > 0:
        raise ConfigError(f"{days} days: the validity of a certificate must be more than 0")
    end = min(_truncate_to_second(now) + timedelta(days=min(days, MAX_YEARS * 366)), ca.not_valid_after_utc)
    builder = _certificate_builder(_name(subject), ca.subject, _public(public_key), ca.not_valid_before_utc, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(ca=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_PURPOSES[subject.role]]), critical=False)
    if subject.addresses:
        names = x509.SubjectAlternativeName([_alternative(address) for address in subject.addresses])
        builder = builder.add_extension(names, critical=False)
    data = _sign(builder, signer, signer.public_key())
    return IssuedCertificate(data, x509.load_pem_x509_certificate(data).serial_number, end)


def sign_self(key: bytes, subject: Subject, ca_cert: bytes) -> bytes:
    """Return a self-signed certificate, PEM: a listener that trusts it trusts no other certificate by it.

    Args:
        key: Private key of the certificate, PEM.
        ca_cert: Certificate of the site CA, PEM; validity begins with it and lasts `MAX_YEARS`.

    Raises:
        ConfigError: The name does not have its role's form.
    """
    _check_subject(subject)
    private, name = _private(key), _name(subject)
    begin = x509.load_pem_x509_certificate(ca_cert).not_valid_before_utc
    builder = _certificate_builder(name, name, private.public_key(), begin, begin + MAX_YEARS * YEAR)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_PURPOSES[subject.role]]), critical=False)
    return _sign(builder, private, private.public_key())


def read_request(csr_pem: bytes) -> bytes:
    """Return the public key of a certificate request, SubjectPublicKeyInfo in DER.

    The request's signature proves that the sender has the private key. Its names are ignored: the token identifies the
    sender.

    Raises:
        WireError: It is not a certificate request, not for a key of EC P-256, or not signed by that key.
    """
    if len(csr_pem) > MAX_REQUEST_BYTES:
        raise WireError(f"a certificate request of {len(csr_pem)} bytes", reason="request")
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key = request.public_key()
        if not _is_p256(key) or not request.is_signature_valid:
            raise WireError("the certificate request is not signed by its P-256 key", reason="request")
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion) as error:
        raise WireError(f"not a certificate request: {error}", reason="request") from error
    return _spki(key)


def revocations(ca_key: bytes, ca_cert: bytes, serials: Iterable[int]) -> bytes:
    """Return a certificate revocation list, PEM, valid as long as the CA.

    Args:
        ca_key: Private key of the CA that signed the certificates, PEM.
        ca_cert: Certificate of that CA, PEM.
        serials: Serial numbers of all revoked certificates, in any order.

    Raises:
        ConfigError: The CA's key does not match its certificate.
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
    builder = builder.add_extension(x509.CRLNumber(len(numbers)), critical=False)  # only grows for one CA
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def fingerprint(cert_pem: bytes) -> bytes:
    """Return the SHA-256 of a certificate's DER, 32 bytes, with which devices verify the root."""
    return x509.load_pem_x509_certificate(cert_pem).fingerprint(hashes.SHA256())


def _check_subject(subject: Subject) -> None:
    check_site_name(subject.site)
    if subject.role == "device":
        check_device_name(subject.name)
    elif subject.role not in _FORMS or not re.fullmatch(_FORMS[subject.role], subject.name):
        raise ConfigError(f"name {subject.name!r} is not allowed for the role {subject.role}")
    if (subject.role == "gateway") != bool(subject.addresses):
        raise ConfigError("addresses {subject.addresses}: a gateway's certificate needs some, any other must have none")


def _authority(key: bytes, cert: bytes, now: datetime | None) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return certificate and key of a CA, checked against each other and, if given, against the time."""
    try:
        ca = x509.load_pem_x509_certificate(cert)
    except ValueError as error:
        raise ConfigError(f"the CA's file is not a certificate: {error}; restore it from a backup") from error
    private = _private(key)
    if ca.public_key() != private.public_key():
        raise ConfigError("the CA's key does not match its certificate; restore both from one backup")
    if now is not None and not ca.not_valid_before_utc <= now <= ca.not_valid_after_utc:
        dates = f"{ca.not_valid_before_utc:%Y-%m-%d} to {ca.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"the CA is valid from {dates}, and this machine's clock reads {now:%Y-%m-%d}: set the clock")
    return ca, private


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"not a private key: {error}; restore it from a backup") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or not _is_p256(private.public_key()):
        raise ConfigError("the private key is not of EC P-256; restore it from a backup")
    return private


def _public(spki: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(spki)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise WireError(f"not a public key: {error}", reason="request") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_p256(key):
        raise WireError("the public key is not of EC P-256", reason="request")
    return key


def _is_p256(key: object) -> bool:
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)


def _spki(key: object) -> bytes:
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _truncate_to_second(now: datetime) -> datetime:
    return now.astimezone(UTC).replace(microsecond=0)


def _expiry(now: datetime, years: float) -> datetime:
    if not 0 < years <= MAX_YEARS:
        raise ConfigError(f"{years} years: the validity of a CA must be more than 0, and {MAX_YEARS} at most")
    return _truncate_to_second(now) + years * YEAR


def _name(subject: Subject) -> x509.Name:
    pairs = ((NameOID.ORGANIZATION_NAME, subject.site), (NameOID.ORGANIZATIONAL_UNIT_NAME, subject.role))
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in (*pairs, (NameOID.COMMON_NAME, subject.name))])


def _ca_name(site: str, what: str) -> x509.Name:
    pairs = ((NameOID.ORGANIZATION_NAME, check_site_name(site)), (NameOID.COMMON_NAME, f"{site} {what}"))
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in pairs])


def check_address(address: str) -> str:
    """Return `address` if a gateway's certificate may contain it.

    Raises:
        ConfigError: It is neither a host name nor an IP address.
    """
    _alternative(address)
    return address


def _alternative(address: str) -> x509.GeneralName:
    if "%" in address:
        raise ConfigError(f"address {address!r}: boards cannot use a link-local address with a zone; choose another")
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        if len(address) > _MAX_HOST or not re.fullmatch(_HOST, address):
            raise ConfigError(f"address {address!r}: neither a host name nor an IP address") from None
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


def _certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), begin, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _ca_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
    *,
    path_length: int,
) -> x509.CertificateBuilder:
    builder = _certificate_builder(subject, issuer, key, begin, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
    return builder.add_extension(_usage(ca=True), critical=True)


def _sign(builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePublicKey) -> bytes:
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(by)
    certificate = builder.add_extension(signed_by, critical=False).sign(signer, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)
