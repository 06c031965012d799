"""Behaviour of a replayed device: the interface between a replay and its data sources.

Seconds and joules follow from the work, the behaviour and virtual time alone, never from a clock of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from edge_server.replay.devices.flow import Flow
from shared.protocol.measurements import Provenance
from shared.protocol.messages import count_batches

Direction: TypeAlias = Literal["up", "down"]


Compute: TypeAlias = "Callable[[Work, float], Effort]"
"""(work, virtual second of its start) -> cost."""


Radio: TypeAlias = Callable[[Direction, float, float], float | None]
"""(direction, start second, end second) -> joules of a transfer; None if unknown."""


ALWAYS = ((0.0, math.inf),)


LinkOfRound: TypeAlias = Callable[[int], tuple[Flow | None, Flow | None]]
"""Round -> rates up and down from the arrival of its task."""


@dataclass(frozen=True)
class Work:
    """Work of one task on one device.

    Attributes:
        steps: Training steps of one batch each.
        examples: Examples that pass through the network, summed over epochs.
        flops: Floating-point operations of the task; includes `share`.
        train: False for an evaluation.
        share: Share of a full training step that the algorithm computes, in (0, 1].
    """

    steps: int
    examples: int
    weights: int
    flops: int
    run: str
    round: int
    train: bool
    share: float = 1.0


def batches(examples: int, size: int, steps: int, *, merges_single: bool = False) -> dict[int, int]:
    """Return the number of batches by size in so many steps; an epoch ends with its incomplete batch.

    Args:
        merges_single: Merge a last batch of one example into the one before.
    """
    full_batches, last_size = count_batches(examples, size, merges_single=merges_single)
    last = steps // (full_batches + 1) if last_size else 0
    return {size: steps - last} | ({last_size: last} if last_size else {})


@dataclass(frozen=True)
class Effort:
    """Cost of a task; None means unknown, never zero.

    Attributes:
        seconds: Virtual seconds of computing.
        joules: Energy of the device, idle power included, as in `Cost`.
        idle_w: Power of the idle device, in watts.
        provenance: Source and quality of a figure, by its name in `Cost`.
        lag_s: Further seconds without computing or transfers, for example to start the trainer or sync the disk.
        exchange_w: Power during the exchange of a split session, in watts.
    """

    seconds: float
    cycles: float | None = None
    joules: float | None = None
    idle_w: float | None = None
    provenance: dict[str, Provenance] = field(default_factory=dict)
    lag_s: float = 0.0
    exchange_w: float | None = None


def unknown_radio(_way: Direction, _t0: float, _t1: float) -> float | None:
    """Return None: the radio's power is unknown."""
    return None


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of one replayed device.

    Attributes:
        compute: Cost of a task that starts at a virtual second.
        up: Rate from the device, payload and headers, in bit/s; None for no limit.
        down: Rate to the device, in bit/s; None for no limit.
        delay_s: One-way delay, in both directions.
        loss: Share of lost frames, in both directions.
        radio: Joules of a transfer.
        of_round: Rates by round, in place of `up` and `down`, if they are drawn per round.
        least: Lower bound on the cost of work; None if that is the cost at second 0.
        present: Connected intervals, half open, in virtual seconds, ascending.
        provenance: Source and quality of `upload_s`, `download_s`, `upload_joules` and `download_joules`.
        warnings: Repairs of the source data, for the run's record; one sentence each.
    """

    compute: Compute
    up: Flow | None = None
    down: Flow | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    radio: Radio = unknown_radio
    of_round: LinkOfRound | None = None
    least: Callable[[Work], Effort] | None = None
    present: tuple[tuple[float, float], ...] = ALWAYS
    provenance: dict[str, Provenance] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
