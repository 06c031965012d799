"""The root certificates whose sites may give this board new versions of its agent: root's file, by root's own word.

`cryptography` is imported where it is used: it is 10 MB that an idle agent does without.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ConfigError

MOST_ROOTS = 64 << 10


def find_root(certificates: bytes, pin: str) -> bytes:
    """Return the certificate among others that has a fingerprint, PEM.

    Args:
        pin: SHA-256 of the wanted one's DER, hexadecimal.

    Raises:
        ConfigError: None has.
    """
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    try:
        pems = [certificate.public_bytes(Encoding.PEM) for certificate in x509.load_pem_x509_certificates(certificates)]
    except ValueError as error:
        raise ConfigError(f"the site's certificates cannot be read: {error}; join anew by a new token") from error
    root = next((pem for pem in pems if compute_pin(pem) == pin), None)
    if root is None:
        raise ConfigError(
            f"the root with the fingerprint {pin[:16]}… is not among the site's; join anew by a new token"
        )
    return root


def compute_pin(pem: bytes) -> str:
    """Return the SHA-256 of a certificate's DER, hexadecimal."""
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    return hashlib.sha256(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)).hexdigest()


def read_trusted_pins(path: Path) -> list[str]:
    """Return the fingerprints of the roots in a file; none where there is no file.

    Raises:
        ConfigError: It cannot be read, or holds none.
    """
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    try:
        with path.open("rb") as file:
            certificates = x509.load_pem_x509_certificates(file.read(MOST_ROOTS))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; write it anew, `sudo device-agent upgrade trust`") from error
    return [hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest() for certificate in certificates]
