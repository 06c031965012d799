"""What is measured, as it travels and as it is kept: figures with their origin, absences with their cause, costs."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Quality: TypeAlias = Literal["measured", "corrected", "modelled"]
Lack: TypeAlias = Literal["not_present", "denied", "busy", "invalid"]

SKIPPED = "skipped"
"""Among the metrics of an update: 1 where its device found nothing to learn from, and so sends no tensor; else 0."""

JOULES = ("download_joules", "compute_joules", "exchange_joules", "upload_joules")
"""The parts of a task's joules in a `Cost`. Together they are what it took, of the whole device and idle included: in
this sense alone joules of tasks are predicted, limited, charged and shown. Waiting for others is no part of a task."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured figure: SI value, unit, where it comes from, how good it is, monotonic seconds.

    Attributes:
        quality: `measured` by a sensor; `corrected`: measured, then put right by a known error; `modelled`: computed.
        uncertainty: One standard deviation in the same unit; None where nobody knows.
    """

    value: float
    unit: str
    source: str
    quality: Quality
    at: float
    uncertainty: float | None = None


class Absent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A figure that is not there, and why.

    Attributes:
        lack: `not_present` on this board; `denied` to this user; `busy`: its block is off or answers later; `invalid`:
            what it says cannot be true.
        cause: For people: which file or tool, and the remedy if there is one.
    """

    lack: Lack
    cause: str = ""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a figure of a `Cost` comes from; `uncertainty` is one standard deviation, as a share of the figure."""

    source: str
    quality: Quality
    uncertainty: float | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a task cost the device; a figure nobody measured is None, never zero.

    Seconds are of the device's monotonic clock. Joules are those of the whole device in that time, idle included:
    the increment is `joules - idle_w * seconds`. `bytes_down` counts every byte of frames received for the task.
    What the upload cost is known only after the update was sent: it comes with the next Report.

    Attributes:
        exchange_s: Of a split session, from features handed over to gradients received, all steps together: link,
            server, and waiting for others. `compute_s` and `compute_joules` are without it.
        features_bytes, gradient_bytes: Of every frame of that exchange, up and down; not part of `bytes_up` and
            `bytes_down`, which are the model's.
        cycles: CPU cycles that the trainer's process was busy, all cores together.
        idle_w: Watts of the device while it did nothing, last measured before the task.
        provenance: Source and quality of a figure, by its name here.
    """

    download_s: float | None = None
    compute_s: float | None = None
    upload_s: float | None = None
    exchange_s: float | None = None
    cpu_s: float | None = None
    cycles: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    features_bytes: int | None = None
    gradient_bytes: int | None = None
    download_joules: float | None = None
    compute_joules: float | None = None
    upload_joules: float | None = None
    exchange_joules: float | None = None
    idle_w: float | None = None
    provenance: dict[str, Provenance] = {}


def joule_parts(*, split: bool) -> tuple[str, ...]:
    """Return the parts that a task's joules have; only a split session has an exchange."""
    return tuple(name for name in JOULES if split or name != "exchange_joules")


class StepCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one local iteration, a training step on one batch, costs a device; None where nobody measured it.

    Attributes:
        steps: How many were timed.
        seconds: Of one; mu of HCEF.
        joules: Of one, those of the whole device in that time; alpha of HCEF is this less `idle_w * seconds`.
        idle_w: Watts of the device while it did nothing.
        cycles: CPU cycles of one, all cores together; with `weights`, C_k of pruned personalization.
        hertz: Mean clock of the CPU meanwhile; f_k.
        weights: Trainable parameters of the network.
        flops: Floating-point operations of one, counted from the network's shapes.
        provenance: Source and quality of a figure, by its name in `Cost` (`compute_s`, `compute_joules`, `cycles`).
    """

    steps: int
    seconds: float
    joules: float | None = None
    idle_w: float | None = None
    cycles: float | None = None
    hertz: float | None = None
    weights: int
    flops: int
    provenance: dict[str, Provenance] = {}


class Spent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole cost of the task whose update was settled last."""

    run: str
    round: int
    cost: Cost
