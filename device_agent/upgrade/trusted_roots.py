"""Root certificates of the sites whose agent packages this board accepts.

Only root may write the file. `cryptography` is imported late, since it takes 10 MB that an idle agent can save.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import ConfigError

MOST_ROOTS = 64 << 10


def _parse_certificates(data: bytes) -> dict[str, bytes]:
    """Return certificates as PEM, by the hexadecimal SHA-256 of their DER encoding."""
    from cryptography import x509  # noqa: PLC0415 - see the file's beginning
    from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

    return {
        hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest(): certificate.public_bytes(Encoding.PEM)
        for certificate in x509.load_pem_x509_certificates(data)
    }


def find_root(certificates: bytes, pin: str) -> bytes:
    """Find the certificate with a fingerprint; return it as PEM.

    Args:
        certificates: One or more certificates in PEM.
        pin: Hexadecimal SHA-256 of the DER encoding.

    Raises:
        ConfigError: No certificate has the fingerprint, or they cannot be parsed.
    """
    try:
        root = _parse_certificates(certificates).get(pin)
    except ValueError as error:
        raise ConfigError(f"the site's certificates cannot be parsed: {error}; join again with a new token") from error
    if root is None:
        raise ConfigError(
            f"the root with the fingerprint {pin[:16]}… is not among the site's; join again with a new token"
        )
    return root


def compute_pin(pem: bytes) -> str:
    """Return the hexadecimal SHA-256 of a certificate's DER encoding."""
    return next(iter(_parse_certificates(pem)))


def read_trusted_pins(path: Path) -> list[str]:
    """Read the fingerprints of the roots in a file; empty if there is no file.

    Raises:
        ConfigError: The file cannot be read or parsed.
    """
    try:
        with path.open("rb") as file:
            return [*_parse_certificates(file.read(MOST_ROOTS))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; write it again with `sudo device-agent upgrade trust`") from error
