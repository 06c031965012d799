"""SHA-256 of a file, with the standard library of every supported version."""

from __future__ import annotations

import hashlib
from pathlib import Path

PART_BYTES = 1 << 18


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            hasher.update(part)
    return hasher.hexdigest()
