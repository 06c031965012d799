"""Updates on disk until the server has settled them.

An entry is a folder `<run>@<round>`: `update` (the message and its digest), `payload` (its bytes, if any), `state`
(the device's state after this task, if it changed) and `own` (the model of its own, if the board serves it). It is
written under another name and renamed once it is whole, so that training and its consequences happen together or not at
all.

An update is never dropped before it is settled: where there is no room, the next task fails. Reports of failures are
dropped, oldest first.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from device_agent.exchange import state_files as states
from shared.errors import TaskFailed, Unwritable, WireError
from shared.protocol import payload, wire
from shared.protocol.messages import Update
from shared.runtime.durable import drop_oldest, explain_disk_errors, sync
from shared.transfer import to_file

log = logging.getLogger(__name__)

UPDATE, PAYLOAD, STATE, OWN = "update", "payload", "state", "own"
SPARE = ".spare"
DIGEST_BYTES = 16
LIMIT_BYTES = 4096 << 20
PRIVATE = 0o700
REPORTS = 100
"""Failures that wait at most."""


@dataclass(frozen=True)
class Entry:
    """One update that waits for the server."""

    path: Path
    update: Update

    @property
    def payload(self) -> Path:
        """Where the update's bytes are."""
        return self.path / PAYLOAD

    @cached_property
    def content(self) -> memoryview:
        """A view of the update's bytes. Raises FileNotFoundError where they are gone."""
        return to_file.view(self.payload)


class Outbox:
    """The folder of entries. Reads and writes small files only; payloads are left where they are.

    Args:
        states: Where the device's states lie.
        limit: Most bytes of updates that may wait.

    Attributes:
        states, limit: As above.
        own_changed: Called when a newer model of the device's own lies beside its states.

    Raises:
        Unwritable: The folders are not there and cannot be made.
    """

    def __init__(self, folder: Path, states: Path, limit: int = LIMIT_BYTES) -> None:
        self._folder, self.states, self.limit = folder, states, limit
        self.own_changed: Callable[[], None] = lambda: None
        self._make_folders()
        try:
            self._promote(*self._waiting())
        except OSError as error:
            log.warning("the state after the last task is taken over with the next one: %s", error)

    def check(self) -> None:
        """Set aside every entry that is not as it was written. Reads all payloads: not for the event loop."""
        for entry in self.entries():
            try:
                if (params := entry.update.params) and payload.digest([entry.content]) != params.digest:
                    self._set_aside(entry.path, WireError("digest of its payload does not hold", reason="digest"))
            except FileNotFoundError as error:
                self._set_aside(entry.path, error)

    def reserve(self, size: int) -> None:
        """Make sure that an update of `size` bytes may wait here beside the others.

        Raises:
            TaskFailed: There are too many.
        """
        waiting = sum(file.stat().st_size for path in self._waiting() for file in path.glob("*"))
        if waiting + size > self.limit:
            raise TaskFailed(
                f"{self._folder}: {waiting / (1 << 20):.1f} MiB wait for the server, the next update may take "
                f"{size / (1 << 20):.1f} more: raise outbox_mb ({self.limit >> 20}), or let it reach its server"
            )

    def draft(self, run: str, number: int) -> Path:
        """Return a new folder to write an entry into; no trainer may be at work any more.

        A trainer may outlive its agent, so that only now, and not at the start, a draft that lies here is known to be
        cut short, and every state that was committed is at hand.

        Raises:
            Unwritable: The disk takes nothing more.
        """
        self._make_folders()
        for partial in self._folder.glob(".*@*[0-9]"):
            shutil.rmtree(partial, ignore_errors=True)
        self._promote(*self._waiting())
        path = self._folder / f".{_name(run, number)}"
        with explain_disk_errors(path):
            path.mkdir()
        return path

    def commit(self, draft: Path) -> None:
        """Make a written draft an entry, if the trainer has not done so itself, and take over its state.

        Raises:
            Unwritable: The disk takes nothing more; the entry may be there all the same.
        """
        entry = committed(draft)
        if draft.exists():
            commit(draft)
        self._promote(entry)

    def add(self, update: Update) -> None:
        """Add an update without payload, such as the report of a failure; of reports, the newest stay.

        Raises:
            Unwritable: The disk takes nothing more.
        """
        reports = [entry for entry in self.entries() if entry.update.failure is not None]
        for entry in reports[: max(0, len(reports) - REPORTS + 1)]:
            self.remove(entry)
        draft = self.draft(update.run, update.round)
        write(draft, update)
        self.commit(draft)

    def has(self, run: str, number: int, start: bytes) -> bool:
        """Tell whether the update of a round, trained from the parameters of digest `start`, waits here.

        Args:
            run: Name of the run.
            start: Digest of what the update began from.
        """
        path = self._folder / _name(run, number)
        waiting = (entry.update for entry in self._read([path] if path.exists() else []))
        return any((one.run, one.round, one.start) == (run, number, start) for one in waiting)

    def entries(self) -> list[Entry]:
        """Return what waits, oldest round first; an entry whose message is not as it was written is set aside."""
        return self._read(self._waiting())

    def _read(self, paths: Iterable[Path]) -> list[Entry]:
        entries = []
        for path in paths:
            try:
                entries.append(Entry(path, read(path)))
            except (WireError, FileNotFoundError, NotADirectoryError) as error:
                self._set_aside(path, error)
            except OSError as error:  # of the moment, such as too many open files: no reason to give an update up
                log.warning("update %s cannot be read now: %s", path.name, error)
        return entries

    def forget(self, ended: Iterable[str]) -> None:
        """Part with the states of runs that their server says are over, the newest first."""
        states.forget(self.states, ended)

    def remove(self, entry: Entry) -> None:
        """Forget an entry that the server has settled; one that cannot be removed is offered and settled again."""
        gone = entry.path.with_name(f".{entry.path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        try:
            if not entry.path.exists() or read(entry.path) != entry.update:
                return  # gone before, or a newer one of the same round took its place meanwhile
            self._promote(entry.path)
            with explain_disk_errors(entry.path):
                entry.path.rename(gone)
                with suppress(FileNotFoundError):  # of an update without parameters
                    (gone / PAYLOAD).replace(self._folder / SPARE)
        except (OSError, WireError) as error:
            log.warning("update %s is settled but stays here: %s", entry.path.name, error)
        shutil.rmtree(gone, ignore_errors=True)

    def _waiting(self) -> list[Path]:
        """Return the folders of entries, oldest round first; what begins with a dot is none."""
        try:
            with os.scandir(self._folder) as found:  # much sooner than `iterdir` where nothing waits, as nearly always
                return [self._folder / name for name in sorted(one.name for one in found) if name[0] != "."]
        except FileNotFoundError:
            lost = "with what waited in it for the server"
            log.warning("%s was deleted, %s; it is made anew", self._folder, lost)
            self._make_folders()
            return []

    def _make_folders(self) -> None:
        """Make the folders that are not there; nobody but this user looks into them.

        Raises:
            Unwritable: They cannot be made.
        """
        for folder in (self._folder, self.states):
            if _is_private(folder):
                continue
            try:
                with explain_disk_errors(folder):
                    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
                    if not _is_private(folder):  # of versions before
                        folder.chmod(PRIVATE)
            except Unwritable:
                raise
            except OSError as error:
                raise Unwritable(
                    f"{folder}: {error.strerror}; let this user write in state_dir, or name another"
                ) from error

    def _set_aside(self, path: Path, cause: Exception) -> None:
        """Put a corrupt entry where nobody reads it; the last few are kept for whoever looks."""
        aside = path.with_name(f".{path.name}.corrupt")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            with explain_disk_errors(path):
                path.rename(aside)
                drop_oldest(self._folder.glob(".*.corrupt"))
            log.warning("update %s is corrupt, set aside as %s: %s", path.name, aside.name, cause)
        except OSError as error:
            log.warning("update %s is corrupt (%s) and cannot be set aside: %s", path.name, cause, error)

    def _promote(self, *entries: Path) -> None:
        """Make the states and models that came with entries the device's own."""
        for entry in entries:
            if (entry / STATE).exists():
                states.promote(entry / STATE, self.states)
            if (entry / OWN).exists():
                states.promote_own(entry / OWN, self.states)
                self.own_changed()


def _name(run: str, number: int) -> str:
    return f"{run}@{number:06d}"


def _is_private(folder: Path) -> bool:
    """Tell whether a folder is there that only this user looks into."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False  # whoever makes it will hear why it cannot be seen
    return stat.S_ISDIR(mode) and mode & 0o777 == PRIVATE


def open_payload(draft: Path) -> BinaryIO:
    """Open a draft's payload to be written; cut it where the writing ends.

    It begins as the last settled one, since overwriting a file in place costs half of making one.
    """
    path, spare = draft / PAYLOAD, draft.parent / SPARE
    with suppress(FileNotFoundError):
        spare.replace(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")


def write(draft: Path, update: Update) -> None:
    """Write an entry's message and make everything in the draft durable.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    message = wire.encode(update)
    with explain_disk_errors(draft):
        (draft / UPDATE).write_bytes(message + payload.digest([memoryview(message)]))
        for file in draft.iterdir():
            sync(file)
        sync(draft)


def read(folder: Path) -> Update:
    """Return an entry's message.

    Raises:
        WireError: It is not as it was written.
        OSError: It cannot be read.
    """
    data = memoryview((folder / UPDATE).read_bytes())
    message, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if payload.digest([message]) != digest:
        raise WireError("digest of its message does not hold", reason="digest")
    return wire.decode_as(Update, bytes(message))


def committed(draft: Path) -> Path:
    """Return the path a draft has once it is an entry."""
    return draft.with_name(draft.name.removeprefix("."))


def commit(draft: Path) -> None:
    """Rename a whole draft to its entry; an entry of the same name is replaced.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    entry = committed(draft)
    shutil.rmtree(entry, ignore_errors=True)
    with explain_disk_errors(draft):
        draft.rename(entry)
        sync(entry.parent)
