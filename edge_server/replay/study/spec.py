"""Study file: a plan, its variations and the report (`edge_server/replay/README.md`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from edge_server.plan.sections import Section
from shared.config import read
from shared.errors import ConfigError
from shared.protocol.topics import check_name

SEED = "seed"


class Variant(Section, frozen=True, kw_only=True):
    """Variant of the plan; a baseline is a variant like any other.

    Attributes:
        set: Changed values by dotted key of the plan.
    """

    name: str
    set: dict[str, Any] = msgspec.field(default_factory=dict)


class ReportPart(Section, frozen=True, kw_only=True):
    """Questions of the summary: rounds, seconds, joules and bytes until the target, if given.

    Attributes:
        target: Accuracy, as a share; or a value of the metric by which the plan compares models.
    """

    target: float | None = None

    def __post_init__(self) -> None:
        """Reject a target that no model reaches."""
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target is {self.target}; give a finite number")


class Study(Section, frozen=True, kw_only=True):
    """Specification of a study.

    Attributes:
        name: Name of the study and its folder.
        plan: Path of the plan file, relative to the study file; or the plan itself, as a table.
        devices: Number of devices; 0 for those of the plan.
        seeds: Grid keys over which results are averaged.
        grid: Lists of values by dotted key of the plan; every combination is run.
        variant: Variants of the plan; every combination is run for each. Without variants, the plan is run unchanged.
    """

    name: str
    plan: str | dict[str, Any]
    devices: int = 0
    seeds: tuple[str, ...] = (SEED,)
    grid: dict[str, Any] = msgspec.field(default_factory=dict)
    variant: tuple[Variant, ...] = ()
    report: ReportPart = ReportPart()

    def __post_init__(self) -> None:
        """Reject a negative number of devices."""
        if self.devices < 0:
            raise ValueError("devices must be >= 0")


def load(path: Path) -> tuple[Study, dict[str, Any]]:
    """Read a study and its plan; the plan is decoded, but not checked.

    Raises:
        ConfigError: As `shared.config.read`; or a name is invalid or used twice.
    """
    study = read(path, Study)
    check_name(study.name, f"{path}: name")
    names = [check_name(variant.name, f"{path}: variant.name") for variant in study.variant]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: variant: two variants have the name {repeated!r}; rename one of them")
    if isinstance(study.plan, str):
        plan = read(path.parent / study.plan, dict[str, Any])
    else:
        plan = {"name": study.name, **study.plan}
    target = study.report.target
    if target is not None and "task" not in plan and not 0 < target <= 1:
        raise ConfigError(f"{path}: report.target: {target:g} is not an accuracy; give a share above 0, at most 1")
    return study, plan


def canonical(value: object) -> str:
    """Encode a value as JSON, identical for equal values."""
    return msgspec.json.encode(value, order="deterministic").decode()
