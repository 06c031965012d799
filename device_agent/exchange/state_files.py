"""The states of a device: for each run the one after its last round, and the one before that round.

A server that lost a round has it repeated, which begins with what the device had before it. `<run>` is the newest
state, `<run>@<round>` what was there before that round; empty where nothing was.

The folder in which a device keeps what must outlast its processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.protocol.topics import is_name
from shared.runtime.durable import explain_disk_errors, sync

OWN = ".own"
"""The newest model of the device's own, of whatever run; no run has such a name."""


def before(states: Path, run: str, number: int) -> Path:
    """Return the state that a task of a round begins with, be it done for the first time or again."""
    kept = states / f"{run}@{number:06d}"
    return kept if kept.exists() else states / run


def says_none(path: Path) -> bool:
    """Tell whether a file says that there was no state before a round; a run's own state is never empty."""
    return "@" in path.name and path.exists() and not path.stat().st_size


def promote(state: Path, states: Path) -> None:
    """Make the state that a task left the newest of its run; may be cut short anywhere, and done again.

    Args:
        state: In the folder of the task's update, which is named `<run>@<round>`.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    run = state.parent.name.rpartition("@")[0]
    newest, kept = states / run, states / state.parent.name
    with explain_disk_errors(states):
        if not kept.exists():  # else this round is repeated, or we were killed on the way
            if newest.is_file():
                newest.replace(kept)
            else:
                kept.touch()
            sync(states)
            for older in states.glob(f"{run}@*"):
                if older != kept:
                    older.unlink()
        state.replace(newest)
        sync(states)


def promote_own(own: Path, states: Path) -> None:
    """Make the model that a task left the newest of the device's own.

    Args:
        own: In the folder of the task's update.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    with explain_disk_errors(states):
        own.replace(states / OWN)
        sync(states)


def forget(states: Path, ended: Iterable[str]) -> None:
    """Remove what is kept of runs that are over, but for the newest state of the one that ended last.

    That one may still be in use: where a method gives each device a model of its own, it is the device's.

    Args:
        ended: Names of runs as a server says them, the newest first; what is no name is passed over.
    """
    over = [run for run in ended if is_name(run)]
    newest = next((run for run in over if (states / run).is_file()), "")
    for run in over:
        for path in (states / run, *states.glob(f"{run}@*")):
            if path != states / newest:
                with suppress(OSError):  # what cannot be removed costs room and no task
                    path.unlink(missing_ok=True)


NOTED, MOST_NOTED = ".noted", 64 << 10
"""A device's file of what its processes have said, a line each, and its most bytes; no run has such a name."""


def note_once(states: Path, what: str) -> bool:
    """Tell whether no process of this device has said something yet, and remember it; a full disk forgets it.

    Args:
        states: The folder of its states.
        what: A line.
    """
    line, path = what.encode(errors="replace").replace(b"\n", b" ") + b"\n", states / NOTED
    try:
        with path.open("a+b") as file:
            file.seek(0)
            if line in file.readlines(MOST_NOTED):
                return False
            if file.tell() < MOST_NOTED:
                file.write(line)
    except OSError:
        return True
    return True


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
