"""In what form this version of the server writes what lies in its folder of data; what newer ones wrote is refused.

`shared.runtime.state_formats` has the rule. A journal of a newer form looks damaged to an older server, which would set
it aside and go on from the records that it understands: so forms are looked at before anything there is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.runtime.durable import explain_disk_errors
from shared.runtime.state_formats import StateKind, raise_formats, require_readable

FORMATS: Mapping[str, int] = {
    "checkpoints": 1,
    "journals": 2,
    "peers": 1,
    "readings": 1,
    "releases": 1,
    "rollouts": 1,
    "session": 1,
    "studies": 1,
    "updates": 1,
}
"""The form that this version writes of each kind; it reads that and all older ones. Whoever changes what such a file
looks like so that an older version cannot read it, counts it up here; a new kind of record in a journal does."""

KINDS: Mapping[str, StateKind] = {
    "checkpoints": StateKind(("checkpoints",), "the models of runs"),
    "journals": StateKind(("journal.sqlite",), "the records of runs, and with them going on where they stopped"),
    "peers": StateKind(("peers",), "what the sites of a run heard of each other"),
    "readings": StateKind(("readings.sqlite",), "what boards reported"),
    "releases": StateKind(("releases",), "the released models"),
    "rollouts": StateKind(("rollouts",), "which boards were given which release, and what is under way"),
    "session": StateKind(("session",), "how often this server began, by which devices tell its births apart"),
    "studies": StateKind(("cell.json",), "what is done of studies"),
    "updates": StateKind(("updates",), "updates that were accepted and are in no model yet"),
}

REMEDY = "name another folder of runs (`data_dir` in the server's file, or --data-dir): nothing here was changed"


def check_data_folder(data_dir: Path) -> None:
    """Refuse a folder of runs that a newer version wrote in so that this one cannot read it; writes nothing.

    Raises:
        ConfigError: It did: what would be lost, and which version to take; or nobody can tell.
    """
    require_readable(data_dir, FORMATS, KINDS, REMEDY)


def claim_data_folder(data_dir: Path) -> None:
    """Make a folder of runs where there is none, and write down that this version writes there.

    Raises:
        ConfigError: As `check_data_folder`; then nothing was written.
        Unwritable: The disk takes nothing more.
    """
    check_data_folder(data_dir)
    with explain_disk_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
    raise_formats(data_dir, _installed_version(), FORMATS, several=True)


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - only where something is written

    try:
        return version("fieldfleet")
    except PackageNotFoundError:  # imported from a folder that was never installed
        return ""
