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
from shared.protocol.messages import split_epoch

Direction: TypeAlias = Literal["up", "down"]


Compute: TypeAlias = "Callable[[Work, float], Effort]"
"""(work, virtual second at which it begins) -> what it takes."""


Radio: TypeAlias = Callable[[Direction, float, float], float | None]
"""(direction, from second, to second) -> joules of a transfer; None where nobody knows."""


ALWAYS = ((0.0, math.inf),)


LinkOfRound: TypeAlias = Callable[[int], tuple[Flow | None, Flow | None]]
"""Round -> the rates up and down, from the moment its task is there."""


@dataclass(frozen=True)
class Work:
    """One task as its device sees it.

    Attributes:
        steps: Training steps, each on one batch.
        examples: Examples that pass through the network, every epoch's counted.
        flops: Floating-point operations of the whole task.
        train: Whether it trains; an evaluation does not.
        share: Of a whole network's training step that a step of the algorithm is; `flops` counts no more.
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
    """Return how often a batch of each size comes in so many steps; an epoch ends with what is left over.

    Args:
        merges_single: Whether a last batch of one example joins the one before it.
    """
    full_batches, last_size = split_epoch(examples, size, merges_single=merges_single)
    last = steps // (full_batches + 1) if last_size else 0
    return {size: steps - last} | ({last_size: last} if last_size else {})


@dataclass(frozen=True)
class Effort:
    """What a task takes; a figure that nothing tells is None, never zero.

    Attributes:
        seconds: Of virtual time.
        joules: Of the whole device, idle included, as in `Cost`.
        idle_w: Watts of the device while it does nothing.
        provenance: Source and quality of a figure, by its name in `Cost`.
        lag_s: Seconds besides, in which the device neither computes nor transfers: its trainer starts, its disk syncs.
        exchange_w: Watts of the device during the exchange of a split session.
    """

    seconds: float
    cycles: float | None = None
    joules: float | None = None
    idle_w: float | None = None
    provenance: dict[str, Provenance] = field(default_factory=dict)
    lag_s: float = 0.0
    exchange_w: float | None = None


def unknown_radio(_way: Direction, _t0: float, _t1: float) -> float | None:
    """Be the radio of which nobody knows what it draws.

    Args:
        _t0: Second at which a transfer begins.
        _t1: Second at which it ends.
    """
    return None


@dataclass(frozen=True)
class Behaviour:
    """One replayed device.

    Attributes:
        compute: What a task takes that begins at a virtual second.
        up: bit/s of payload and headers from the device; None for no limit.
        down: bit/s to the device; None for no limit.
        delay_s: One way, each way.
        loss: Share of frames that vanish, each way.
        radio: Joules of a transfer.
        of_round: The rates of each round, where they are drawn by the round; in place of `up` and `down`.
        least: Work -> the least that it can take, whenever it begins; None where that is what it takes at second 0.
        present: When it is connected: half-open intervals of virtual seconds, in order.
        provenance: Source and quality of what is not computed: `upload_s`, `download_s`, `upload_joules`,
            `download_joules`.
        warnings: What a rule put right in the figures' source, for the run's record; one sentence each.
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
