"""On-disk formats of the server's data folder; refuses folders of newer versions.

The rule is in `shared.runtime.state_formats`. To an older server a journal of a newer format looks damaged: it would
set it aside and resume from the records that it understands. Formats are therefore checked before any file is opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shared.runtime.durable import explain_disk_errors
from shared.runtime.state_formats import StateKind, raise_formats, require_readable

DATA_DIR = Path("runs")
"""Default folder of runs."""
FORMATS: Mapping[str, int] = {
    "checkpoints": 1,
    "journals": 2,
    "peers": 1,
    "queue": 1,
    "readings": 2,
    "releases": 1,
    "rollouts": 2,
    "session": 1,
    "studies": 1,
    "updates": 1,
}
"""Format number that this version writes of each kind; it also reads all lower ones.

Increase a number with every change that older versions cannot read, such as a new kind of journal record.
"""

KINDS: Mapping[str, StateKind] = {
    "checkpoints": StateKind(("checkpoints",), "the models of runs"),
    "journals": StateKind(("journal.sqlite",), "the records of runs, and with them the ability to resume"),
    "peers": StateKind(("peers",), "what the sites of a run received from each other"),
    "queue": StateKind(("queue",), "the plans that wait for their runs"),
    "readings": StateKind(("readings.sqlite",), "device reports"),
    "releases": StateKind(("releases",), "the released models"),
    "rollouts": StateKind(("rollouts",), "which device has which release, and rollouts in progress"),
    "session": StateKind(("session",), "the restart counter that devices check"),
    "studies": StateKind(("cell.json",), "progress of studies"),
    "updates": StateKind(("updates",), "accepted updates that are not yet in a model"),
}

REMEDY = "choose another folder of runs (`data_dir` in the server's file, or --data-dir); nothing was changed"


def check_data_folder(data_dir: Path) -> None:
    """Refuse a folder of runs whose formats this version cannot read; writes nothing.

    Raises:
        ConfigError: A format is newer or unreadable; the message says what would be lost and which version to use.
    """
    require_readable(data_dir, FORMATS, KINDS, REMEDY)


def claim_data_folder(data_dir: Path) -> None:
    """Create a folder of runs if necessary, and record this version's formats in it.

    Raises:
        ConfigError: As `check_data_folder`; nothing was written.
        Unwritable: The disk is full or read-only.
    """
    check_data_folder(data_dir)
    with explain_disk_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
    raise_formats(data_dir, _installed_version(), FORMATS, several=True)


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - needed only to write

    try:
        return version("fieldfleet")
    except PackageNotFoundError:  # imported from a folder that was never installed
        return ""


def default_data_root() -> Path:
    """Return the default folder of data sets."""
    return Path(os.environ.get("FIELDFLEET_DATA", "../shared/data"))
