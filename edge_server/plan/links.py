"""Plan table `link` of a `[[device]]`: rates, delay and loss of a simulated link."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from edge_server.plan.sections import Section
from edge_server.plan.simulated_devices import (
    AfterEnd,
    Again,
    Span,
    range_ends,
    require_again,
    require_amounts,
    require_spans,
)

LEAST_M = 10.0
"""Minimum distance to the antenna of a macro cell; a smaller value was probably meant in kilometres."""


class BaseLink(Section, frozen=True, kw_only=True, tag_field="kind"):
    """Keys of all links.

    Attributes:
        delay_s: One-way delay, in each direction.
        loss: Share of frames that are lost, in each direction.
    """

    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        require_amounts(delay_s=self.delay_s)
        if not 0 <= self.loss < 1:
            raise ValueError("loss must be in [0, 1)")


class GivenLink(BaseLink, frozen=True, kw_only=True, tag="given"):
    """Fixed rates.

    Attributes:
        up_mbit_s: Rate from the device; absent for no limit.
        down_mbit_s: Rate to the device; absent for no limit.
    """

    up_mbit_s: float | None = None
    down_mbit_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_spans(up_mbit_s=self.up_mbit_s, down_mbit_s=self.down_mbit_s)


class RangeLink(BaseLink, frozen=True, kw_only=True, tag="ranges"):
    """Rates drawn from ranges.

    Attributes:
        up_mbit_s: Rate from the device, or the range it is drawn from; absent for no limit.
        down_mbit_s: Rate to the device, or the range it is drawn from; absent for no limit.
        again: When the rates are drawn again: never, every round, or after this many seconds.
    """

    up_mbit_s: Span | None = None
    down_mbit_s: Span | None = None
    again: Again = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_spans(up_mbit_s=self.up_mbit_s, down_mbit_s=self.down_mbit_s)
        require_again(self.again)


class WirelessLink(BaseLink, frozen=True, kw_only=True, tag="wireless"):
    """Shannon rate share * B * log2(1 + h * g * p / N) with path gain h and fading gain g.

    Attributes:
        bandwidth_hz: B, in each direction.
        share: This device's share of the bandwidth: b_k of pruned personalization.
        distance_m: Distance to the base station, or the range it is drawn from.
        path_loss: `3gpp`: 128.1 + 37.6 log10(d in km) dB; `exponent`: 40 + 10 * exponent * log10(d in m) dB;
            `none`: h is 1.
        exponent: Path loss exponent n, for `path_loss = "exponent"`.
        tx_dbm: p, transmit power of the device.
        server_dbm: p, transmit power of the base station.
        noise_dbm_hz: N / B, noise density.
        noise_w: N, noise power; absent: `noise_dbm_hz` times the bandwidth.
        fading: `none`: g is `gain`; `rayleigh`: g is drawn from an exponential distribution with that mean.
        gain: g, or its mean; see `fading`.
        again: When the fading is drawn again; a number is the coherence time. Everything else is drawn once.
    """

    bandwidth_hz: Span
    share: float = 1.0
    distance_m: Span | None = None
    path_loss: Literal["3gpp", "exponent", "none"] = "3gpp"
    exponent: float = 3.0
    tx_dbm: Span = 23.0
    server_dbm: float = 37.0
    noise_dbm_hz: float = -174.0
    noise_w: float | None = None
    fading: Literal["none", "rayleigh"] = "none"
    gain: float = 1.0
    again: Again = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_spans(
            bandwidth_hz=self.bandwidth_hz,
            distance_m=self.distance_m,
            noise_w=self.noise_w,
            gain=self.gain,
            share=self.share,
        )
        require_amounts(exponent=self.exponent)
        require_again(self.again)
        levels = (*range_ends(self.tx_dbm), self.server_dbm, self.noise_dbm_hz)
        if (
            not all(map(math.isfinite, levels))
            or range_ends(self.tx_dbm)[0] > range_ends(self.tx_dbm)[1]
            or self.share > 1
        ):
            raise ValueError("tx_dbm, server_dbm and noise_dbm_hz must be finite, share <= 1")
        if (self.distance_m is None) != (self.path_loss == "none"):
            raise ValueError('give distance_m, or path_loss = "none" without it')
        if self.distance_m is not None and self.path_loss == "3gpp" and range_ends(self.distance_m)[0] < LEAST_M:
            raise ValueError(f'distance_m is in metres, not km; path_loss = "3gpp" is valid from {LEAST_M:g} m')


class TraceLink(BaseLink, frozen=True, kw_only=True, tag="trace"):
    """Recorded rates, in Mbit/s.

    Every value holds until the next one, for at most 5 s; after that nothing passes, which the run records. Rates of
    zero are outages and stay. Several values at one time are averaged.

    Attributes:
        path: CSV file, optionally compressed (.gz); a relative path starts at the data root.
        name: Name of the trace, in the column `trace`; empty: each device gets another one, in the file's order.
        where: Required values of other columns, such as `{ network = "wifi" }`.
        up_column: Column of the uplink rates; empty for `ul_mbps`, or else `mbps`.
        down_column: Column of the downlink rates; empty for `dl_mbps`, or else `mbps`. A column `direction` with the
            values `up` and `down` separates its rows.
        scale: Factor that the rates are multiplied by.
        offset_s: Start of the replay within the trace; a range is drawn for each device.
        after: Behaviour after the end of the trace: hold the last value, repeat the trace, or zero.
    """

    path: str
    name: str = ""
    where: dict[str, str] = msgspec.field(default_factory=dict)
    up_column: str = ""
    down_column: str = ""
    scale: float = 1.0
    offset_s: Span = 0.0
    after: AfterEnd = "repeat"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_spans(scale=self.scale)
        low, high = range_ends(self.offset_s)
        require_amounts(offset_s=low)
        if not low <= high < math.inf:
            raise ValueError("offset_s must be seconds, or a range [low, high] of such")


Link: TypeAlias = GivenLink | RangeLink | WirelessLink | TraceLink
