"""Fingerprint of growing files: unchanged while no file was added, removed or written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from shared.data.spec import Data

Fingerprint: TypeAlias = tuple[int, int, int]
"""Number of files, their bytes, and the newest time of writing in nanoseconds."""


def fingerprint(spec: Data) -> Fingerprint | None:
    """Return the fingerprint of a growing data set's files; None where files are taken not to change.

    An SQLite file's log of writes counts too.
    """
    if not spec.growing or not spec.path:
        return None
    path = Path(spec.path)
    files = [path, Path(f"{path}-wal")] if not path.is_dir() else _walk(path)
    count, size, newest = 0, 0, 0
    for file in files:
        try:
            status = file.stat()
        except OSError:  # removed meanwhile
            continue
        count, size, newest = count + 1, size + status.st_size, max(newest, status.st_mtime_ns)
    return count, size, newest


def _walk(folder: Path) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names]
