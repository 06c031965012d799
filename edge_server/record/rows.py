"""Schema of a trace's tables: fields are columns, suffixes of names are units.

Times are seconds of the run, continuous over server restarts (`edge_server.journal.run_clock`). Unmeasured fields are
None and their cells empty: absent is never zero. The README documents every column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from shared.protocol.measurements import Cost, StepCost
from shared.protocol.messages import Value

Positive: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Purpose: TypeAlias = Literal["measure", "train", "evaluate", "statistics"]
Device: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{2})*\Z", max_length=64)]

PROVENANCE = ("quality", "source", "uncertainty")
"""Parts of a figure's origin, in columns `<figure>_quality`, `_source` and `_uncertainty`."""
UNITS: Mapping[str, str] = {
    "_s": "s",
    "seconds": "s",
    "joules": "J",
    "_w": "W",
    "watts": "W",
    "hertz": "Hz",
    "celsius": "°C",
    "_bits_per_s": "bit/s",
    "bytes": "B",
    "bytes_down": "B",
    "bytes_up": "B",
}
"""Unit by suffix of a name; the longest matching suffix counts."""


class TaskRow(Cost, frozen=True, kw_only=True, omit_defaults=False):
    """Task of one device in one round: outcome and cost."""

    round: Count
    device: Device
    purpose: Purpose = "train"
    outcome: Literal["arrived", "late", "failed", "missing"]
    cause: str = ""
    began_s: Positive | None = None
    arrived_s: Positive | None = None
    settled: bool = False
    hertz: float | None = None
    arrived_bytes: Count | None = None
    payload_bytes: Count | None = None
    payload_digest: Hex = ""
    frame_bytes: Count | None = None
    start_digest: Hex = ""
    weight: Positive = 0.0
    examples: Count | None = None
    steps: Count | None = None
    missed_steps: Count | None = None
    loss: float | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Step(StepCost, frozen=True, kw_only=True, omit_defaults=False):
    """Cost of one training step, measured before the first round."""

    device: Device


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Opening, close and result of one round."""

    round: Count
    outcome: Literal["aggregated", "missed", "open"]
    opened_s: Positive | None = None
    closed_s: Positive | None = None
    seconds: Positive | None = None
    online: Count | None = None
    asked: Count = 0
    arrived: Count = 0
    loss: float | None = None
    accuracy: Positive | None = None
    test_loss: float | None = None
    device_accuracy: Positive | None = None
    steps: Count | None = None
    refused: dict[str, Count] = {}


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Assignment of one device in one round."""

    round: Count
    device: Device
    seed: int
    local_epochs: Count
    batch_size: Count
    learning_rate: Positive
    momentum: Positive
    weight_decay: Positive
    steps: Count = 0
    values: dict[str, Value] = {}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Measured reading of a device."""

    at_s: Positive
    device: Device
    name: str
    value: float
    unit: str
    age_s: Positive | None = None
    quality: Literal["measured", "corrected", "modelled"]
    source: str = ""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Fact reported by a device, recorded when it changes."""

    at_s: Positive
    device: Device
    name: str
    value: str


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """Connection or disconnection of a device."""

    at_s: Positive
    device: Device
    event: Literal["joined", "left"]
    cause: Literal["connected", "reconnected", "restarted", "gone", "unheard"]
    interrupts: Count | None = None
    version: str = ""


TABLES: Mapping[str, type[msgspec.Struct]] = {
    "tasks": TaskRow,
    "steps": Step,
    "rounds": Round,
    "decisions": DecisionRow,
    "readings": Sample,
    "facts": Fact,
    "availability": Presence,
}


def unit_of(name: str) -> str:
    """Return the unit of a column or reading: `1` for counts, shares and texts."""
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else "1"


def cost_figures(table: str) -> tuple[str, ...]:
    """Return the figures of a table whose origin has columns."""
    match table:
        case "tasks":
            names = (name for name in Cost.__struct_fields__ if name != "provenance" and unit_of(name) != "B")
            return tuple(part for name in names for part in ((name, "hertz") if name == "cycles" else (name,)))
        case "steps":
            return "compute_s", "compute_joules", "cycles"
        case _:
            return ()


def columns(table: str) -> tuple[str, ...]:
    """Return a table's columns in order: keys, figures, counts of bytes, all others, then provenance."""
    names = [name for name in TABLES[table].__struct_fields__ if name != "provenance"]
    if table == "tasks":
        keys = names[names.index("round") : names.index("settled") + 1]
        names = list(dict.fromkeys([*keys, *cost_figures(table), *names]))
    elif table == "steps":
        names = list(dict.fromkeys(["device", *names]))
    return (*names, *(f"{figure}_{part}" for figure in cost_figures(table) for part in PROVENANCE))


def is_cost_column(column: str) -> bool:
    """Return true if a column belongs to a figure of a task's cost."""
    return any(column.removesuffix(f"_{part}") in Cost.__struct_fields__ for part in PROVENANCE)


def common_fields(source: Struct, kind: type[Struct]) -> dict[str, Any]:
    """Return the fields of a struct that another type has too."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if name in source.__struct_fields__}
