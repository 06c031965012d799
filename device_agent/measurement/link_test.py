"""Active link test through the agent's broker.

Up: publish filler to a topic of this device without a subscriber. Down: retain one piece there and subscribe to it
repeatedly. Each direction is measured alone; an echo would show the slower one for both.

Token buckets make the start of a transfer faster than what follows, and TCP starts slowly: the first second is
dropped, and the last third of the rest is reported. Its uncertainty is the larger of its distance from the first third
and the spread of the rate within it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.config import AgentConfig
from device_agent.identity.clock_floor import BoardClock
from device_agent.measurement.account_lock import IN_USE, block_agent_connection
from device_agent.probes.base import ProbeResult, describe_absence
from shared.errors import NoData, Unreachable
from shared.protocol.measurements import Absent, Reading
from shared.protocol.topics import topic
from shared.runtime import backports
from shared.runtime.executor import background
from shared.transport.base import Inbox
from shared.transport.mqtt import MqttTransport
from shared.transport.reach import find_refusal
from shared.transport.tcp_info import Counts, Traffic

log = logging.getLogger(__name__)

ENOUGH_BYTES = 4 << 20
AHEAD_S = 0.25
"""Data in flight, in seconds at the link's rate: keeps the link busy with a short queue."""
AHEAD_BYTES = 32 * 1024
PIECE_BYTES, LARGE_BYTES, FAST_BITS_PER_S = 16 * 1024, 64 * 1024, 20e6
MAX_RTT_GROWTH, MIN_SWOLLEN_RTT_S = 5.0, 0.1
PAUSE_S = 0.005
MIN_THIRD_BYTES = 48 * 1024
"""If the last third has fewer bytes, as on slow links, all counted points are used."""
SLICES, MIN_SLICE_BYTES = 10, 48 * 1024
LEAST_SHARE = 0.02
"""Least relative uncertainty: TCP and MQTT headers, and a clock read between two wake-ups of a process."""
CLEAR_S = 2.0
SOURCE = "active probe through the broker"

Point: TypeAlias = tuple[float, int]
"""A time, and the bytes transferred until then."""

NAMES = {way: f"link.{way}_bits_per_s" for way in ("up", "down")}


@dataclass(frozen=True)
class Schedule:
    """Timing of one direction in seconds: dropped start, minimum and maximum duration."""

    skipped_s: float = 1.0
    least_s: float = 3.0
    most_s: float = 5.0


DEFAULT_SCHEDULE = Schedule()


@dataclass(frozen=True)
class SustainedRate:
    """Rates in bit/s of the first and the last third of the counted time.

    Attributes:
        spread: One standard deviation of short slices' rates around the last third's.
    """

    first: float
    last: float
    spread: float

    @property
    def uncertainty(self) -> float:
        """One standard deviation of the last third's rate.

        The largest of its distance from the first third (which may be small by chance), the spread between slices, and
        the least uncertainty of such a test.
        """
        return max(abs(self.first - self.last), self.spread, LEAST_SHARE * self.last)


def compute_sustained(points: Sequence[Point], skipped_s: float = DEFAULT_SCHEDULE.skipped_s) -> SustainedRate:
    """Compute the rate that a link sustains once its token bucket is empty.

    Raises:
        NoData: The test was too short, or nothing was transferred.
    """
    counted = [(at, done) for at, done in points if at >= points[0][0] + skipped_s]
    third_s = (counted[-1][0] - counted[0][0]) / 3 if counted else 0.0
    if not third_s > 0:
        raise NoData(f"the probe lasted less than {skipped_s} s", lack="invalid")
    early = next(point for point in counted if point[0] >= counted[0][0] + third_s)
    late = next(point for point in reversed(counted) if point[0] <= counted[-1][0] - third_s)
    if counted[-1][1] - late[1] < MIN_THIRD_BYTES:
        late = counted[0]
    rates = [8 * (end[1] - begin[1]) / (end[0] - begin[0]) for begin, end in ((counted[0], early), (late, counted[-1]))]
    if not rates[1] > 0:
        raise NoData("no data passed the link", lack="invalid")
    return SustainedRate(rates[0], rates[1], _compute_spread(counted, rates[1]))


def _compute_spread(counted: Sequence[Point], rate: float) -> float:
    """Return the root mean square deviation of slices' rates from a rate.

    A slice is a tenth of the counted time, longer if it would hold too few bytes.
    """
    begin, end = counted[0], counted[-1]
    slice_s = (end[0] - begin[0]) / SLICES
    squares, seconds, since = 0.0, 0.0, begin
    for at, done in counted[1:]:
        lasted_s = at - since[0]
        if lasted_s >= slice_s and (done - since[1] >= MIN_SLICE_BYTES or at == end[0]):
            squares += lasted_s * (8 * (done - since[1]) / lasted_s - rate) ** 2
            seconds += lasted_s
            since = at, done
    return math.sqrt(squares / seconds) if seconds else rate


async def probe_link(
    config: AgentConfig, schedule: Schedule = DEFAULT_SCHEDULE, connect_s: float = 10.0
) -> ProbeResult:
    """Fill the link for 3 to 5 s in each direction; return `link.up_bits_per_s` and `link.down_bits_per_s`.

    The agent may run meanwhile, except with a broker account, which allows one connection. What the agent transfers is
    not counted and lowers the result.

    Args:
        config: Configuration of the agent, with its broker.
    """
    with block_agent_connection(config) as alone:
        if not alone:
            return _report_absence(Absent(lack="busy", cause=IN_USE))
        return await _probe(config, schedule, connect_s)


def _report_absence(absent: Absent) -> ProbeResult:
    return ProbeResult(absent=dict.fromkeys(NAMES.values(), absent))


async def _probe(config: AgentConfig, schedule: Schedule, connect_s: float) -> ProbeResult:
    broker = msgspec.structs.replace(config.broker, session_expiry_s=0)
    client_id, place = f"{config.site}.{config.device}.probe", topic(config.site, config.device, "probe")
    dates = BoardClock.of(Path(config.state_dir)).may_judge
    if refusal := await find_refusal(broker, client_id, place, max(1.0, connect_s / 4), dates=dates()):
        return _report_absence(Absent(lack="not_present", cause=f"broker {broker.host}:{broker.port}: {refusal}"))
    transport = MqttTransport(broker, client_id, dates=dates)
    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    async with transport.running():
        for way, measure in (("up", _measure_up), ("down", _measure_down)):
            is_fast = NAMES["up"] in readings and readings[NAMES["up"]].value > FAST_BITS_PER_S
            piece_bytes = LARGE_BYTES if is_fast else PIECE_BYTES
            try:
                async with backports.timeout(connect_s):
                    await transport.connected.wait()
                points = await measure(transport, place, piece_bytes, schedule)
                readings[NAMES[way]] = _make_reading(compute_sustained(points, schedule.skipped_s), transport.traffic)
            except NoData as error:
                absent[NAMES[way]] = describe_absence(error)
            except (Unreachable, TimeoutError) as error:
                cause = f"broker {broker.host}:{broker.port}: {str(error) or f'no connection in {connect_s:g} s'}"
                absent[NAMES[way]] = Absent(lack="not_present", cause=cause)
    return ProbeResult(readings=readings, absent=absent)


def _make_reading(rates: SustainedRate, traffic: Traffic) -> Reading:
    log.debug("probe first=%.0f last=%.0f bits_per_s", rates.first, rates.last)
    return Reading(
        value=rates.last,
        unit="bits_per_s",
        source=SOURCE,
        quality="measured",
        at=traffic.clock(),
        uncertainty=rates.uncertainty,
    )


async def _measure_up(transport: MqttTransport, place: str, piece_bytes: int, schedule: Schedule) -> list[Point]:
    filler = os.urandom(piece_bytes)

    async def send() -> None:
        await transport.publish(place, filler, assured=False)

    return await _fill_link(transport.traffic, lambda counts: counts.acked_bytes, send, piece_bytes, schedule)


async def _measure_down(transport: MqttTransport, place: str, piece_bytes: int, schedule: Schedule) -> list[Point]:
    async with transport.subscribe(place) as inbox, background(_discard(inbox)), backports.TaskGroup() as asking:

        async def subscribe_again() -> None:
            async with transport.subscribe(place):  # delivers the retained piece to all subscriptions
                pass

        async def send() -> None:
            asking.create_task(subscribe_again())

        await transport.publish(place, os.urandom(piece_bytes), retain=True)
        try:
            return await _fill_link(
                transport.traffic, lambda counts: counts.received_bytes, send, piece_bytes, schedule
            )
        finally:
            async with backports.timeout(CLEAR_S):
                await transport.publish(place, b"", retain=True, assured=False)


async def _discard(inbox: Inbox) -> None:
    async for _ in inbox:
        pass


async def _fill_link(
    traffic: Traffic,
    count_bytes: Callable[[Counts], int],
    send: Callable[[], Awaitable[None]],
    piece_bytes: int,
    schedule: Schedule,
) -> list[Point]:
    """Keep a link busy until its rate is known; return the bytes at each moment.

    Args:
        count_bytes: Bytes transferred according to the counts.

    Raises:
        NoData: The kernel does not count, or the connection changed.
        Unreachable: The connection was lost.
    """
    points: list[Point] = []
    first, requested = None, 0
    while True:
        if not (counts := traffic.counts()):
            raise NoData("the kernel does not count the bytes of this connection")
        first = first or counts
        if counts.connection != first.connection:
            raise NoData("the connection was lost during the test", lack="busy")
        done, lasted_s = count_bytes(counts) - count_bytes(first), counts.at - first.at
        points.append((counts.at, done))
        if _is_enough(counts, done, lasted_s, schedule):
            return points
        if requested - done < max(AHEAD_BYTES, AHEAD_S * done / max(lasted_s, AHEAD_S)):
            requested += piece_bytes
            await send()
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(PAUSE_S)


def _is_enough(counts: Counts, done: int, lasted_s: float, schedule: Schedule) -> bool:
    """Stop once enough was transferred, or once queues that delay other traffic have grown."""
    swollen = counts.rtt_s > max(MAX_RTT_GROWTH * counts.min_rtt_s, MIN_SWOLLEN_RTT_S)
    return lasted_s >= schedule.most_s or (lasted_s >= schedule.least_s and (swollen or done >= ENOUGH_BYTES))
