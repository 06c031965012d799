"""X.509 operations of a board: keys, certificate requests, verification of issued certificates.

The only module of the agent that imports `cryptography`; imported only to join, to renew and to diagnose.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.errors import EnrolmentFailed

MAX_CHAIN = 8
UNREADABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType),
)
"""Exceptions of `cryptography` for malformed certificates and keys."""
OTHER_CA = 3
ROOT_PATH = 1
"""Path length of a root: one authority may follow, the site CA."""


@dataclass(frozen=True)
class Validity:
    """Validity of a certificate, UTC seconds."""

    not_before_utc_s: float
    not_after_utc_s: float


def make_key() -> bytes:
    """Return a new private key: EC P-256, PKCS #8 PEM."""
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(serialization.Encoding.PEM, form, none)


def make_certificate_request(key: bytes, device: str) -> str:
    """Return a certificate request (PEM) signed by a key; the gateway ignores the name in it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)] if device else [])
    request = (
        x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_load_private_key(key), hashes.SHA256())
    )
    return request.public_bytes(serialization.Encoding.PEM).decode()


def is_usable_key(key: bytes) -> bool:
    """Return True for a usable key: a power cut may have left half of one."""
    try:
        _load_private_key(key)
    except UNREADABLE:
        return False
    return True


def select_trusted_chain(pem: bytes, root: bytes) -> bytes:
    """Return the CA certificates covered by the token, PEM: its root and those that this root signed.

    Args:
        pem: Certificates offered, from an unverified source.
        root: SHA-256 of the root's DER, from the token.

    Raises:
        EnrolmentFailed: The token's root is not among them.
    """
    try:
        offered = x509.load_pem_x509_certificates(pem)[:MAX_CHAIN]
    except UNREADABLE:
        offered = []
    pinned = [certificate for certificate in offered if certificate.fingerprint(hashes.SHA256()) == root]
    if not pinned:
        raise EnrolmentFailed(
            "the gateway's CA is not the one that the token names; nothing secret was sent. Either the token is of "
            "another site, or the connection is intercepted: compare with `edge-server site check` on the gateway",
            code=OTHER_CA,
        )
    signed = [
        certificate for certificate in offered if certificate is not pinned[0] and _is_ca_of(certificate, pinned[0])
    ]
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in (*signed, pinned[0]))


def verify_cross_signed_root(offered_pem: bytes, trusted_pem: bytes) -> None:
    """Verify that the trusted root has cross-signed the last root offered.

    The cross-signing certificate has the same name and key and a path length of 1, which only roots have. The site CA,
    which the root signed too, has 0, so an intruder on the gateway cannot replace the site's root.

    Args:
        offered_pem: Certificates from the gateway.
        trusted_pem: Authorities in use; the last is the trusted root.

    Raises:
        EnrolmentFailed: It has not.
    """
    try:
        *offered, new = x509.load_pem_x509_certificates(offered_pem)[-MAX_CHAIN:]
        root = x509.load_pem_x509_certificates(trusted_pem)[-1]
        is_root = _path_length(new) == ROOT_PATH and _is_issued_by(new, new)
        is_cross_signed = any(_cross_signs(root, certificate, new) for certificate in offered)
    except UNREADABLE:
        is_root = is_cross_signed = False
    if not is_root or not is_cross_signed:
        raise EnrolmentFailed(
            "the gateway offers a root CA that the trusted root has not signed; the trusted root stays in use. "
            "Compare with `edge-server site check` on the gateway; if the site was set up again, join with a new token",
            code=OTHER_CA,
        )


def check_certificate(certificate: str, chain: bytes, key: bytes, device: str) -> Validity:
    """Verify an issued certificate; return its dates.

    Args:
        certificate, chain, key: PEM; the chain is from `select_trusted_chain`.
        device: Expected common name of the certificate.

    Raises:
        EnrolmentFailed: It is for another key or name, or not of this site's CA.
    """
    try:
        issued = x509.load_pem_x509_certificate(certificate.encode())
        names = [attribute.value for attribute in issued.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        signed = any(_is_issued_by(issued, ca) for ca in x509.load_pem_x509_certificates(chain))
        is_own_key = issued.public_key() == _load_private_key(key).public_key()
    except UNREADABLE as error:
        raise _unusable(str(error)) from error
    if not signed:
        raise _unusable("it is not signed by the site's CA")
    if not is_own_key or names != [device]:
        raise _unusable("it is for another key" if not is_own_key else f"it is for {names}, not for {device!r}")
    return Validity(issued.not_valid_before_utc.timestamp(), issued.not_valid_after_utc.timestamp())


def read_validity(pem: bytes) -> Validity:
    """Return the dates of the first certificate in a PEM file.

    Raises:
        EnrolmentFailed: There is none.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise EnrolmentFailed(f"contains no certificate ({error})", code=OTHER_CA) from error
    return Validity(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def _unusable(why: str) -> EnrolmentFailed:
    return EnrolmentFailed(f"the gateway issued an unusable certificate: {why}; see its log", code=OTHER_CA)


def _is_ca_of(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except UNREADABLE:
        return False
    return is_ca and _is_issued_by(certificate, root)


def _cross_signs(root: x509.Certificate, by: x509.Certificate, new: x509.Certificate) -> bool:
    """Return True if a certificate signed by a root is for another root of the same site: same name and key."""
    sites = [certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME) for certificate in (root, new)]
    is_for_it = by.subject == new.subject and by.public_key() == new.public_key() and sites[0] == sites[1]
    return is_for_it and _path_length(by) == ROOT_PATH and _is_issued_by(by, root)


def _path_length(certificate: x509.Certificate) -> int | None:
    """Return the number of authorities that may follow; None without a limit or for a non-authority."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length
    except UNREADABLE:
        return None


def _is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except UNREADABLE:
        return False
    return True


def _load_private_key(key: bytes) -> ec.EllipticCurvePrivateKey:
    private = serialization.load_pem_private_key(key, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise TypeError("not an EC key")
    return private
