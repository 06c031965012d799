"""What files of certificates hold, read: whose they are, whether they belong together and are what they should be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from edge_server.gateway.authority import public_key_of
from shared.errors import ConfigError

END = b"-----END X509 CRL-----\n"


def key_in(certificate: x509.Certificate) -> bytes:
    """Return a certificate's public key, SubjectPublicKeyInfo in DER."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(serialization.Encoding.DER, form)


def addresses_in(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the addresses that a certificate is for, in its order."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(one.value) for one in names)


def authority_id(ca: bytes) -> str:
    """Return by what the state names a CA: its certificate's number, hexadecimal."""
    return f"{x509.load_pem_x509_certificate(ca).serial_number:x}"


def is_pair(key: Path, certificate: Path, ca: Path, addresses: tuple[str, ...]) -> bool:
    """Tell whether a key and a certificate are there, belong together, are a CA's, and are for these addresses.

    Args:
        key: PEM.
        certificate: PEM; the first in its file.
        ca: The CA's certificate, PEM.
        addresses: In the certificate's order.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.read_bytes()))
        return public_key_of(key.read_bytes()) == key_in(found) and addresses_in(found) == addresses
    except (OSError, ValueError, TypeError, InvalidSignature, ConfigError):
        return False


def are_revocation_lists(path: Path, wanted: Sequence[tuple[bytes, Iterable[int]]]) -> bool:
    """Tell whether a file has these CAs' lists with exactly these numbers, good for as long as the CA, and no others.

    Args:
        path: Of the file.
        wanted: The certificate of each CA, PEM, and what is to be revoked of it.
    """
    try:
        lists = [x509.load_pem_x509_crl(one + END) for one in path.read_bytes().split(END)[:-1]]
    except (OSError, ValueError):
        return False
    matched = (_lists(one, cert, serials) for one, (cert, serials) in zip(lists, wanted, strict=False))
    return len(lists) == len(wanted) and all(matched)


def _lists(found: x509.CertificateRevocationList, ca: bytes, serials: Iterable[int]) -> bool:
    signer = x509.load_pem_x509_certificate(ca)
    return (
        found.issuer == signer.subject
        and found.is_signature_valid(signer.public_key())  # type: ignore[arg-type]
        and {entry.serial_number for entry in found} == set(serials)
        and (found.last_update_utc, found.next_update_utc) == (signer.not_valid_before_utc, signer.not_valid_after_utc)
    )
