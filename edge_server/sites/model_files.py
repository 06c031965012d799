"""Models of one gossip as files of the run's folder: our own to be served, each neighbour's once it is whole.

They lie in `peers/round-000010/<site>`, and in `_<site>` while they come; those of earlier gossips go then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from shared.runtime.durable import explain_disk_errors, replace_file, sync
from shared.transfer.receiver import Receiver
from shared.transfer.to_file import FileSink

FOLDER = "peers"

Require: TypeAlias = Callable[[memoryview], None]
"""Refuses, with a WireError, bytes that are no model of this run's."""


def round_folder(run: Path, number: int) -> Path:
    """Return where the models of the gossip after a round lie."""
    return run / FOLDER / f"round-{number:06d}"


def write_own(place: Path, site: str, model: Iterable[memoryview]) -> None:
    """Write our model durably, then part with the gossips before it.

    Args:
        place: Folder of the gossip.
    """
    with explain_disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    replace_file(place / site, b"".join(model))
    for old in place.parent.glob("round-*"):
        if old.name < place.name:
            shutil.rmtree(old, ignore_errors=True)


def take_whole(fetch: Receiver[FileSink], place: Path, require: Require | None) -> None:
    """Refuse a whole payload that is no model; else it is on the disk under its own name when this returns.

    Args:
        require: Refuses what is no model; None takes anything.

    Raises:
        WireError: It is none.
    """
    whole = fetch.finish()
    if require:
        require(whole)
    sync(fetch.sink.path)
    fetch.sink.path.replace(place)
    sync(place.parent)
