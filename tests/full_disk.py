"""A disk that refuses writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def refuse_writes(patch: pytest.MonkeyPatch, is_full: Callable[[], bool] = lambda: True) -> None:
    """Refuse to open files for writing where `is_full`, as a full disk refuses their content."""
    usual = Path.open

    def open_file(path: Path, mode: str = "r", *args, **options):
        if mode == "wb" and is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return usual(path, mode, *args, **options)

    patch.setattr(Path, "open", open_file)
