"""Tables `compute` and `power` of a plan's `[[device]]`: simulated hardware.

Each has a `kind`. A figure that may be a range `[low, high]` is drawn from it uniformly, by the plan's seed.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from edge_server.plan.sections import Section

Span: TypeAlias = float | tuple[float, float]
"""A figure, or the (low, high) range that it is drawn from."""
Again: TypeAlias = Literal["never", "round"] | float
"""When a range is drawn again: never, every round, or after this many virtual seconds."""
AfterEnd: TypeAlias = Literal["hold", "repeat", "zero"]
"""Behaviour after the end of a trace."""


def range_ends(span: Span) -> tuple[float, float]:
    """Return (low, high); equal for a single figure."""
    return span if isinstance(span, tuple) else (span, span)


def require_spans(*, least: float = 0.0, **spans: Span | None) -> None:
    """Reject a range that is empty, not finite, or not above `least`.

    Raises:
        ValueError: The message names the figure.
    """
    for name, span in spans.items():
        if span is None:
            continue
        low, high = range_ends(span)
        if not least < low <= high < math.inf:
            raise ValueError(f"{name} must be > {least:g} and finite, or a range [low, high] of such")


def require_amounts(**figures: float | None) -> None:
    """Reject figures that are negative or not finite.

    Raises:
        ValueError: The message names the figure.
    """
    for name, figure in figures.items():
        if figure is not None and not 0 <= figure < math.inf:
            raise ValueError(f"{name} must be >= 0 and finite")


class GivenCompute(Section, frozen=True, kw_only=True, tag_field="kind", tag="given"):
    """Every task takes the same time.

    Attributes:
        seconds: Time of a task.
    """

    seconds: float

    def __post_init__(self) -> None:
        require_amounts(seconds=self.seconds)


class Cycles(Section, frozen=True, kw_only=True, tag_field="kind"):
    """CPU cycles of training; exactly one of the four keys is set.

    Attributes:
        cycles_per_step: Cycles of one training step, on one batch.
        cycles_per_example: Cycles of one example, one forward and one backward pass.
        cycles_per_weight: Cycles of one weight in one training step: C_k of pruned personalization.
        cycles_per_flop: Cycles of one floating-point operation of the network, counted from its shapes.
    """

    cycles_per_step: float | None = None
    cycles_per_example: float | None = None
    cycles_per_weight: float | None = None
    cycles_per_flop: float | None = None

    def __post_init__(self) -> None:
        rates = (self.cycles_per_step, self.cycles_per_example, self.cycles_per_weight, self.cycles_per_flop)
        present = [rate for rate in rates if rate is not None]
        if len(present) != 1 or not 0 < present[0] < math.inf:
            raise ValueError("set exactly one of cycles_per_step, _example, _weight and _flop, > 0 and finite")


class RangeCompute(Cycles, frozen=True, kw_only=True, tag="ranges"):
    """Clock drawn from a range; a task takes cycles / f(t).

    Attributes:
        hertz: Clock of the CPU, or the range it is drawn from.
        again: When the clock is drawn again: never, every round, or after this many seconds.
    """

    hertz: Span
    again: Again = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_spans(hertz=self.hertz)
        require_again(self.again)


class ProfileCompute(Cycles, frozen=True, kw_only=True, tag="profile"):
    """Clock from a board's firmware profile; a task takes cycles / (cores * hertz).

    Attributes:
        board: The profile's id, or the path of its TOML file.
        hertz: Clock of the CPU, or the range it is drawn from; absent: the highest clock of the profile.
        cores: Mean number of cores that compute.
        again: When the clock is drawn again: never, every round, or after this many seconds.
    """

    board: str
    hertz: Span | None = None
    cores: float = 1.0
    again: Again = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_spans(hertz=self.hertz, cores=self.cores)
        require_again(self.again)


Compute: TypeAlias = GivenCompute | RangeCompute | ProfileCompute


class GivenPower(Section, frozen=True, kw_only=True, tag_field="kind", tag="given"):
    """Fixed power of the whole device; what is absent is unknown.

    Attributes:
        busy_w: Power while it computes.
        idle_w: Power while it does nothing.
        tx_w: Power while it sends.
        rx_w: Power while it receives.
    """

    busy_w: float
    idle_w: float | None = None
    tx_w: float | None = None
    rx_w: float | None = None

    def __post_init__(self) -> None:
        require_amounts(busy_w=self.busy_w, idle_w=self.idle_w, tx_w=self.tx_w, rx_w=self.rx_w)


class CyclesPower(Section, frozen=True, kw_only=True, tag_field="kind", tag="cycles"):
    """Power model of the papers: kappa * C * f^2 joules for C cycles at f hertz, and p * t for a transfer.

    Attributes:
        kappa: Effective switched capacitance of the processor.
        idle_w: Constant power, in addition to the others; zero in the papers.
        tx_w: p, power while it sends; absent: the transmit power of a wireless link, or unknown.
        rx_w: Power while it receives; absent: unknown.
    """

    kappa: float
    idle_w: float = 0.0
    tx_w: Span | None = None
    rx_w: float | None = None

    def __post_init__(self) -> None:
        require_amounts(kappa=self.kappa, idle_w=self.idle_w, rx_w=self.rx_w)
        require_spans(tx_w=self.tx_w)


class ProfilePower(Section, frozen=True, kw_only=True, tag_field="kind", tag="profile"):
    """Power model of a board's firmware profile, at the clock and cores of `compute`.

    Attributes:
        board: The profile's id, or the path of its TOML file.
    """

    board: str


class TracePower(Section, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """Recorded power curve over the busy time; every task starts at the beginning of the curve.

    Attributes:
        path: CSV file, optionally compressed (.gz); a relative path starts at the data root.
        name: Name of the curve, in `key_column`; empty: each device gets another one, in the file's order.
        key_column: Column that names the curves.
        column: Column of the power.
        scale: Watts per unit of the column; 0.001 for milliwatts.
        offset_s: Start of a task within the curve.
        after: Behaviour after the end of the curve: hold the last value, or repeat the curve.
        tx_name: Name of the curve while it sends; empty: unknown.
        rx_name: Name of the curve while it receives; empty: unknown.
        idle_w: Power of the recorded device while it did nothing; absent: unknown.
    """

    path: str
    name: str = ""
    key_column: str = "run"
    column: str = "power_mw"
    scale: float = 1e-3
    offset_s: float = 0.0
    after: Literal["hold", "repeat"] = "repeat"
    tx_name: str = ""
    rx_name: str = ""
    idle_w: float | None = None

    def __post_init__(self) -> None:
        require_amounts(offset_s=self.offset_s, idle_w=self.idle_w)
        require_spans(scale=self.scale)


Power: TypeAlias = GivenPower | CyclesPower | ProfilePower | TracePower


def require_again(again: Again) -> None:
    """Reject a redraw interval that is not positive and finite.

    Raises:
        ValueError: The interval is out of range.
    """
    if not isinstance(again, str) and not 0 < again < math.inf:
        raise ValueError('again must be "never", "round" or seconds > 0')
