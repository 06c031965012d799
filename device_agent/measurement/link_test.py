"""Measure the link through the broker that the agent uses anyway.

Up: filler is published to a topic of this device without a subscriber. Down: a piece of it is retained there, and
subscribing again brings it again. So each way is measured alone; an echo would show the slower of the two for both.

A bucket of credit makes the start of a transfer faster than what follows, and TCP begins slowly: the first second does
not count, and of the rest the last third is reported. Its uncertainty is its distance from the first third, or how far
the rate of one moment lies from it, whichever is more.
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
from device_agent.measurement.reach import IN_USE, holding_off
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
"""Seconds of the link's own rate that are under way: enough to keep it busy, little for others to wait behind."""
AHEAD_BYTES = 32 * 1024
PIECE_BYTES, LARGE_BYTES, FAST_BITS_PER_S = 16 * 1024, 64 * 1024, 20e6
MAX_RTT_GROWTH, MIN_SWOLLEN_RTT_S = 5.0, 0.1
PAUSE_S = 0.005
MIN_THIRD_BYTES = 48 * 1024
"""A third of less says little: such a slow link is told by all that counts."""
SLICES, MIN_SLICE_BYTES = 10, 48 * 1024
LEAST_SHARE = 0.02
"""Of the rate: headers of TCP and MQTT, and a clock that is read between two wakes of a process."""
CLEAR_S = 2.0
SOURCE = "active probe through the broker"

Point: TypeAlias = tuple[float, int]
"""A moment, and the bytes so far."""

NAMES = {way: f"link.{way}_bits_per_s" for way in ("up", "down")}


@dataclass(frozen=True)
class Schedule:
    """Seconds of one way: those that do not count, all at least, and all at most."""

    skipped_s: float = 1.0
    least_s: float = 3.0
    most_s: float = 5.0


DEFAULT_SCHEDULE = Schedule()


@dataclass(frozen=True)
class SustainedRate:
    """Rates of the first third of what counts and of the last, in bits a second, and how far a moment's rate lies off.

    Attributes:
        spread: One standard deviation of the rates of short slices around the last third's.
    """

    first: float
    last: float
    spread: float

    @property
    def uncertainty(self) -> float:
        """Return one standard deviation of the last third's rate.

        The largest of three: its distance from the first third, which may be small by luck; the spread of what passed
        from one moment to the next; and what no such test is better than.
        """
        return max(abs(self.first - self.last), self.spread, LEAST_SHARE * self.last)


def compute_sustained(points: Sequence[Point], skipped_s: float = DEFAULT_SCHEDULE.skipped_s) -> SustainedRate:
    """Compute what a link carried for longer than its credit lasts.

    Raises:
        NoData: It was too short for that, or nothing passed.
    """
    counted = [(at, done) for at, done in points if at >= points[0][0] + skipped_s]
    third_s = (counted[-1][0] - counted[0][0]) / 3 if counted else 0.0
    if not third_s > 0:
        raise NoData(f"the probe lasted less than {skipped_s} s", lack="invalid")
    early = next(one for one in counted if one[0] >= counted[0][0] + third_s)
    late = next(one for one in reversed(counted) if one[0] <= counted[-1][0] - third_s)
    if counted[-1][1] - late[1] < MIN_THIRD_BYTES:
        late = counted[0]
    rates = [8 * (end[1] - begin[1]) / (end[0] - begin[0]) for begin, end in ((counted[0], early), (late, counted[-1]))]
    if not rates[1] > 0:
        raise NoData("nothing passed the link", lack="invalid")
    return SustainedRate(rates[0], rates[1], _compute_spread(counted, rates[1]))


def _compute_spread(counted: Sequence[Point], rate: float) -> float:
    """Return the root mean square of the distances of slices' rates from a rate.

    A slice is a tenth of the time that counts, or longer where it would have little in it.
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
    """Fill the link for 3 to 5 s each way and return `link.up_bits_per_s` and `link.down_bits_per_s`.

    The agent may run meanwhile, unless the broker knows it by an account: that has one connection. What the agent
    transfers then is not counted, and makes the result smaller.

    Args:
        config: Of the agent, with its broker.
        schedule: Seconds of each way.
        connect_s: Seconds that connecting may take.
    """
    with holding_off(config) as alone:
        if not alone:
            return _lacking(Absent(lack="busy", cause=IN_USE))
        return await _probe(config, schedule, connect_s)


def _lacking(absent: Absent) -> ProbeResult:
    return ProbeResult(absent=dict.fromkeys(NAMES.values(), absent))


async def _probe(config: AgentConfig, schedule: Schedule, connect_s: float) -> ProbeResult:
    broker = msgspec.structs.replace(config.broker, session_expiry_s=0)
    client_id, place = f"{config.site}.{config.device}.probe", topic(config.site, config.device, "probe")
    dates = BoardClock.of(Path(config.state_dir)).may_judge
    if refusal := await find_refusal(broker, client_id, place, max(1.0, connect_s / 4), dates=dates()):
        return _lacking(Absent(lack="not_present", cause=f"broker {broker.host}:{broker.port}: {refusal}"))
    transport = MqttTransport(broker, client_id, dates=dates)
    found: dict[str, Reading] = {}
    lacking: dict[str, Absent] = {}
    async with transport.running():
        for way, measure in (("up", _measure_up), ("down", _measure_down)):
            is_fast = NAMES["up"] in found and found[NAMES["up"]].value > FAST_BITS_PER_S
            piece_bytes = LARGE_BYTES if is_fast else PIECE_BYTES
            try:
                async with backports.timeout(connect_s):
                    await transport.connected.wait()
                points = await measure(transport, place, piece_bytes, schedule)
                found[NAMES[way]] = _make_reading(compute_sustained(points, schedule.skipped_s), transport.traffic)
            except NoData as error:
                lacking[NAMES[way]] = describe_absence(error)
            except (Unreachable, TimeoutError) as error:
                cause = f"broker {broker.host}:{broker.port}: {str(error) or f'no connection in {connect_s:g} s'}"
                lacking[NAMES[way]] = Absent(lack="not_present", cause=cause)
    return ProbeResult(readings=found, absent=lacking)


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

    async def more() -> None:
        await transport.publish(place, filler, assured=False)

    return await _fill_link(transport.traffic, lambda counts: counts.acked_bytes, more, piece_bytes, schedule)


async def _measure_down(transport: MqttTransport, place: str, piece_bytes: int, schedule: Schedule) -> list[Point]:
    async with transport.subscribe(place) as inbox, background(_drop(inbox)), backports.TaskGroup() as asking:

        async def again() -> None:
            async with transport.subscribe(place):  # brings what is retained to all who hear it
                pass

        async def more() -> None:
            asking.create_task(again())

        await transport.publish(place, os.urandom(piece_bytes), retain=True)
        try:
            return await _fill_link(
                transport.traffic, lambda counts: counts.received_bytes, more, piece_bytes, schedule
            )
        finally:
            async with backports.timeout(CLEAR_S):
                await transport.publish(place, b"", retain=True, assured=False)


async def _drop(inbox: Inbox) -> None:
    async for _ in inbox:
        pass


async def _fill_link(
    traffic: Traffic,
    passed: Callable[[Counts], int],
    more: Callable[[], Awaitable[None]],
    piece_bytes: int,
    schedule: Schedule,
) -> list[Point]:
    """Keep a link busy until its rate is known; return the bytes so far at each moment.

    Raises:
        NoData: The kernel does not count, or there was more than one connection.
        Unreachable: The connection was lost.
    """
    points: list[Point] = []
    begun, asked = None, 0
    while True:
        if not (counts := traffic.counts()):
            raise NoData("the kernel tells no bytes of this connection")
        begun = begun or counts
        if counts.connection != begun.connection:
            raise NoData("the connection was lost meanwhile", lack="busy")
        done, lasted_s = passed(counts) - passed(begun), counts.at - begun.at
        points.append((counts.at, done))
        if _is_enough(counts, done, lasted_s, schedule):
            return points
        if asked - done < max(AHEAD_BYTES, AHEAD_S * done / max(lasted_s, AHEAD_S)):
            asked += piece_bytes
            await more()
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(PAUSE_S)


def _is_enough(counts: Counts, done: int, lasted_s: float, schedule: Schedule) -> bool:
    """Return whether to stop: enough has passed, or queues on the way have grown, at whose end others wait."""
    swollen = counts.rtt_s > max(MAX_RTT_GROWTH * counts.min_rtt_s, MIN_SWOLLEN_RTT_S)
    return lasted_s >= schedule.most_s or (lasted_s >= schedule.least_s and (swollen or done >= ENOUGH_BYTES))
