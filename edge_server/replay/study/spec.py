"""Study file: a plan, its variations and the report (`edge_server/replay/README.md`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from edge_server.plan.sections import Section
from shared.config import read
from shared.errors import ConfigError
from shared.protocol.topics import check_name

SEED = "seed"


class Variant(Section, frozen=True, kw_only=True):
    """One way to run the plan; a baseline is a variant like any other.

    Attributes:
        set: What it changes: values by dotted key of the plan.
    """

    name: str
    set: dict[str, Any] = msgspec.field(default_factory=dict)


class ReportPart(Section, frozen=True, kw_only=True):
    """What the summary answers: rounds, seconds, joules and bytes until the accuracy `target`, where one is given."""

    target: float | None = None

    def __post_init__(self) -> None:
        """Refuse an accuracy that no model has."""
        if self.target is not None and not 0 < self.target <= 1:
            raise ValueError("target must be in (0, 1]; it is an accuracy, as a share")


class Study(Section, frozen=True, kw_only=True):
    """A whole study.

    Attributes:
        name: Of the study; its folder is named after it.
        plan: The plan's file, looked for beside the study's; or the plan itself, as a table.
        devices: How many, instead of those that the plan names; 0 for just these.
        seeds: Keys of the grid of which results are averaged.
        grid: Lists of values by dotted key of the plan; every combination of them is run.
        variant: Every combination is run once for each; none stands for the plan as it is.
    """

    name: str
    plan: str | dict[str, Any]
    devices: int = 0
    seeds: tuple[str, ...] = (SEED,)
    grid: dict[str, Any] = msgspec.field(default_factory=dict)
    variant: tuple[Variant, ...] = ()
    report: ReportPart = ReportPart()

    def __post_init__(self) -> None:
        """Refuse a fleet of less than nobody."""
        if self.devices < 0:
            raise ValueError("devices must be >= 0")


def load(path: Path) -> tuple[Study, dict[str, Any]]:
    """Read a study and its plan, the plan as what stands in it, not yet checked.

    Raises:
        ConfigError: As `shared.config.read`; or names clash or are none.
    """
    study = read(path, Study)
    check_name(study.name, f"{path}: name")
    names = [check_name(variant.name, f"{path}: variant.name") for variant in study.variant]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path}: variant: two variants have the same name; give each its own")
    if isinstance(study.plan, str):
        return study, read(path.parent / study.plan, dict[str, Any])
    return study, {"name": study.name, **study.plan}


def canonical(value: object) -> str:
    """Return a value as JSON, the same for equal values."""
    return msgspec.json.encode(value, order="deterministic").decode()
