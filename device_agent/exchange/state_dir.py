"""The folder in which a device keeps what must outlast its processes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shared.errors import ConfigError


def writable(folder: Path, remedy: str) -> Path:
    """Return the folder, made if it was not there.

    Raises:
        ConfigError: This user may not write there; `remedy` says where to name another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"state_dir {folder}: {error}; {remedy}") from error
