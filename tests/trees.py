"""Small boards of a test's own: their profile, files below a root, and files that refuse as real ones do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from device_agent.profile.schema import Profile

NOBODY = 65534


def grow(root: Path, files: Mapping[str, object]) -> Path:
    """Write the files below the root and return it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if content != "" else "")
    return root


def profile(**tables: object) -> Profile:
    """Return a profile that says no more than a test needs."""
    return Profile(schema=1, id="board", name="Board", **tables)  # type: ignore[arg-type]


@contextmanager
def busy(path: Path) -> Iterator[None]:
    """Make a file that answers EAGAIN: a pipe that is held open and into which nobody writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(holder)


@contextmanager
def open_to_all() -> Iterator[Path]:
    """Give a folder that every user may enter; pytest's own are for one user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run the block as a user without rights; root may read files of mode 0."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
