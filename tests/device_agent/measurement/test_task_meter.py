"""What a block costs: exact on given clocks, absent where nobody measures."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from device_agent.config import EmulatedPower
from device_agent.measurement.cpu_cycles import CycleCounter
from device_agent.measurement.power_log import PowerLog
from device_agent.measurement.task_meter import (
    CPU_CLOCK,
    WALL_CLOCK,
    BlockCost,
    FixedMeter,
    ProcessMeter,
    charge_transfer,
)
from device_agent.profile.schema import Cpu, Profile
from shared.protocol.measurements import Cost
from tests.device_agent.sources import Given, Hand

ONE_GIGAHERTZ = Profile(schema=1, id="test", name="test", cpu=Cpu(sources=(), nominal_hertz=1e9))


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_seconds_are_the_difference_of_each_clock() -> None:
    """Wall and CPU seconds come from their own clocks; joules stay absent, not zero."""
    wall, cpu = iter([100.0, 102.5]), iter([7.0, 7.25])
    with ProcessMeter(clock=lambda: next(wall), cpu_clock=lambda: next(cpu)).task() as spent:
        assert spent.add_to(Cost()) == Cost()
    assert (spent.compute_s, spent.cpu_s, spent.joules, spent.cycles) == (2.5, 0.25, None, None)
    assert spent.provenance == {"compute_s": WALL_CLOCK, "cpu_s": CPU_CLOCK}


def test_a_block_that_fails_is_measured_all_the_same() -> None:
    wall, cpu = iter([1.0, 3.0]), iter([0.0, 1.0])
    meter = ProcessMeter(clock=lambda: next(wall), cpu_clock=lambda: next(cpu))
    with pytest.raises(KeyError), meter.task() as spent:
        raise KeyError
    assert (spent.compute_s, spent.cpu_s) == (2.0, 1.0)


def test_real_clocks_tell_computing_from_waiting() -> None:
    """A block that waits takes more wall seconds than CPU seconds; one that computes takes both."""
    with ProcessMeter().task() as waited:
        threading.Event().wait(0.2)
    with ProcessMeter().task() as computed:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
    assert waited.compute_s >= 0.2
    assert waited.cpu_s < waited.compute_s
    assert computed.cpu_s >= 0.1


def test_a_given_meter_charges_what_it_was_told() -> None:
    """Replay knows wall seconds only; CPU seconds and joules are absent."""
    with FixedMeter(BlockCost(compute_s=12.0)).task() as spent:
        pass
    assert spent == BlockCost(compute_s=12.0, cpu_s=None, joules=None)


def test_a_given_meter_charges_the_task_once_and_then_steps() -> None:
    """A task that only measures is a block itself; every later block of it is one step."""
    meter, charged = FixedMeter(BlockCost(compute_s=12.0), BlockCost(compute_s=0.5)), []
    for _ in range(3):
        with meter.task() as spent:
            charged.append(spent.compute_s)
    assert charged == [12.0, 0.5, 0.5]


def test_threads_and_ended_children_count():
    """CPU seconds of a thread and of a child process that has ended are the task's too."""
    with ProcessMeter().task() as spent:
        thread = threading.Thread(target=compute, args=(0.2,))
        thread.start()
        thread.join()
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"], os.environ)
        os.waitpid(child, 0)
    assert spent.cpu_s > 0.22


def test_a_task_is_charged_its_joules_and_cycles(tmp_path: Path):
    """At 4 W and 1 GHz, both known: joules are 4 W times wall seconds, cycles 1 GHz times CPU seconds."""
    hand, cpu = Hand(), Hand(7.0)
    power = PowerLog(Given(clock=hand, period_s=0.1), hand)
    cycles = CycleCounter(tmp_path, ONE_GIGAHERTZ, cpu_seconds=cpu, clock=hand)
    with ProcessMeter(power=power, cycles=cycles, idle_w=2.5, clock=hand, cpu_clock=cpu).task() as spent:
        passing(hand, power, 3.0, 30)
        cpu.now += 2.0
    assert (spent.compute_s, spent.cpu_s) == (pytest.approx(3.0), pytest.approx(2.0))
    assert spent.joules == pytest.approx(4.0 * 3.0)
    assert spent.cycles == pytest.approx(1e9 * 2.0)
    assert spent.mean_hertz == pytest.approx(1e9)
    found = spent.provenance["compute_joules"]
    assert (found.source, found.uncertainty) == ("given", pytest.approx(0.02, rel=0.01))
    assert spent.provenance["cycles"].quality == "modelled"  # nobody but the profile knew the clock


def test_a_source_that_fails_leaves_joules_absent():
    """A task is done all the same; its joules are None and have no provenance, never 0."""
    with PowerLog(Given(fails=True)) as power, ProcessMeter(power=power).task() as spent:
        pass
    assert spent.joules is None
    assert "compute_joules" not in spent.provenance


def test_two_tasks_of_one_meter_do_not_mix():
    """The second block is charged its own seconds and joules alone."""
    hand = Hand()
    power = PowerLog(Given(clock=hand, period_s=0.1), hand)
    meter = ProcessMeter(power=power, clock=hand)
    with meter.task() as first:
        passing(hand, power, 3.0, 30)
    with meter.task() as second:
        passing(hand, power, 1.0, 10)
    assert (first.compute_s, first.joules) == (pytest.approx(3.0), pytest.approx(12.0))
    assert (second.compute_s, second.joules) == (pytest.approx(1.0), pytest.approx(4.0))


def test_what_was_spent_is_added_to_what_it_cost_before():
    """Download figures stay, with their provenance; an idle baseline that the trainer does not know stays too."""
    before = Cost(download_s=2.0, bytes_down=10, idle_w=3.0, provenance={"download_s": WALL_CLOCK})
    after = BlockCost(compute_s=1.0, cpu_s=0.5, joules=4.0, provenance={"cpu_s": CPU_CLOCK}).add_to(before)
    assert after == Cost(
        download_s=2.0,
        bytes_down=10,
        idle_w=3.0,
        compute_s=1.0,
        cpu_s=0.5,
        compute_joules=4.0,
        provenance={"download_s": WALL_CLOCK, "cpu_s": CPU_CLOCK},
    )


def passing(hand: Hand, power: PowerLog, seconds: float, samples: int) -> None:
    """Let time pass on a clock of ours, with so many samples in it; where there is none, a new one at neither end."""
    for _ in range(samples):
        hand.now += seconds / samples
        power.mark()
    hand.now += 0.0 if samples else seconds


def test_what_passes_while_a_session_waits_is_charged_to_its_exchange():
    """5 W in 3 s of computing, 2 W in 8 s of waiting, a sample each 0.1 s: 15 J and 16 J but for the slopes."""
    hand, waits = Hand(), []
    power = PowerLog(Given(watts=lambda _: 2.0 if waits else 5.0, clock=hand, period_s=0.1), hand)
    with ProcessMeter(power=power, clock=hand).task() as spent:
        for _ in range(2):
            passing(hand, power, 1.5, 15)
            with spent.measure_exchange():
                waits.append(1)
                passing(hand, power, 4.0, 40)
                waits.clear()
    assert (spent.compute_s, spent.exchange_s) == (pytest.approx(3.0), pytest.approx(8.0))
    assert spent.exchange_joules == pytest.approx(16.0, abs=4 * 3.0 * 0.1 / 2)
    assert spent.joules == pytest.approx(15.0, abs=4 * 3.0 * 0.1 / 2)
    assert spent.provenance["exchange_joules"].quality == "measured"


def test_waits_too_short_for_the_samples_are_told_as_modelled():
    """A source that is read each half second cannot tell a wait of 10 ms from what is around it."""
    hand = Hand()
    power = PowerLog(Given(clock=hand, period_s=0.5), hand)
    with ProcessMeter(power=power, clock=hand).task() as spent:
        for _ in range(5):
            passing(hand, power, 0.5, 1)
            with spent.measure_exchange():
                passing(hand, power, 0.01, 0)
    assert spent.exchange_joules == pytest.approx(4.0 * 0.05)
    assert spent.joules == pytest.approx(4.0 * 2.5)
    assert {spent.provenance[name].quality for name in ("exchange_joules", "compute_joules")} == {"modelled"}


def test_a_task_that_waits_for_nobody_has_no_exchange():
    """None, and not zero."""
    with PowerLog(Given()) as power, ProcessMeter(power=power).task() as spent:
        pass
    assert (spent.exchange_s, spent.exchange_joules) == (None, None)


def test_an_emulated_board_takes_its_idle_watts_and_those_of_its_busy_cores() -> None:
    """2.5 s at 2 W and 0.25 CPU seconds at 8 W; of them half a second waits, which takes 1 J of its own."""
    board = EmulatedPower(idle_w=2.0, busy_w=8.0)
    wall, cpu = iter([100.0, 101.0, 101.5, 103.0]), iter([7.0, 7.25])
    meter = ProcessMeter(clock=lambda: next(wall), cpu_clock=lambda: next(cpu), emulated=board)
    with meter.task() as spent, spent.measure_exchange():
        pass
    assert (spent.joules, spent.exchange_joules, spent.idle_w) == (2.5 * 2.0 + 0.25 * 8.0, 1.0, 2.0)
    assert {spent.provenance[name].quality for name in ("compute_joules", "exchange_joules")} == {"modelled"}


def test_a_transfer_of_an_emulated_board_takes_what_its_radio_does() -> None:
    """What nobody gave a figure of stays absent, not zero."""
    board = EmulatedPower(idle_w=1.0, tx_w=0.5)
    cost = charge_transfer(board, Cost(), "download_joules", 10.0, 14.0)
    assert (cost.download_joules, cost.idle_w) == (None, 1.0)
    cost = charge_transfer(board, cost, "upload_joules", 20.0, 24.0)
    assert (cost.upload_joules, cost.provenance["upload_joules"].quality) == (6.0, "modelled")
