"""Model files of a gossip in the run's folder, durable and served to peers.

They are named `peers/round-000010/<site>`, and `_<site>` while being received; earlier gossips are deleted then.
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
"""Raises WireError for bytes that are no model of this run."""


def round_folder(run: Path, number: int) -> Path:
    """Return the folder of the gossip after a round."""
    return run / FOLDER / f"round-{number:06d}"


def write_model(place: Path, site: str, model: Iterable[memoryview]) -> None:
    """Write our model durably, then delete earlier gossips.

    Args:
        place: Folder of the gossip.
    """
    with explain_disk_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    replace_file(place / site, b"".join(model))
    for old in place.parent.glob("round-*"):
        if old.name < place.name:
            shutil.rmtree(old, ignore_errors=True)


def store_received(fetch: Receiver[FileSink], place: Path, require: Require | None) -> None:
    """Check a complete payload and move it durably to its final name.

    Args:
        require: Raises WireError for an unacceptable model; None accepts anything.

    Raises:
        WireError: It is damaged or refused.
    """
    payload = fetch.finish()
    if require:
        require(payload)
    sync(fetch.sink.path)
    fetch.sink.path.replace(place)
    sync(place.parent)
