"""What a replayed device does with work and bytes: the seam between a replay and where its figures come from.

Seconds and joules follow from the work, the behaviour and virtual time alone; no clock of this machine enters.

The three parts that a device's behaviour is put together from: what a task takes, how bytes move, what both draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from shared.protocol.measurements import Provenance
from shared.protocol.messages import split_epoch

Direction: TypeAlias = Literal["up", "down"]
Compute: TypeAlias = "Callable[[Work, float], Effort]"
"""(work, virtual second at which it begins) -> what it takes."""
Radio: TypeAlias = Callable[[Direction, float, float], float | None]
"""(direction, from second, to second) -> joules of a transfer; None where nobody knows."""

ALWAYS = ((0.0, math.inf),)


class Flow(Protocol):
    """A rate over virtual time, in bit/s: a `Curve`, or what is drawn while it is asked."""

    @property
    def most(self) -> float:
        """Return what it never exceeds."""
        ...

    def at(self, t: float) -> float:
        """Return the rate at second `t`."""
        ...

    def integral(self, t0: float, t1: float) -> float:
        """Return the bits between two seconds."""
        ...

    def when(self, t0: float, amount: float) -> float:
        """Return the earliest second by which `amount` bits since `t0` have passed; infinite if they never have."""
        ...


@dataclass(frozen=True)
class Part:
    """A share of a flow."""

    whole: Flow
    share: float

    @property
    def most(self) -> float:
        return self.share * self.whole.most

    def at(self, t: float) -> float:
        return self.share * self.whole.at(t)

    def integral(self, t0: float, t1: float) -> float:
        return self.share * self.whole.integral(t0, t1)

    def when(self, t0: float, amount: float) -> float:
        return self.whole.when(t0, amount / self.share)


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
    whole, rest = split_epoch(examples, size, merges_single=merges_single)
    last = steps // (whole + 1) if rest else 0
    return {size: steps - last} | ({rest: last} if rest else {})


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


class Busy(NamedTuple):
    """What a task takes.

    Attributes:
        seconds: Of virtual time.
        cycles: Of all cores together; None where nobody counts them.
        hertz: Mean clock; None where nobody knows it.
    """

    seconds: float
    cycles: float | None = None
    hertz: float | None = None
    cores: float = 1.0


@dataclass(frozen=True)
class Pace:
    """How fast a device computes.

    Attributes:
        takes: (work, virtual second at which it begins) -> what it takes.
        source: Where that comes from; empty for a plan that only gives seconds.
        least: Everything that work can take, whenever it begins: the quickest and the thriftiest are among it.
    """

    takes: Callable[[Work, float], Busy]
    source: str
    least: Callable[[Work], list[Busy]]


@dataclass(frozen=True)
class Ways:
    """How bytes move. The attributes are those of `Behaviour`, with the watts that the device sends with.

    Attributes:
        tx_w: None where the link's source does not say.
    """

    up: Flow | None = None
    down: Flow | None = None
    delay_s: float = 0.0
    loss: float = 0.0
    of_round: LinkOfRound | None = None
    source: str = ""
    tx_w: float | None = None
    warnings: tuple[str, ...] = ()


Charge: TypeAlias = Callable[[Busy], float | None]


def unknown_power(_busy: Busy) -> float | None:
    """Be the power of which nobody knows."""
    return None


@dataclass(frozen=True)
class Draw:
    """What a device draws.

    Attributes:
        charge: What a task takes -> joules of the whole device, idle included.
        idle_w: Watts while it does nothing; None where nobody knows.
        radio: Joules of a transfer.
        source: Where that comes from.
    """

    charge: Charge = unknown_power
    idle_w: float | None = None
    radio: Radio = unknown_radio
    source: str = ""


def steady_radio(tx_w: float | None, rx_w: float | None) -> Radio:
    """Return the radio that draws so many watts for as long as it sends or receives; None: nobody knows."""

    def radio(way: str, t0: float, t1: float) -> float | None:
        watts = tx_w if way == "up" else rx_w
        return None if watts is None else watts * (t1 - t0)

    return radio
