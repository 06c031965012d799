"""Updates on disk until the server has settled them.

An entry is a folder `<run>@<round>`: `update` (the message), `payload` (its bytes, if any) and `state` (the device's
state after this task, if it changed). It is written under another name and renamed once it is whole, so that training
and its consequences happen together or not at all.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shared import wire
from shared.durable import sync
from shared.errors import WireError
from shared.messages import Update

log = logging.getLogger(__name__)

UPDATE, PAYLOAD, STATE = "update", "payload", "state"
SPARE = ".spare"


@dataclass(frozen=True)
class Entry:
    """One update that waits for the server."""

    path: Path
    update: Update

    @property
    def payload(self) -> Path:
        """Where the update's bytes are."""
        return self.path / PAYLOAD


class Outbox:
    """The folder of entries. Reads and writes small files only; payloads are left where they are."""

    def __init__(self, folder: Path, states: Path) -> None:
        self._folder, self._states = folder, states
        folder.mkdir(parents=True, exist_ok=True)
        states.mkdir(parents=True, exist_ok=True)
        self._promote_all()

    def draft(self, run: str, number: int) -> Path:
        """Return a new folder to write an entry into; no trainer may be at work any more.

        A trainer may outlive its agent, so that only now, and not at the start, a draft that lies here is known to be
        cut short, and every state that was committed is at hand.
        """
        for partial in self._folder.glob(".*@*[0-9]"):
            shutil.rmtree(partial, ignore_errors=True)
        self._promote_all()
        path = self._folder / f".{run}@{number:06d}"
        path.mkdir()
        return path

    def commit(self, draft: Path) -> None:
        """Make a written draft an entry, if the trainer has not done so itself, and take over its state."""
        entry = committed(draft)
        if draft.exists():
            commit(draft)
        self._promote(entry)

    def add(self, update: Update) -> None:
        """Add an update without payload, such as the report of a failure."""
        draft = self.draft(update.run, update.round)
        write(draft, update)
        self.commit(draft)

    def has(self, run: str, number: int) -> bool:
        """Tell whether the update of a round waits here."""
        return (self._folder / f"{run}@{number:06d}").exists()

    def entries(self) -> list[Entry]:
        """Return what waits, oldest round first; an entry whose message cannot be read is set aside."""
        entries = []
        for path in sorted(self._folder.glob("[!.]*")):
            try:
                update = wire.decode_as(Update, (path / UPDATE).read_bytes())
            except (WireError, OSError) as error:
                aside = path.with_name(f".{path.name}.corrupt")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                log.warning("update %s cannot be read, set aside as %s: %s", path.name, aside.name, error)
                continue
            entries.append(Entry(path, update))
        return entries

    def remove(self, entry: Entry) -> None:
        """Forget an entry that the server has settled."""
        gone = entry.path.with_name(f".{entry.path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        if entry.path.exists():
            self._promote(entry.path)
            entry.path.rename(gone)
            if (gone / PAYLOAD).exists():
                (gone / PAYLOAD).replace(self._folder / SPARE)
            shutil.rmtree(gone, ignore_errors=True)

    def _promote_all(self) -> None:
        for entry in sorted(self._folder.glob("[!.]*")):
            self._promote(entry)

    def _promote(self, entry: Path) -> None:
        """Make the state that came with an entry the device's own."""
        if (entry / STATE).exists():
            (entry / STATE).replace(self._states / entry.name.rpartition("@")[0])
            sync(self._states)


def open_payload(draft: Path) -> BinaryIO:
    """Open a draft's payload to be written; cut it where the writing ends.

    It begins as the last settled one, since overwriting a file in place costs half of making one.
    """
    path, spare = draft / PAYLOAD, draft.parent / SPARE
    if spare.exists():
        spare.replace(path)
    else:
        path.touch()
    return path.open("r+b")


def write(draft: Path, update: Update) -> None:
    """Write an entry's message and make everything in the draft durable."""
    (draft / UPDATE).write_bytes(wire.encode(update))
    for file in draft.iterdir():
        sync(file)
    sync(draft)


def committed(draft: Path) -> Path:
    """Return the path a draft has once it is an entry."""
    return draft.with_name(draft.name.removeprefix("."))


def commit(draft: Path) -> None:
    """Rename a whole draft to its entry; an entry of the same name is replaced."""
    entry = committed(draft)
    shutil.rmtree(entry, ignore_errors=True)
    draft.rename(entry)
    sync(entry.parent)
