"""What a block costs: exact on given clocks, absent where nobody measures."""

from __future__ import annotations

import threading
import time

import pytest

from device_agent.metering import GivenMeter, ProcessMeter, Spent


def test_seconds_are_the_difference_of_each_clock() -> None:
    """Wall and CPU seconds come from their own clocks; joules stay absent, not zero."""
    wall, cpu = iter([100.0, 102.5]), iter([7.0, 7.25])
    with ProcessMeter(clock=lambda: next(wall), cpu_clock=lambda: next(cpu)).task() as spent:
        assert spent == Spent()
    assert spent == Spent(compute_s=2.5, cpu_s=0.25, joules=None)


def test_a_block_that_fails_is_measured_all_the_same() -> None:
    wall, cpu = iter([1.0, 3.0]), iter([0.0, 1.0])
    meter = ProcessMeter(clock=lambda: next(wall), cpu_clock=lambda: next(cpu))
    with pytest.raises(KeyError), meter.task() as spent:
        raise KeyError
    assert (spent.compute_s, spent.cpu_s) == (2.0, 1.0)


def test_real_clocks_tell_computing_from_waiting() -> None:
    """A block that waits takes wall seconds and hardly a CPU second; one that computes takes both."""
    with ProcessMeter().task() as waited:
        threading.Event().wait(0.2)
    with ProcessMeter().task() as computed:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
    assert waited.compute_s >= 0.2
    assert waited.cpu_s < 0.1 <= computed.cpu_s


def test_a_given_meter_charges_what_it_was_told() -> None:
    """Replay knows wall seconds only; CPU seconds and joules are absent."""
    with GivenMeter(12.0).task() as spent:
        pass
    assert spent == Spent(compute_s=12.0, cpu_s=None, joules=None)
