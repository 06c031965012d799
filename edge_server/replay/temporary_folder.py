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

MEMORY_PREFIX, PART_PREFIX = "fieldfleet", ".replay"
"""Of what a replay needs while it lasts, and of the record that it makes."""


LOCK = "lock"
"""The file that `held` makes: what has none is not ours to remove."""


@contextmanager
def folder_in(place: Path | None, prefix: str = MEMORY_PREFIX) -> Iterator[Path]:
    """Lend a folder in `place`, None for the usual temporary one; it is held, and gone after the block."""
    if place is not None:
        sweep(place, prefix)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}-{os.getpid()}-", dir=place) as name, hold_lock(Path(name)):
        yield Path(name)


def sweep(place: Path, prefix: str = MEMORY_PREFIX) -> None:
    """Remove the folders that nobody holds any more: the lock of a process falls with it, however it ends."""
    for lock in place.glob(f"{prefix}-*-*/{LOCK}"):
        try:
            with hold_lock(lock.parent):
                shutil.rmtree(lock.parent, ignore_errors=True)
        except (ConfigError, OSError):
            continue  # somebody is at it, or it is another user's
