"""Certificate files of a site: read, match with keys and CAs, combine into chains.

While a site's root is replaced, two roots have signed its CA, under one name, key and serial number: who knows either
root can verify what that CA signed. See `rotation.root`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from edge_server.gateway.authority import public_key_of
from shared.errors import ConfigError

CRL_END = b"-----END X509 CRL-----\n"
CERTIFICATE_END = b"-----END CERTIFICATE-----\n"
ROOT, CA = "root.crt", "site.crt"
NEXT_ROOT, NEXT_KEY, CROSS = "root-next.crt", "root-next.key", "cross.crt"
"""The next root, its key, and its certificate signed by the present root, by which boards recognize it."""
BEFORE_CA = "site-before.crt"
"""The previous site CA, while it is still valid."""
NEXT_CA, FORMER_CA = "site-next.crt", "site-former.crt"
"""The site CA as signed by the next root, and as signed by earlier roots for devices that trust only those."""


def key_in(certificate: x509.Certificate) -> bytes:
    """Return a certificate's public key, SubjectPublicKeyInfo in DER."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(serialization.Encoding.DER, form)


def addresses_in(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return a certificate's subject alternative names, in its order."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)


def authority_id(ca: bytes) -> str:
    """Return the serial number of a CA's certificate, hexadecimal; the state refers to CAs by it."""
    return f"{x509.load_pem_x509_certificate(ca).serial_number:x}"


def find_leaf(key: Path, certificate: Path, ca: bytes, addresses: tuple[str, ...]) -> bytes:
    """Return a file's first certificate, PEM, if it matches a key, a CA and addresses; otherwise nothing.

    Args:
        certificate: File of certificates, PEM.
        ca: Certificate of the CA, PEM.
        addresses: Expected addresses, in the certificate's order.
    """
    try:
        [leaf, *_] = split_certificates(certificate.read_bytes())
        x509_leaf = x509.load_pem_x509_certificate(leaf)
        x509_leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
        matches = public_key_of(key.read_bytes()) == key_in(x509_leaf) and addresses_in(x509_leaf) == addresses
    except (OSError, ValueError, TypeError, InvalidSignature, ConfigError):
        return b""
    return leaf if matches else b""


def is_pair(key: Path, certificate: Path, chain: bytes, addresses: tuple[str, ...]) -> bool:
    """Check whether a key and a certificate match each other, the CA and the addresses, and the CA's chain follows.

    Args:
        certificate: File of certificates, PEM.
        chain: CA's certificate and its copies by other roots, PEM.
        addresses: Expected addresses, in the certificate's order.
    """
    leaf = find_leaf(key, certificate, chain, addresses)
    return bool(leaf) and certificate.read_bytes() == leaf + chain


def split_certificates(pem: bytes) -> list[bytes]:
    """Return each certificate of a PEM file that this package wrote."""
    return [block + CERTIFICATE_END for block in pem.split(CERTIFICATE_END)[:-1]]


def read_roots(ca: Path) -> bytes:
    """Return the root certificates in force, PEM: the present one, then the next while the root is replaced."""
    roots = split_certificates((ca / ROOT).read_bytes())
    next_root = _read(ca / NEXT_ROOT) if is_replacing_root(ca) else b""
    if not roots:
        raise ValueError(f"{ca / ROOT} holds no certificate: restore it from a backup, every board verifies against it")
    return roots[0] + (next_root if next_root != roots[0] else b"")


def newest_root(ca: Path) -> bytes:
    """Return the root certificate that joining devices are to trust, PEM."""
    return split_certificates(read_roots(ca))[-1]


def is_replacing_root(ca: Path) -> bool:
    """Check whether two roots are in force; false where a rotation was interrupted before that."""
    return (ca / NEXT_CA).is_file()


def read_chain(ca: Path) -> bytes:
    """Return the certificates of the authorities in force, PEM; the newest root is the last.

    The next root's certificate signed by the present root is left out: a verifier might follow it to the present root,
    whose path length allows only one CA.
    """
    site, roots = (ca / CA).read_bytes(), split_certificates(read_roots(ca))
    if is_replacing_root(ca) and (other := (ca / NEXT_CA).read_bytes()) != site:
        return site + roots[0] + other + roots[-1]
    before = _read(ca / BEFORE_CA)  # boards may send a copy signed by an older root with their certificates
    return site + (before if before != site else b"") + roots[-1]


def cross_signed_chain(ca: Path) -> bytes:
    """Return the authorities that boards download, PEM, with the cross-signed certificate before the newest root."""
    *others, newest = split_certificates(read_chain(ca))
    return b"".join(others) + _read(ca / CROSS) + newest


def signer_chain(ca: Path) -> bytes:
    """Return the chain for the package signer's certificate, PEM: the site CA as signed by each root.

    The root user of each board decides when it accepts packages of the next root.
    """
    certificates = (ca / CA).read_bytes() + _read(ca / NEXT_CA) + _read(ca / FORMER_CA)
    return b"".join(dict.fromkeys(split_certificates(certificates)))


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def are_revocation_lists(path: Path, expected: Sequence[tuple[bytes, Iterable[int]]]) -> bool:
    """Check whether a file has exactly these revocation lists, each valid as long as its CA.

    Args:
        expected: Certificate of each CA, PEM, and the serial numbers revoked.
    """
    try:
        lists = [x509.load_pem_x509_crl(block + CRL_END) for block in path.read_bytes().split(CRL_END)[:-1]]
    except (OSError, ValueError):
        return False
    matched = (_is_current_crl(crl, cert, serials) for crl, (cert, serials) in zip(lists, expected, strict=False))
    return len(lists) == len(expected) and all(matched)


def _is_current_crl(crl: x509.CertificateRevocationList, ca: bytes, serials: Iterable[int]) -> bool:
    signer = x509.load_pem_x509_certificate(ca)
    return (
        crl.issuer == signer.subject
        and crl.is_signature_valid(signer.public_key())  # type: ignore[arg-type]
        and {entry.serial_number for entry in crl} == set(serials)
        and (crl.last_update_utc, crl.next_update_utc) == (signer.not_valid_before_utc, signer.not_valid_after_utc)
    )
