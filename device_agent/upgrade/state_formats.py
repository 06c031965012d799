"""State formats of this agent version, and their check.

See `shared.runtime.state_formats` for the rule. A new version writes newer formats only after its trial, since a
rollback must be able to read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.runtime import state_formats
from shared.runtime.state_formats import StateKind, require_readable

FORMATS: Mapping[str, int] = {"calibration": 1, "clocks": 1, "identity": 1, "outbox": 1, "releases": 1, "state": 1}
"""Format that this version writes of each kind; it reads that and all older ones. Increment a number when a change
makes a file unreadable for older versions. A gateway reads this line from packages."""

KINDS: Mapping[str, StateKind] = {
    "outbox": StateKind(("outbox",), "updates that the server has not accepted yet"),
    "state": StateKind(("state",), "the device's state of its runs, its personal model too"),
    "releases": StateKind(("releases",), "the served models"),
    "identity": StateKind(("identity",), "its key and certificate: it must join again"),
    "calibration": StateKind(("calibration.json",), "the fit of its power model"),
    "clocks": StateKind(("clocks.json",), "clocks and power mode from before the agent changed them"),
}

LOSE_REMEDY = "discard its files with `device-agent upgrade install FILE.deb --lose`"


def find_losses(written: Mapping[str, int], supported: Mapping[str, int]) -> dict[str, str]:
    """Return the kinds of state files that a version cannot read, and the loss with each.

    Args:
        written: Newest formats in the folder, by kind.
        supported: Formats that the version writes.
    """
    return state_formats.find_losses(written, supported, KINDS)


def check_formats(state_dir: Path, supported: Mapping[str, int] = FORMATS) -> None:
    """Raise ConfigError if a newer version wrote files that this one cannot read, with the loss and the remedy."""
    require_readable(state_dir, supported, KINDS, LOSE_REMEDY)


def raise_formats(state_dir: Path, version: str, supported: Mapping[str, int] = FORMATS) -> bool:
    """Record the formats that this version writes; return True if one was raised.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    return state_formats.raise_formats(state_dir, version, supported)
