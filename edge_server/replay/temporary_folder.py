"""Locked temporary folders of replays; removes those that killed replays left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError
from shared.runtime.folder_lock import hold_lock

# Name prefixes of a replay's temporary files and of the run that it is writing.
MEMORY_PREFIX, PART_PREFIX = "fieldfleet", ".replay"


# Name of the file that `hold_lock` makes; folders without it are not removed.
LOCK = "lock"


@contextmanager
def folder_in(place: Path | None, prefix: str = MEMORY_PREFIX) -> Iterator[Path]:
    """Yield a locked temporary folder in `place`, or in the default one if None; it is removed after the block."""
    if place is not None:
        sweep(place, prefix)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-{os.getpid()}-", dir=place) as name, hold_lock(Path(name)):
        yield Path(name)


def sweep(place: Path, prefix: str = MEMORY_PREFIX) -> None:
    """Remove folders whose lock is free: a lock is released when its process ends, however it ends."""
    for lock in place.glob(f"{prefix}-*-*/{LOCK}"):
        try:
            with hold_lock(lock.parent):
                shutil.rmtree(lock.parent, ignore_errors=True)
        except (ConfigError, OSError):
            continue  # in use, or owned by another user
