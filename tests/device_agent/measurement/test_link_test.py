"""The probe of the link: which part of what it saw it tells, and both ways through real brokers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from device_agent.config import AgentConfig
from device_agent.measurement.link_test import MIN_THIRD_BYTES, Point, Schedule, compute_sustained, probe_link
from edge_server.fleet import broker
from shared.data.spec import Data
from shared.errors import NoData
from shared.protocol.topics import topic
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.machine import free_port

SHORT = Schedule(skipped_s=0.1, least_s=0.4, most_s=0.8)
NAMES = {"link.up_bits_per_s", "link.down_bits_per_s"}


def points(*stretches: tuple[float, float]) -> list[Point]:
    """Return what was seen every 10 ms of stretches of (seconds, Mbit/s)."""
    seen, at, done = [(0.0, 0)], 0.0, 0.0
    for seconds, rate in stretches:
        for _ in range(round(100 * seconds)):
            at, done = at + 0.01, done + rate * 1e4 / 8
            seen.append((at, int(done)))
    return seen


def test_a_steady_link_is_told_as_it_is() -> None:
    rates = compute_sustained(points((4, 8)))
    assert (rates.first, rates.last) == (pytest.approx(8e6, rel=0.01), pytest.approx(8e6, rel=0.01))


def test_the_first_second_does_not_count() -> None:
    """TCP begins slowly, a bucket of credit fast."""
    for start in (0.5, 100):
        rates = compute_sustained(points((1, start), (3, 8)))
        assert rates.first == pytest.approx(8e6, rel=0.05)


def test_credit_that_lasts_longer_shows_in_the_first_third() -> None:
    """3 s at 50, then 8 Mbit/s: told is the last third, and its distance from the first says that something was off."""
    rates = compute_sustained(points((3, 50), (2, 8)))
    assert (rates.first, rates.last) == (pytest.approx(50e6, rel=0.01), pytest.approx(8e6, rel=0.01))


def test_a_very_slow_link_is_told_by_all_that_counts() -> None:
    """At 200 kbit/s a third of 2 s is 17 kB, a packet more or less: all 50 kB say more."""
    seen = points((1, 0.2), (1.4, 0.2), (0.6, 0.6))
    assert seen[-1][1] - seen[-60][1] < MIN_THIRD_BYTES
    assert compute_sustained(seen).last == pytest.approx((1.4 * 0.2 + 0.6 * 0.6) / 2 * 1e6, rel=0.02)


@pytest.mark.parametrize("seen", [points(), points((0.5, 8)), points((1, 8)), points((4, 0))])
def test_what_is_too_short_or_stands_still_is_no_rate(seen: list[Point]) -> None:
    """Zero bits a second would be a figure; that nothing passed is none."""
    with pytest.raises(NoData) as caught:
        compute_sustained(seen)
    assert caught.value.lack == "invalid"


def config(folder: Path, port: int, version: int = 5) -> AgentConfig:
    told = Broker(port=port, version=version)
    return AgentConfig(device="board", state_dir=str(folder), data=Data(source="digits"), broker=told)


@pytest.mark.broker
@pytest.mark.parametrize(("embedded", "version"), [(False, 5), (False, 3), (True, 3)])
async def test_both_ways_are_measured_through_the_broker(tmp_path, embedded, version) -> None:
    """Also over MQTT 3.1.1, and over the broker in pure Python; nothing retained is left behind."""
    if not embedded and broker.find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    async with broker.run_private_broker(tmp_path, embedded=embedded) as here:
        found = await probe_link(config(tmp_path, here.port, version), SHORT)
        assert not found.absent
        assert set(found.readings) == NAMES
        assert all(1e6 < reading.value < 1e12 for reading in found.readings.values())
        transport = MqttTransport(Broker(port=here.port, version=version), "after")
        async with transport.running():
            await transport.connected.wait()
            async with transport.subscribe(topic("lab", "board", "probe")) as inbox:
                await transport.publish("unrelated", b"")
                await asyncio.sleep(0.1)
                assert not [*inbox.drain()]


def test_without_a_broker_both_figures_are_absent_and_say_where_none_was(tmp_path) -> None:
    port = free_port()
    found = asyncio.run(probe_link(config(tmp_path, port), connect_s=0.1))
    assert not found.readings
    assert set(found.absent) == NAMES
    assert all(f":{port}: " in one.cause and one.cause.partition(f":{port}: ")[2] for one in found.absent.values())


def test_a_rate_that_ends_as_it_began_by_luck_has_the_spread_of_what_lay_between() -> None:
    """6 and 10 Mbit/s by turns: both thirds have 8, which no moment of them had."""
    rates = compute_sustained(points((1, 8), *[(0.5, 6), (0.5, 10)] * 3))
    assert abs(rates.first - rates.last) < 0.2e6
    assert 0.5e6 < rates.uncertainty < 2.5e6


def test_no_rate_is_surer_than_the_test_is_good() -> None:
    """A link without any jitter: two per cent of it all the same."""
    rates = compute_sustained(points((4, 8)))
    assert rates.uncertainty >= 0.02 * rates.last


def test_a_link_that_slows_down_is_as_unsure_as_its_thirds_are_apart() -> None:
    rates = compute_sustained(points((3, 50), (2, 8)))
    assert rates.uncertainty >= rates.first - rates.last
