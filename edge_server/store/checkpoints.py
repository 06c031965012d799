"""Server states as files, one a round, the last few kept."""

from __future__ import annotations

from pathlib import Path

from shared import tensorfile
from shared.tree import State

KEEP = 2


def path_of(folder: Path, number: int) -> Path:
    """Return where the state after round `number` lies."""
    return folder / f"round-{number:06d}.safetensors"


def save(folder: Path, number: int, state: State) -> None:
    """Write the state after a round, then remove those older than the last `KEEP`.

    Raises:
        OSError: The disk is full or cannot be written; older states are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensorfile.save(path_of(folder, number), state)
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEEP]:
        old.unlink()


def load(folder: Path, number: int) -> State:
    """Read the state after a round.

    Raises:
        FileNotFoundError: There is none.
        CorruptFile: It is damaged.
    """
    return tensorfile.load(path_of(folder, number))
