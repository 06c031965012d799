"""Measured figures with provenance, absences with causes, and task costs; wire and journal format."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Quality: TypeAlias = Literal["measured", "corrected", "modelled"]
Lack: TypeAlias = Literal["not_present", "denied", "busy", "invalid"]

SKIPPED = "skipped"
"""Metric of an update: 1 if the device found nothing to learn from, and so sends no tensor; else 0."""

JOULES = ("download_joules", "compute_joules", "exchange_joules", "upload_joules")
"""Parts of a task's joules in a `Cost`. Their sum is the task's energy, of the whole device and idle power included: in
this sense joules of tasks are predicted, limited, charged and shown. Waiting for others is no part of a task."""


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured figure: SI value, unit, source, quality, monotonic seconds.

    Attributes:
        quality: `measured` by a sensor; `corrected`: measured, then corrected for a known error; `modelled`: computed.
        uncertainty: One standard deviation in the same unit; None if unknown.
    """

    value: float
    unit: str
    source: str
    quality: Quality
    at: float
    uncertainty: float | None = None


class Absent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An absent figure and its cause.

    Attributes:
        lack: `not_present` on this board; `denied` to this user; `busy`: its block is off or answers later; `invalid`:
            the value cannot be true.
        cause: Message: which file or tool, and the remedy if there is one.
    """

    lack: Lack
    cause: str = ""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source and quality of a figure in a `Cost`; `uncertainty` is one standard deviation, as a share of the figure."""

    source: str
    quality: Quality
    uncertainty: float | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cost of a task on the device; a figure that was not measured is None, never zero.

    Seconds are of the device's monotonic clock. Joules are those of the whole device in that time, idle included:
    the increment is `joules - idle_w * seconds`. `bytes_down` counts every byte of frames received for the task.
    The cost of the upload is known only after the update was sent: it comes with the next Report.

    Attributes:
        exchange_s: Of a split session, from features sent to gradients received, all steps together: link, server, and
            waiting for others. `compute_s` and `compute_joules` exclude it.
        features_bytes, gradient_bytes: Bytes of that exchange's frames, up and down; not part of `bytes_up` and
            `bytes_down`, which are the model's.
        cycles: Busy CPU cycles of the trainer process, all cores together.
        idle_w: Watts of the idle device, last measured before the task.
        provenance: Source and quality of a figure, by its field name.
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
    """Return the parts of a task's joules; only a split session has an exchange."""
    return tuple(name for name in JOULES if split or name != "exchange_joules")


class StepCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cost of one local iteration, a training step on one batch; None where it was not measured.

    Attributes:
        steps: Number of timed steps.
        seconds: Time of one step; mu of HCEF.
        joules: Energy of one step, of the whole device; alpha of HCEF is this less `idle_w * seconds`.
        idle_w: Watts of the idle device.
        cycles: CPU cycles of one step, all cores together; with `weights`, C_k of pruned personalization.
        hertz: Mean CPU clock during the steps; f_k.
        weights: Trainable parameters of the network.
        flops: Floating-point operations of one step, counted from the network's shapes.
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


class TaskCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Complete cost of the task whose update was acknowledged last."""

    run: str
    round: int
    cost: Cost
