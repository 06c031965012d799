"""Checkpoints of the server state, one safetensors file a round, the last few kept; a run's journal beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from edge_server.journal.records import Journal
from edge_server.journal.sqlite import SqliteJournal
from shared.runtime.durable import explain_disk_errors
from shared.tensors import file
from shared.tensors.tree import State

KEEP = 2
SPARE = ".spare"


def checkpoint_path(folder: Path, number: int) -> Path:
    """Return where the state after round `number` lies."""
    return folder / f"round-{number:06d}.safetensors"


def save(folder: Path, number: int, state: State, *, durable: bool = True) -> None:
    """Write the state after a round, then part with those older than the last `KEEP`, and with those of void rounds.

    One of them stays as the file that the next is written into, since overwriting costs half of making one.

    Args:
        folder: Of the checkpoints.
        number: Of the round.
        state: After it.
        durable: Whether to wait until it is on the disk.

    Raises:
        Unwritable: The disk is full or cannot be written; older states are untouched.
    """
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_path(folder, number)
        file.save(path, state, spare=folder / SPARE, durable=durable)
        kept = sorted(folder.glob("round-*.safetensors"))
        until = kept.index(path) + 1
        for other in kept[: max(0, until - KEEP)] + kept[until:]:
            other.replace(folder / SPARE)


def load(folder: Path, number: int) -> State:
    """Read the state after a round.

    Raises:
        FileNotFoundError: There is none.
        CorruptFile: It is damaged.
    """
    return file.load(checkpoint_path(folder, number))


class Store(Journal, Protocol):
    """One run's journal, its checkpoints and its accepted updates."""

    def save(self, number: int, state: State) -> None:
        """Keep the server state after a round, durably. Raises Unwritable, and then nothing has changed."""
        ...

    def load(self, number: int) -> State:
        """Return the state kept after a round. Raises FileNotFoundError or CorruptFile."""
        ...


class SqliteStore(SqliteJournal):
    """The store on disk: journal, checkpoints and accepted updates in one folder a run."""

    def save(self, number: int, state: State) -> None:
        save(self.folder / "checkpoints", number, state, durable=self.durable)

    def load(self, number: int) -> State:
        return load(self.folder / "checkpoints", number)
