"""Power log: when it samples, what it computes, and that nothing waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from device_agent.measurement.energy import Energy
from device_agent.measurement.power_log import MAX_WAIT_SHARE, PowerLog, describe_energy
from tests.device_agent.sources import Given, Hand

PAUSE = threading.Event()
PATIENCE_S = 300.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for the log's thread, however late a busy machine lets it run."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the log's thread does nothing"
        PAUSE.wait(0.005)


def by_hand(source: Given, **options: float) -> tuple[PowerLog, Hand]:
    """Return a log whose reads the test makes."""
    clock = Hand()
    source.clock = clock
    return PowerLog(source, clock, **options), clock


def sample(log: PowerLog, clock: Hand, *, seconds: float = 1.0, times: int = 1) -> None:
    for _ in range(times):
        clock.now += seconds
        log.mark()


def test_it_reads_often_while_busy_and_rarely_otherwise():
    """Idling at one read an hour gives one read; a busy block wakes the log at once, one at the slow rate does not.

    A read that is under way when a block ends is finished, and another may follow it.
    """
    source = Given()
    with PowerLog(source, idle_period_s=3600.0) as log:
        wait_for(lambda: source.reads == 1)
        PAUSE.wait(0.1)
        assert source.reads == 1
        with log.busy():
            wait_for(lambda: source.reads > 5)
        before = source.reads
        with log.busy(full_rate=False):
            PAUSE.wait(0.2)
        assert source.reads <= before + 2, "20 at the full rate"


def test_constant_watts_are_seconds_times_watts():
    log, clock = by_hand(Given())
    start = clock.now
    log.mark()
    sample(log, clock, seconds=0.01, times=50)
    found = log.energy(start, clock.now)
    assert found.joules == pytest.approx(4.0 * 0.5)
    assert found.covered_ratio == pytest.approx(1.0)
    assert describe_energy(log.source, found).source == "given"


def test_a_source_that_fails_makes_a_gap_and_comes_back():
    """From 10 to 22 nothing answers: what was seen before and after is kept, and the gap is told."""
    source = Given()
    log, clock = by_hand(source, period_s=1.0)
    start = clock.now
    sample(log, clock, times=10)
    source.fails = True
    sample(log, clock, times=8)
    source.fails = False
    sample(log, clock, times=12)
    found = log.energy(start, clock.now)
    assert found.joules == pytest.approx(4.0 * 30)
    assert found.covered_ratio == pytest.approx(21 / 30)
    told = describe_energy(source, found)
    assert (told.source.startswith("given"), "70%" in told.source, told.quality) == (True, True, "modelled")


def test_the_thread_lives_through_failures():
    source = Given(fails=True)
    with PowerLog(source, idle_period_s=0.02) as log:
        wait_for(lambda: source.reads > 3)
        source.fails = False
        wait_for(lambda: (latest := log.latest()) is not None and latest.value == 4.0)


def test_what_rest_takes_is_learnt_quickly_and_then_looked_at_rarely():
    """Every second until three samples are known, then every five; a log that never rests looks at nothing."""
    log, clock = by_hand(Given(watts=lambda _: 2.0))
    assert log.pause_s(full_rate=False) == 1.0
    sample(log, clock, times=3)
    assert log.pause_s(full_rate=False) == 5.0
    assert PowerLog(Given(), idle_period_s=1e6).pause_s(full_rate=False) == 1e6


def test_idle_watts_are_the_median_of_idle_samples_alone():
    """Blocks of 9 W in between, the short ones too, leave the 2 W of rest; before three samples nobody knows."""
    source = Given(watts=lambda _: 2.0)
    log, clock = by_hand(source)
    sample(log, clock, times=2)
    assert log.idle_w() is None
    sample(log, clock)
    assert log.idle_w() == 2.0
    source.watts = lambda _: 9.0
    for full_rate in (True, False):
        with log.busy(full_rate=full_rate):
            sample(log, clock, times=20)
    for _ in range(20):
        with log.busy():
            pass  # came and went between two reads
        sample(log, clock)
    log.hurry(seconds=50.0)
    sample(log, clock, times=20)
    assert log.idle_w() == 2.0


def test_nobody_waits_for_a_source_that_hangs():
    """While a read hangs, all that the agent's loop asks for returns at once."""
    source = Given()
    log = PowerLog(source, idle_period_s=0.02)
    log.start()
    wait_for(lambda: source.reads > 1)
    source.free.clear()
    hanging = source.reads
    wait_for(lambda: source.reads > hanging)
    began = time.monotonic()
    with log.busy():
        log.mark()
    log.hurry()
    log.idle_w()
    log.latest()
    log.energy(began - 0.2, began)
    assert time.monotonic() - began < 60.0
    source.free.set()
    log.__exit__()


def test_an_expensive_source_is_read_more_rarely():
    """One that takes 50 ms is read every 0.5 s, whatever is wanted; one that computes 10 ms, every second."""
    slow, _ = by_hand(Given(cost_s=0.05), period_s=0.1)
    assert slow.pause_s() == pytest.approx(0.05 / MAX_WAIT_SHARE)

    def compute(_: float) -> float:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return 4.0

    heavy, clock = by_hand(Given(watts=compute))
    sample(heavy, clock, times=10)
    assert heavy.pause_s() >= 1.0
    assert heavy.cpu_s >= 0.1


def test_a_counter_that_was_only_just_opened_counts_from_then():
    """Its first read has nothing to tell; the second one's mean stands for all the time since the log began."""
    source = Given(kind="mean", fails=True)
    log, clock = by_hand(source)
    start = clock.now
    log.mark()
    source.fails = False
    sample(log, clock, seconds=60)
    assert log.energy(start, clock.now) == Energy(240.0, 60.0, 1.0, 0.02)


def test_what_fell_out_of_the_ring_is_not_made_up():
    log, clock = by_hand(Given(), period_s=1.0, size=10)
    start = clock.now
    sample(log, clock, times=100)
    assert log.energy(start, clock.now) is None
    assert log.energy(clock.now - 8, clock.now).covered_ratio == 1.0


def test_an_old_reading_is_none():
    log, clock = by_hand(Given(), period_s=1.0)
    sample(log, clock)
    assert log.latest().value == 4.0
    clock.now += 3600
    assert log.latest() is None
