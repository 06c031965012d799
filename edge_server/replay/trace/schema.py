"""Schema of a trace's tables: fields are columns, suffixes of names are units.

Times are seconds of the run, continuous over server restarts (`edge_server.journal.run_clock`). Unmeasured fields are
None and their cells empty: absent is never zero. The README documents every column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from shared.protocol.measurements import Provenance
from shared.protocol.messages import Value

Positive: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Purpose: TypeAlias = Literal["measure", "train", "evaluate", "statistics"]
Device: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{2})*\Z", max_length=64)]

WITH_PROVENANCE: Mapping[str, tuple[str, ...]] = {
    "tasks": (
        "download_s",
        "compute_s",
        "upload_s",
        "exchange_s",
        "cpu_s",
        "cycles",
        "hertz",
        "download_joules",
        "compute_joules",
        "upload_joules",
        "exchange_joules",
        "idle_w",
    ),
    "steps": ("compute_s", "compute_joules", "cycles"),
}
"""Figures with the additional columns `<figure>_quality`, `_source` and `_uncertainty`."""

PROVENANCE = ("quality", "source", "uncertainty")
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


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a table."""


class TaskRow(TableRow, frozen=True, kw_only=True):
    """Task of one device in one round: outcome and cost."""

    round: Count
    device: Device
    purpose: Purpose = "train"
    outcome: Literal["arrived", "late", "failed", "missing"]
    cause: str = ""
    began_s: Positive | None = None
    arrived_s: Positive | None = None
    settled: bool = False
    download_s: Positive | None = None
    compute_s: Positive | None = None
    upload_s: Positive | None = None
    exchange_s: Positive | None = None
    cpu_s: Positive | None = None
    cycles: Positive | None = None
    hertz: Positive | None = None
    download_joules: Positive | None = None
    compute_joules: Positive | None = None
    upload_joules: Positive | None = None
    exchange_joules: Positive | None = None
    idle_w: Positive | None = None
    bytes_down: Count | None = None
    bytes_up: Count | None = None
    features_bytes: Count | None = None
    gradient_bytes: Count | None = None
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
    metrics: dict[str, float] = {}
    provenance: dict[str, Provenance] = {}


class Step(TableRow, frozen=True, kw_only=True):
    """Cost of one training step, measured before the first round."""

    device: Device
    steps: Count
    seconds: Positive
    joules: Positive | None = None
    idle_w: Positive | None = None
    cycles: Positive | None = None
    hertz: Positive | None = None
    weights: Count
    flops: Count
    provenance: dict[str, Provenance] = {}


class Round(TableRow, frozen=True, kw_only=True):
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


class DecisionRow(TableRow, frozen=True, kw_only=True):
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


class Sample(TableRow, frozen=True, kw_only=True):
    """Measured reading of a device."""

    at_s: Positive
    device: Device
    name: str
    value: float
    unit: str
    age_s: Positive | None = None
    quality: Literal["measured", "corrected", "modelled"]
    source: str = ""


class Fact(TableRow, frozen=True, kw_only=True):
    """Fact reported by a device, recorded when it changes."""

    at_s: Positive
    device: Device
    name: str
    value: str


class Presence(TableRow, frozen=True, kw_only=True):
    """Connection or disconnection of a device."""

    at_s: Positive
    device: Device
    event: Literal["joined", "left"]
    cause: Literal["connected", "reconnected", "restarted", "gone", "unheard"]
    interrupts: Count | None = None
    version: str = ""


TABLES: Mapping[str, type[TableRow]] = {
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


def columns(table: str) -> tuple[str, ...]:
    """Return a table's columns in order."""
    fields = tuple(name for name in TABLES[table].__struct_fields__ if name != "provenance")
    return fields + tuple(f"{figure}_{part}" for figure in WITH_PROVENANCE.get(table, ()) for part in PROVENANCE)
