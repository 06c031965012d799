"""What a board does with X.509: its key, its request, and whether what it was given is what it asked for.

The only file of the agent that imports `cryptography`, and it is imported only to join and to renew.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.errors import EnrolmentFailed

MOST_CHAIN = 8
UNREADABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType),
)
"""What `cryptography` raises of certificates and keys that are none."""
OTHER_CA = 3
ROOT_PATH = 1
"""Authorities that may follow a root: the site CA."""


@dataclass(frozen=True)
class Dates:
    """From when and until when a certificate is valid, calendar seconds."""

    not_before_utc_s: float
    not_after_utc_s: float


def make_key() -> bytes:
    """Return a new private key, EC P-256, PKCS #8 PEM."""
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(serialization.Encoding.PEM, form, none)


def make_request(key: bytes, device: str) -> str:
    """Return a certificate request (PEM) signed by a key; the gateway does not read the name in it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, device)] if device else [])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_private(key), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def is_key(key: bytes) -> bool:
    """Tell whether a file's content is a key that can be used: a power cut may have left half of one."""
    try:
        _private(key)
    except UNREADABLE:
        return False
    return True


def trusted_chain(pem: bytes, root: bytes) -> bytes:
    """Return the CA certificates that the token vouches for: its root, and what that root signed; PEM.

    Args:
        pem: What the gateway, or somebody else, offers.
        root: SHA-256 of the root's DER, from the token.

    Raises:
        EnrolmentFailed: The token's root is not among them.
    """
    try:
        offered = x509.load_pem_x509_certificates(pem)[:MOST_CHAIN]
    except UNREADABLE:
        offered = []
    pinned = [certificate for certificate in offered if certificate.fingerprint(hashes.SHA256()) == root]
    if not pinned:
        raise EnrolmentFailed(
            "the gateway shows another CA than the token names; nothing secret was sent. Either the token is of "
            "another site, or somebody stands between: compare with `edge-server site check` on the gateway",
            code=OTHER_CA,
        )
    signed = [certificate for certificate in offered if certificate is not pinned[0] and _is_ca_of(certificate, pinned[0])]
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in (*signed, pinned[0]))


def check_next_root(offered_pem: bytes, trusted_pem: bytes) -> None:
    """Refuse the root that is the last of those shown unless the one that is trusted here vouches for it.

    It does by a certificate for the same name and key with a path length of 1, which roots have: the site CA, which
    it signed too, has 0, so that whoever took over a gateway cannot put a root of their own in the site's place.

    Args:
        offered_pem: What the gateway offers, PEM.
        trusted_pem: The authorities in use here; the last is the root that is trusted, PEM.

    Raises:
        EnrolmentFailed: It does not.
    """
    try:
        *offered, new = x509.load_pem_x509_certificates(offered_pem)[-MOST_CHAIN:]
        root = x509.load_pem_x509_certificates(trusted_pem)[-1]
        is_root = _path_length(new) == ROOT_PATH and _is_issued_by(new, new)
        is_vouched = any(_vouches(root, certificate, new) for certificate in offered)
    except UNREADABLE:
        is_root = is_vouched = False
    if not is_root or not is_vouched:
        raise EnrolmentFailed(
            "the gateway shows a root for which the one that this board trusts does not vouch; it stays with its own. "
            "Compare with `edge-server site check` on the gateway; if the site was made anew, join by a new token",
            code=OTHER_CA,
        )


def check_certificate(certificate: str, chain: bytes, key: bytes, device: str) -> Dates:
    """Return the dates of a certificate that is what was asked for.

    Args:
        certificate: What was given, PEM.
        chain: As `trusted_chain` returned it.
        device: Whom it must be for.

    Raises:
        EnrolmentFailed: It is for another key or name, or not of this site's CA.
    """
    try:
        issued = x509.load_pem_x509_certificate(certificate.encode())
        names = [attribute.value for attribute in issued.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        signed = any(_is_issued_by(issued, ca) for ca in x509.load_pem_x509_certificates(chain))
        is_own_key = issued.public_key() == _private(key).public_key()
    except UNREADABLE as error:
        raise _wrong(str(error)) from error
    if not signed:
        raise _wrong("it is not signed by the site's CA")
    if not is_own_key or names != [device]:
        raise _wrong("it is for another key" if not is_own_key else f"it is for {names}, not for {device!r}")
    return Dates(issued.not_valid_before_utc.timestamp(), issued.not_valid_after_utc.timestamp())


def dates_in(pem: bytes) -> Dates:
    """Return the dates of the first certificate of a file.

    Raises:
        EnrolmentFailed: It holds none.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise EnrolmentFailed(f"holds no certificate ({error})", code=OTHER_CA) from error
    return Dates(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def _wrong(why: str) -> EnrolmentFailed:
    return EnrolmentFailed(f"the gateway gave a certificate that cannot be used: {why}; look at its log", code=OTHER_CA)


def _is_ca_of(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except UNREADABLE:
        return False
    return is_ca and _is_issued_by(certificate, root)


def _vouches(root: x509.Certificate, by: x509.Certificate, new: x509.Certificate) -> bool:
    """Tell whether a root's certificate is for another root: the same name, of the same site, and key."""
    sites = [certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME) for certificate in (root, new)]
    is_for_it = by.subject == new.subject and by.public_key() == new.public_key() and sites[0] == sites[1]
    return is_for_it and _path_length(by) == ROOT_PATH and _is_issued_by(by, root)


def _path_length(certificate: x509.Certificate) -> int | None:
    """Return how many authorities may follow one; None for what is none, or sets no limit."""
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


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    private = serialization.load_pem_private_key(key, None)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise TypeError("not an EC key")
    return private
