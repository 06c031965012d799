"""Durable outbox of updates that the server has not acknowledged yet.

An entry is a folder `<run>@<round>`: `update` (the message and its digest), `payload` (its bytes, if any), `state` (the
device's state after this task, if it changed) and `own` (its personal model, if the board serves one). It is written
under another name and renamed when complete, so that a training and its effects are committed together or not at all.

An update is never dropped before it is acknowledged: if there is no room, the next task fails. Failure reports are
dropped, oldest first.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
SPARE = ".spare-entry"
"""The last acknowledged entry, which the next draft overwrites: that takes half as long as creating its files."""
OLD_SPARE = ".spare"
"""Spare payload of earlier versions."""
DIGEST_BYTES = 16
LIMIT_BYTES = 4096 << 20
PRIVATE = 0o700
REPORTS = 100
"""Most pending failure reports."""


@dataclass(frozen=True)
class Entry:
    """One pending update."""

    path: Path
    update: Update

    @property
    def payload(self) -> Path:
        """File of the update's bytes."""
        return self.path / PAYLOAD

    @cached_property
    def content(self) -> memoryview:
        """View of the update's bytes. Raises FileNotFoundError if they are missing."""
        return to_file.view(self.payload)


class Outbox:
    """Folder of pending updates. Reads and writes small files only; payloads stay on disk.

    Args:
        states: Folder of the device's states.
        limit: Most bytes of pending updates.

    Attributes:
        states, limit: As above.
        own_changed: Called when a newer personal model was stored beside the states.

    Raises:
        Unwritable: The folders do not exist and cannot be created.
    """

    def __init__(self, folder: Path, states: Path, limit: int = LIMIT_BYTES) -> None:
        self._folder, self.states, self.limit = folder, states, limit
        self.own_changed: Callable[[], None] = lambda: None
        self._make_folders()
        with suppress(OSError):
            (folder / OLD_SPARE).unlink(missing_ok=True)
        try:
            _restore_names(self.entries())
            self._promote(*self._entry_folders())
        except OSError as error:
            log.warning("state of the last task not promoted, retried with the next task: %s", error)

    def check(self) -> None:
        """Quarantine every corrupt entry. Reads all payloads: not for the event loop."""
        for entry in self.entries():
            try:
                if (params := entry.update.params) and payload.digest([entry.content]) != params.digest:
                    self._set_aside(entry.path, WireError("payload does not match its digest", reason="digest"))
            except FileNotFoundError as error:
                self._set_aside(entry.path, error)

    def reserve(self, size: int) -> None:
        """Check that an update of `size` bytes fits beside the pending ones.

        Raises:
            TaskFailed: The limit would be exceeded.
        """
        waiting_bytes = sum(file.stat().st_size for path in self._entry_folders() for file in path.glob("*"))
        if waiting_bytes + size > self.limit:
            raise TaskFailed(
                f"{self._folder}: {waiting_bytes / (1 << 20):.1f} MiB are pending and the next update may need "
                f"{size / (1 << 20):.1f} more; raise outbox_mb ({self.limit >> 20}) or restore the link to the server"
            )

    def draft(self, run: str, number: int) -> Path:
        """Return a new folder for an entry; call it only when no trainer is running.

        A trainer may outlive its agent. So only now, not at the start, is a leftover draft known to be incomplete and
        every committed state available.

        Raises:
            Unwritable: The disk is full or read-only.
        """
        self._make_folders()
        for name in _list_names(self._folder):
            if fnmatchcase(name, ".*@*[0-9]"):
                shutil.rmtree(self._folder / name, ignore_errors=True)
        self._promote(*self._entry_folders())
        path = self._folder / f".{_name(run, number)}"
        with explain_disk_errors(path):
            try:
                (self._folder / SPARE).rename(path)
            except FileNotFoundError:
                path.mkdir()
        return path

    def commit(self, draft: Path) -> None:
        """Turn a written draft into an entry, unless the trainer has done so, and promote its state.

        Raises:
            Unwritable: The disk is full or read-only; the entry may exist all the same.
        """
        entry = entry_path(draft)
        if draft.exists():
            commit(draft)
        self._promote(entry)

    def add(self, update: Update) -> None:
        """Add an update without payload, such as a failure report; retain the newest reports.

        Raises:
            Unwritable: The disk is full or read-only.
        """
        reports = [entry for entry in self.entries() if entry.update.failure is not None]
        for entry in reports[: max(0, len(reports) - REPORTS + 1)]:
            self.remove(entry)
        draft = self.draft(update.run, update.round)
        write(draft, update)
        self.commit(draft)

    def has(self, run: str, number: int, start: bytes) -> bool:
        """Return True if the update of a round is pending that began from parameters of digest `start`."""
        path = self._folder / _name(run, number)
        updates = (entry.update for entry in self._read([path] if path.exists() else []))
        return any((update.run, update.round, update.start) == (run, number, start) for update in updates)

    def entries(self) -> list[Entry]:
        """Return the pending updates, oldest round first; quarantine entries with a corrupt message."""
        return self._read(self._entry_folders())

    def _read(self, paths: Iterable[Path]) -> list[Entry]:
        entries = []
        for path in paths:
            try:
                entries.append(Entry(path, read(path)))
            except (WireError, FileNotFoundError, NotADirectoryError) as error:
                self._set_aside(path, error)
            except OSError as error:  # may be temporary, such as too many open files: retain the update
                log.warning("update %s cannot be read now: %s", path.name, error)
        return entries

    def forget(self, ended: Iterable[str]) -> None:
        """Delete the states of runs that the server reports as ended, newest first."""
        states.forget_ended(self.states, ended)

    def remove(self, entry: Entry) -> None:
        """Remove an acknowledged entry; one that cannot be removed is offered and acknowledged again."""
        target = self._folder / SPARE
        try:
            if read(entry.path) != entry.update:
                return  # replaced by a newer update of the same round
            self._promote(entry.path)
            is_reusable = PAYLOAD in _list_names(entry.path) and not target.exists()
            if not is_reusable:
                target = entry.path.with_name(f".{entry.path.name}")
                shutil.rmtree(target, ignore_errors=True)
            with explain_disk_errors(entry.path):
                entry.path.rename(target)
            if not is_reusable:
                shutil.rmtree(target, ignore_errors=True)
        except FileNotFoundError:
            return  # already removed
        except (OSError, WireError) as error:
            log.warning("update %s is settled but cannot be removed: %s", entry.path.name, error)

    def _entry_folders(self) -> list[Path]:
        """Return the folders of entries, oldest round first; names with a leading dot are not entries."""
        try:
            return [self._folder / name for name in sorted(_list_names(self._folder)) if name[0] != "."]
        except FileNotFoundError:
            log.warning("%s was deleted, and pending updates with it; creating it again", self._folder)
            self._make_folders()
            return []

    def _make_folders(self) -> None:
        """Create missing folders with access for this user only.

        Raises:
            Unwritable: They cannot be created.
        """
        for folder in (self._folder, self.states):
            if _is_private(folder):
                continue
            try:
                with explain_disk_errors(folder):
                    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
                    if not _is_private(folder):  # created by an earlier version
                        folder.chmod(PRIVATE)
            except Unwritable:
                raise
            except OSError as error:
                raise Unwritable(
                    f"{folder}: {error.strerror}; make state_dir writable for this user or configure another"
                ) from error

    def _set_aside(self, path: Path, cause: Exception) -> None:
        """Rename a corrupt entry so that it is ignored; the last few are retained for inspection."""
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
        """Move the states and personal models of entries to the device's states."""
        for entry in entries:
            names = _list_names(entry) if entry.is_dir() else set()
            if STATE in names:
                states.promote(entry / STATE, self.states)
            if OWN in names:
                states.promote_own_model(entry / OWN, self.states)
                self.own_changed()


def _restore_names(entries: Iterable[Entry]) -> None:
    """Rename entries by their content: a power cut can undo the renames of a reused one, but not its content."""
    for entry in entries:
        path = entry.path.with_name(_name(entry.update.run, entry.update.round))
        if not path.exists():
            entry.path.rename(path)


def _list_names(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:  # faster than `iterdir`, which makes a path of each
        return {entry.name for entry in entries}


def _name(run: str, number: int) -> str:
    return f"{run}@{number:06d}"


def _is_private(folder: Path) -> bool:
    """Return True for an existing folder with access for this user only."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False  # creating it reports the reason
    return stat.S_ISDIR(mode) and mode & 0o777 == PRIVATE


def write_payload(draft: Path, parts: Iterable[memoryview]) -> int:
    """Write a draft's payload over that of an acknowledged update, if there is one; return its size.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    with _overwrite(draft / PAYLOAD) as file:
        for part in parts:
            file.write(part)
        return file.tell()


@contextmanager
def _overwrite(path: Path) -> Iterator[BinaryIO]:
    """Open a file whose old content the block overwrites."""
    with explain_disk_errors(path), os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        yield file
        file.truncate()


def write(draft: Path, update: Update) -> None:
    """Write an entry's message and sync everything in the draft to disk.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    message = wire.encode(update)
    with _overwrite(draft / UPDATE) as file:
        file.write(message + payload.digest([memoryview(message)]))
    with explain_disk_errors(draft):
        names = _list_names(draft)
        for name in names:
            sync(draft / name)
        if names != {UPDATE, PAYLOAD}:  # the names of an acknowledged entry are on the disk already
            sync(draft)


def read(folder: Path) -> Update:
    """Return an entry's message.

    Raises:
        WireError: It does not match its digest.
        OSError: It cannot be read.
    """
    data = memoryview((folder / UPDATE).read_bytes())
    message, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if payload.digest([message]) != digest:
        raise WireError("message does not match its digest", reason="digest")
    return wire.decode_as(Update, bytes(message))


def entry_path(draft: Path) -> Path:
    """Return the path of a draft after its commit."""
    return draft.with_name(draft.name.removeprefix("."))


def commit(draft: Path) -> None:
    """Rename a complete draft to its entry, replacing an entry of the same name.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    entry = entry_path(draft)
    shutil.rmtree(entry, ignore_errors=True)
    with explain_disk_errors(draft):
        draft.rename(entry)
        sync(entry.parent)
