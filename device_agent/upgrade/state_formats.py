"""In what form this version of the agent writes each kind of state file; `shared.runtime.state_formats` has the rule.

What a new version writes in a newer form it writes once its trial is over: until then the version before may have to
read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.runtime import state_formats
from shared.runtime.state_formats import StateKind, require_readable

FORMATS: Mapping[str, int] = {"calibration": 1, "clocks": 1, "identity": 1, "outbox": 1, "releases": 1, "state": 1}
"""The form that this version writes of each kind; it reads that and all older ones. Whoever changes what such a file
looks like so that an older version cannot read it, counts it up here. A gateway reads this line of a package."""

KINDS: Mapping[str, StateKind] = {
    "outbox": StateKind(("outbox",), "updates that the server has not taken yet"),
    "state": StateKind(("state",), "what the device keeps of its runs, its own model too"),
    "releases": StateKind(("releases",), "the models that it serves"),
    "identity": StateKind(("identity",), "its key and certificate: it must join anew"),
    "calibration": StateKind(("calibration.json",), "the fit of its power model"),
    "clocks": StateKind(("clocks.json",), "how clocks and power mode were before the agent changed them"),
}

LOSE_REMEDY = "give up what it wrote by `device-agent upgrade install FILE.deb --lose`"


def find_losses(written: Mapping[str, int], supported: Mapping[str, int]) -> dict[str, str]:
    """Return the kinds that a version of the agent cannot read, and what is lost with each.

    Args:
        written: The newest forms in its folder, by kind.
        supported: Those that the version writes.
    """
    return state_formats.find_losses(written, supported, KINDS)


def check_formats(state_dir: Path, supported: Mapping[str, int] = FORMATS) -> None:
    """Refuse to work in a folder that a newer version wrote in so that this one cannot read it.

    Args:
        supported: What this version writes.

    Raises:
        ConfigError: It did: what would be lost, and which version to take.
    """
    require_readable(state_dir, supported, KINDS, LOSE_REMEDY)


def raise_formats(state_dir: Path, version: str, supported: Mapping[str, int] = FORMATS) -> bool:
    """Write down that this version writes here; returns whether a form was raised.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    return state_formats.raise_formats(state_dir, version, supported)
