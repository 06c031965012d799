"""Cycles: CPU seconds times the clock of their moment, on boards of files whose clocks the test moves."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from device_agent.hardware.tools import LIVE_ROOT
from device_agent.measurement import cpu_cycles
from device_agent.measurement.cpu_cycles import CycleCounter
from device_agent.probes import cputime
from device_agent.probes.clocks import CpuClock
from device_agent.probes.cpufreq import parse_time_in_state
from device_agent.profile.schema import Cpu, Profile
from tests.machine import grow

POLICIES = "sys/devices/system/cpu/cpufreq"


class Board:
    """A board whose CPU seconds and clocks a test sets."""

    def __init__(self, root: Path, **cpu: object) -> None:
        self.root, self.now_s, self.busy_s = root, 100.0, 50.0
        profile = Profile(schema=1, id="test", name="test", cpu=Cpu(**cpu))
        self.counter = CycleCounter(root, profile, cpu_seconds=lambda: self.busy_s, clock=lambda: self.now_s)

    def says(self, khz: object, policy: int = 0, cpus: str = "0 1", states: str | None = None) -> None:
        files = {"affected_cpus": cpus, "scaling_cur_freq": khz}
        files |= {"stats/time_in_state": states} if states is not None else {}
        grow(self.root, {f"{POLICIES}/policy{policy}/{name}": content for name, content in files.items()})

    def runs(self, cpu_s: float, wall_s: float = 1.0) -> None:
        self.busy_s += cpu_s
        self.now_s += wall_s


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_at_one_clock_cycles_are_seconds_times_it(board):
    """2.5 CPU seconds at 1.2 GHz in two seconds of wall: 3e9 cycles."""
    board.says(1200000)
    board.counter.start()
    board.runs(1.5)
    board.counter.tick()
    board.runs(1.0)
    got = board.counter.stop()
    assert (got.cpu_s, got.cycles, got.mean_hertz) == pytest.approx((2.5, 3e9, 1.2e9))
    assert (got.provenance.quality, got.provenance.uncertainty) == ("measured", 0.03)
    assert got.provenance.source.endswith("cpufreq scaling_cur_freq")


def test_the_clock_of_a_moment_weighs_as_busy_as_the_process_was(board):
    """3 CPU seconds at 2 GHz and 1 at 1 GHz: 7e9 cycles, a mean of 1.75 GHz; a minute without work adds none."""
    board.says(2000000)
    board.counter.start()
    board.runs(3.0)
    board.counter.tick()
    board.says(1000000)
    board.runs(0.0, wall_s=60.0)
    board.counter.tick()
    board.runs(1.0)
    got = board.counter.stop()
    assert (got.cycles, got.mean_hertz) == pytest.approx((7e9, 1.75e9))


def test_between_two_samples_the_clock_is_their_mean(board):
    board.says(1000000)
    board.counter.start()
    board.runs(2.0)
    board.says(2000000)
    assert board.counter.stop().mean_hertz == pytest.approx(1.5e9)


def test_time_in_state_stands_above_samples(board):
    """Both samples say 1 GHz; the kernel counted 3 s at 2 GHz and 1 s at 1 GHz in between."""
    board.says(1000000, states="1000000 500\n2000000 70")
    board.counter.start()
    board.runs(4.0)
    board.says(1000000, states="1000000 600\n2000000 370")
    got = board.counter.stop()
    assert got.mean_hertz == pytest.approx(1.75e9)
    assert got.provenance.source.endswith("cpufreq time_in_state")


def test_an_account_that_began_anew_is_not_used(board):
    """After its policy was off: the samples tell."""
    board.says(1000000, states="1000000 500\n2000000 700")
    board.counter.start()
    board.runs(4.0)
    board.says(1000000, states="1000000 5\n2000000 9")
    assert board.counter.stop().mean_hertz == pytest.approx(1e9)


def test_a_firmware_s_clock_stands_above_time_in_state(tmp_path):
    """On a Raspberry Pi the account holds what Linux asked for: 1400 MHz, while the firmware gave 600."""
    board = Board(tmp_path, sources=("firmware", "cpufreq"))
    grow(tmp_path, {"tools/vcgencmd measure_clock arm": "frequency(48)=600000000"})
    board.says(1400000, states="1400000 100")
    board.counter.start()
    board.runs(1.0)
    board.says(1400000, states="1400000 200")
    got = board.counter.stop()
    assert got.cycles == pytest.approx(6e8)
    assert got.provenance.source.endswith("firmware")


def test_an_announced_clock_is_modelled_and_its_account_with_it(tmp_path):
    board = Board(tmp_path, sources=("firmware", "cpufreq"))
    board.says(1400000, states="600000 900\n1400000 100")
    board.counter.start()
    board.runs(1.0)
    board.says(1400000, states="600000 1000\n1400000 100")
    got = board.counter.stop()
    assert got.cycles == pytest.approx(1.4e9)
    assert (got.provenance.quality, got.provenance.uncertainty) == ("modelled", None)


def test_low_clocks_are_put_right_in_the_account_too(tmp_path):
    """All of the second at 100 MHz, which such cores run at 88."""
    board = Board(tmp_path, low_opp_correction=0.88, low_opp_hertz=200e6)
    board.says(100000, states="100000 0\n1900000 0")
    board.counter.start()
    board.runs(1.0)
    board.says(100000, states="100000 100\n1900000 0")
    got = board.counter.stop()
    assert got.cycles == pytest.approx(88e6)
    assert got.provenance.quality == "corrected"


def test_clusters_weigh_as_busy_as_their_cpus_were(board):
    """CPUs 0 to 3 were busy for 1 s at 1 GHz, CPUs 4 and 5 for 3 s at 2 GHz: a mean of 1.75 GHz."""
    stat = "cpu 0 0 0 0 0\ncpu0 {0} 0 0 0 0\ncpu1 0 0 0 0 0\ncpu4 {1} 0 0 0 0\ncpu5 {1} 0 0 0 0"
    board.says(1000000, policy=0, cpus="0 1 2 3")
    board.says(2000000, policy=4, cpus="4 5")
    hz = cputime.TICKS_PER_S
    grow(board.root, {"proc/stat": stat.format(7 * hz, 9 * hz)})
    board.counter.start()
    board.runs(4.0)
    grow(board.root, {"proc/stat": stat.format(8 * hz, 10.5 * hz).replace(".0", "")})
    assert board.counter.stop().mean_hertz == pytest.approx(1.75e9)


def test_clusters_of_which_nothing_is_known_weigh_by_their_cpus(board):
    """(4 x 1 + 2 x 2.5) / 6 = 1.5 GHz."""
    board.says(1000000, policy=0, cpus="0 1 2 3")
    board.says(2500000, policy=4, cpus="4 5")
    board.counter.start()
    board.runs(4.0)
    assert board.counter.stop().mean_hertz == pytest.approx(1.5e9)


def test_without_a_clock_there_are_seconds_and_no_cycles(board):
    """None, not zero."""
    board.counter.start()
    board.runs(2.0)
    board.counter.tick()
    got = board.counter.stop()
    assert (got.cpu_s, got.cycles, got.mean_hertz, got.provenance) == (2.0, None, None, None)


def test_a_clock_that_fails_for_a_while_loses_no_cycles(board):
    """4 s between 1 and 3 GHz with garbage in the middle, then 1 s after the last answer: 2 x 4 + 3 x 1."""
    board.says(1000000)
    board.counter.start()
    board.runs(2.0)
    board.says("<unknown>")
    board.counter.tick()
    board.runs(2.0)
    board.says(3000000)
    board.counter.tick()
    board.says("<unknown>")
    board.runs(1.0)
    assert board.counter.stop().cycles == pytest.approx(11e9)


def test_a_block_in_which_nothing_ran_has_no_mean_clock(board):
    board.says(1000000)
    board.counter.start()
    got = board.counter.stop()
    assert (got.cpu_s, got.cycles, got.mean_hertz) == (0.0, 0.0, None)


def test_a_block_begins_anew(board):
    board.says(1000000)
    for _ in range(2):
        board.counter.start()
        board.runs(1.0)
        assert board.counter.stop().cycles == pytest.approx(1e9)


@pytest.mark.parametrize(("cost_s", "least", "most"), [(0.005, 18, 22), (0.0, 195, 205), (1.0, 3, 5)])
def test_a_dear_clock_is_read_seldom(tmp_path, cost_s, least, most):
    """Ticks come 20 times a second for 10 s. A reading of 5 ms is made every half second; none waits more than 2 s."""
    reads: list[float] = []
    board = Board(tmp_path)
    board.says(1000000)

    def cpu_s() -> float:
        """Return the CPU seconds, which every reading asks once."""
        reads.append(board.now_s)
        board.now_s += cost_s
        return 0.0

    profile = Profile(schema=1, id="test", name="test")
    counter = CycleCounter(tmp_path, profile, cpu_seconds=cpu_s, clock=lambda: board.now_s)
    counter.start()
    reads.clear()
    until_s = board.now_s + 10.0
    while board.now_s < until_s:
        board.now_s += 0.05
        counter.tick()
    assert least <= len(reads) <= most


def test_several_clocks_are_as_good_as_the_worst_of_them():
    clocks = [
        CpuClock(name=f"policy{n}", hertz=1e9, source="s", quality=q) for n, q in enumerate(("measured", "corrected"))
    ]
    first = cpu_cycles.describe_clocks(cpu_cycles.ClockSnapshot(clocks=tuple(clocks)))
    assert first.quality == "corrected"
    second = cpu_cycles.describe_clocks(cpu_cycles.ClockSnapshot(clocks=(clocks[0],)))
    assert cpu_cycles.choose_worse(first, second) == cpu_cycles.choose_worse(second, first) == first


def test_cpu_seconds_are_those_of_all_threads_and_ended_children():
    """Two threads that hash for 0.15 s of their own each, then a child that does."""
    before = cpu_cycles.read_cpu_seconds()
    threads = [threading.Thread(target=burn, args=(0.15,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after_threads = cpu_cycles.read_cpu_seconds()
    assert after_threads - before >= 0.29
    child = os.fork()
    if not child:
        burn(0.15)
        os._exit(0)
    os.waitpid(child, 0)
    assert cpu_cycles.read_cpu_seconds() - after_threads >= 0.14


def burn(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        hashlib.sha256(bytes(1 << 16)).digest()


def test_a_thread_may_tick_while_blocks_begin_and_end(board):
    """A reading is charged once: 40 blocks of one second each at 1 GHz."""
    board.says(1000000)
    ended = threading.Event()

    def tick() -> None:
        while not ended.is_set():
            board.counter.tick()

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        for _ in range(40):
            board.counter.start()
            board.runs(1.0)
            assert board.counter.stop().cycles == pytest.approx(1e9)
    finally:
        ended.set()
        ticker.join()


def test_on_this_machine():
    """Whatever tells its clock: cycles are CPU seconds times a clock that some CPU can run by."""
    counter = CycleCounter(LIVE_ROOT, Profile(schema=1, id="test", name="test"))
    counter.start()
    burn(0.1)
    got = counter.stop()
    assert got.cpu_s >= 0.1
    if got.cycles is None:
        pytest.skip("nothing tells this machine's clock")
    assert 1e8 < got.cycles / got.cpu_s < 1e10


class TestTimeInState:
    """The kernel's account: kHz and hundredths of a second."""

    def test_the_mean_is_weighted_by_time(self):
        """3 s at 1.5 GHz and 1 s at 0.5 GHz: 1.25 GHz."""
        before = parse_time_in_state("500000 100\n1500000 1000")
        after = parse_time_in_state("500000 200\n1500000 1300")
        spent = cpu_cycles.subtract_times(before, after)
        assert spent == pytest.approx({0.5e9: 1.0, 1.5e9: 3.0})
        assert cpu_cycles.mean_hertz(spent) == pytest.approx(1.25e9)

    @pytest.mark.parametrize(
        "after",
        ["500000 100\n1500000 1000", "500000 0\n1500000 5", "1500000 1100", "500000 99\n1500000 2000"],
        ids=["nothing passed", "began anew", "a state is gone", "one goes back"],
    )
    def test_an_account_without_a_difference_tells_nothing(self, after):
        before = parse_time_in_state("500000 100\n1500000 1000")
        assert cpu_cycles.subtract_times(before, parse_time_in_state(after)) is None


def test_seconds_between_are_by_cpu_and_never_negative():
    """A CPU that was switched off and on again began anew, one that is new has no before."""
    before = cputime.parse_stat("cpu 9 0 0 9 0\ncpu0 100 0 0 0 0\ncpu1 500 0 0 0 0", ticks_per_s=100)
    after = cputime.parse_stat("cpu 9 0 0 9 0\ncpu0 150 0 0 0 0\ncpu1 20 0 0 0 0\ncpu2 7 0 0 0 0", ticks_per_s=100)
    assert cpu_cycles.count_busy_seconds(before, after) == pytest.approx({0: 0.5, 1: 0.0})
