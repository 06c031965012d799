"""State folder of a device: per-run training states, personal model, one-time notices.

For each run it holds the state after the last round, `<run>`, and the state before that round, `<run>@<round>` (empty
if there was none): a server that lost a round has it repeated from the state before it.
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
"""The newest personal model, of any run; no run can have this name."""


def state_before(states: Path, run: str, number: int) -> Path:
    """Return the state that a task of a round starts from, also when the round is repeated."""
    saved = states / f"{run}@{number:06d}"
    return saved if saved.exists() else states / run


def is_empty_state(path: Path) -> bool:
    """Return True for the marker of a round without a previous state; a run's own state is never empty."""
    return "@" in path.name and path.exists() and not path.stat().st_size


def promote(state: Path, states: Path) -> None:
    """Make the state of a task the newest of its run; may be interrupted at any point and repeated.

    Args:
        state: File in the folder of the task's update, which is named `<run>@<round>`.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    run = state.parent.name.rpartition("@")[0]
    newest, previous = states / run, states / state.parent.name
    with explain_disk_errors(states):
        if not previous.exists():  # else the round is repeated, or this process was killed before
            if newest.is_file():
                newest.replace(previous)
            else:
                previous.touch()
            sync(states)
            for older in states.glob(f"{run}@*"):
                if older != previous:
                    older.unlink()
        state.replace(newest)
        sync(states)


def promote_own_model(model: Path, states: Path) -> None:
    """Make the model that a task produced the device's newest personal model.

    Args:
        model: File in the folder of the task's update.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    with explain_disk_errors(states):
        model.replace(states / OWN)
        sync(states)


def forget_ended(states: Path, ended: Iterable[str]) -> None:
    """Remove the states of ended runs, except the newest state of the one that ended last.

    That state may still be in use: for methods with personal models it is the device's.

    Args:
        ended: Run names from the server, newest first; invalid names are skipped.
    """
    ended_runs = [run for run in ended if is_name(run)]
    newest = next((run for run in ended_runs if (states / run).is_file()), "")
    for run in ended_runs:
        for path in (states / run, *states.glob(f"{run}@*")):
            if path != states / newest:
                with suppress(OSError):  # a leftover file only takes room
                    path.unlink(missing_ok=True)


NOTED, MOST_NOTED = ".noted", 64 << 10
"""File of notices that this device's processes have logged, one a line, and its size limit; no run can have this
name."""


def remember_notice(states: Path, notice: str) -> bool:
    """Record a notice; return True if no process of this device recorded it before. A full disk forgets it."""
    line, path = notice.encode(errors="replace").replace(b"\n", b" ") + b"\n", states / NOTED
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


def ensure_writable(folder: Path, remedy: str) -> Path:
    """Create a folder if it is missing, and check that it is writable.

    Raises:
        ConfigError: This user may not write there; `remedy` says how to configure another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"state_dir {folder}: {error}; {remedy}") from error
