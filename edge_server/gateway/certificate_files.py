"""What files of certificates hold, read: whose they are, whether they belong together and are what they should be.

While a site's root is replaced, two roots have signed its CA, under one name, key and number: whoever knows either can
verify what that CA signed. What the files of both are made into for the others is here too; `rotation.root` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from edge_server.gateway.authority import public_key_of
from shared.errors import ConfigError

END = b"-----END X509 CRL-----\n"
END_OF_ONE = b"-----END CERTIFICATE-----\n"
ROOT, CA = "root.crt", "site.crt"
NEXT_ROOT, NEXT_KEY, CROSS = "root-next.crt", "root-next.key", "cross.crt"
"""The next root, its key, and its certificate by the root before: by that boards know that it is the one."""
BEFORE_CA = "site-before.crt"
"""The site CA before, while it is good still."""
NEXT_CA, FORMER_CA = "site-next.crt", "site-former.crt"
"""The site CA as the next root signed it; as roots before did, for who has no other."""


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


def find_leaf(key: Path, certificate: Path, ca: bytes, addresses: tuple[str, ...]) -> bytes:
    """Return a file's first certificate, PEM, if it is a key's, a CA's, and for these addresses; else nothing.

    Args:
        certificate: PEM; the first in its file.
        ca: The CA's certificate, PEM.
        addresses: In the certificate's order.
    """
    try:
        [leaf, *_] = split_certificates(certificate.read_bytes())
        found = x509.load_pem_x509_certificate(leaf)
        found.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
        is_ours = public_key_of(key.read_bytes()) == key_in(found) and addresses_in(found) == addresses
    except (OSError, ValueError, TypeError, InvalidSignature, ConfigError):
        return b""
    return leaf if is_ours else b""


def is_pair(key: Path, certificate: Path, chain: bytes, addresses: tuple[str, ...]) -> bool:
    """Tell whether a key and a certificate are there and right, and the certificate's file ends with its CA's.

    Args:
        certificate: PEM; the first in its file.
        chain: What is to follow it: the CA's certificate, and copies of it by other roots, PEM.
        addresses: In the certificate's order.
    """
    leaf = find_leaf(key, certificate, chain, addresses)
    return bool(leaf) and certificate.read_bytes() == leaf + chain


def split_certificates(pem: bytes) -> list[bytes]:
    """Return each certificate of a file of ours, PEM."""
    return [one + END_OF_ONE for one in pem.split(END_OF_ONE)[:-1]]


def roots_of(ca: Path) -> bytes:
    """Return the site's root certificates, PEM: the one in force, and behind it the next while it is replaced.

    Args:
        ca: The folder of the authorities.
    """
    found, other = split_certificates((ca / ROOT).read_bytes()), _next_root(ca)
    if not found:
        raise ValueError(
            f"{ca / ROOT} holds no certificate: bring it back from a copy, for every board compares with it"
        )
    return found[0] + (other if other != found[0] else b"")


def newest_root(ca: Path) -> bytes:
    """Return the root that who joins now is to trust, PEM.

    Args:
        ca: The folder of the authorities.
    """
    return split_certificates(roots_of(ca))[-1]


def is_replacing_root(ca: Path) -> bool:
    """Tell whether two roots are in force; that a rotation was begun and cut short before is none yet.

    Args:
        ca: The folder of the authorities.
    """
    return (ca / NEXT_CA).is_file()


def chain_of(ca: Path) -> bytes:
    """Return the authorities that are in force, PEM: the newest root is the last.

    What the root before says of the next is not among them: whoever verifies might take it for the root itself, and
    come to the root before, which lets no more than one authority follow it.

    Args:
        ca: The folder of the authorities.
    """
    site, roots = (ca / CA).read_bytes(), split_certificates(roots_of(ca))
    if is_replacing_root(ca) and (other := (ca / NEXT_CA).read_bytes()) != site:
        return site + roots[0] + other + roots[-1]
    before = _read(ca / BEFORE_CA)  # boards may show an older root's copy of it with their certificates
    return site + (before if before != site else b"") + roots[-1]


def offered_chain(ca: Path) -> bytes:
    """Return what boards are offered, PEM: the authorities, and before the newest root who vouches for it.

    Args:
        ca: The folder of the authorities.
    """
    *others, newest = split_certificates(chain_of(ca))
    return b"".join(others) + _read(ca / CROSS) + newest


def signers_chain(ca: Path) -> bytes:
    """Return what follows the certificate of who signs packages, PEM: the site CA as each root signed it.

    Boards' own root users write down which root's packages are taken, in their own time.

    Args:
        ca: The folder of the authorities.
    """
    found = (ca / CA).read_bytes() + _read(ca / NEXT_CA) + _read(ca / FORMER_CA)
    return b"".join(dict.fromkeys(split_certificates(found)))


def _next_root(ca: Path) -> bytes:
    return _read(ca / NEXT_ROOT) if is_replacing_root(ca) else b""


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def are_revocation_lists(path: Path, wanted: Sequence[tuple[bytes, Iterable[int]]]) -> bool:
    """Tell whether a file has these CAs' lists with exactly these numbers, good for as long as the CA, and no others.

    Args:
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
