"""CPU cycles of a computation, from busy seconds and clock frequencies.

Performance counters would be exact, but few of these boards expose them to a process. Cycles in which a core waits for
memory count too: right for energy, not for operations.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from device_agent.hardware.files import read_text_or
from device_agent.probes.clocks import POLICY_FOLDER, UNCERTAINTY, WORST_LAST, CpuClock, correct_hertz, read_clocks
from device_agent.probes.cpufreq import read_time_in_state
from device_agent.probes.cputime import ALL_CPUS, SOURCE, CpuSeconds, parse_stat
from device_agent.profile.schema import Cpu, Profile
from shared.errors import NoData
from shared.protocol.measurements import Provenance
from shared.runtime.clock import Clock, monotonic

MAX_TIME_SHARE = 0.01
"""Fraction of the time that reading clocks may take; slower reads are made less often."""

MAX_PAUSE_S = 2.0
TICK_S = 0.2


class Cycles(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds and cycles of a block; None if no clock is known.

    Attributes:
        cpu_s: Busy seconds of this process: all threads, and children that have ended.
    """

    cpu_s: float
    cycles: float | None = None
    mean_hertz: float | None = None
    provenance: Provenance | None = None


class ClockSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of clocks and cumulative kernel counters; `states` by policy. Unavailable values are empty."""

    clocks: tuple[CpuClock, ...]
    states: dict[str, dict[float, float]] = {}
    cpus: dict[str, CpuSeconds] = {}


def read_cpu_seconds() -> float:
    """Return the CPU seconds of this process: all threads, and children that have been waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_clock_snapshot(root: Path, cpu: Cpu) -> ClockSnapshot:
    """Read the clocks and their weights; raise `NoData` if no clock is known."""
    answer = read_clocks(root, cpu)
    if answer.part:
        raise NoData(answer.part.cause, lack=answer.part.lack)
    clocks = answer.clocks
    return ClockSnapshot(
        clocks=clocks,
        states=_read_states(root, clocks, cpu),
        cpus=parse_stat(read_text_or(root / SOURCE)) if len(clocks) > 1 else {},
    )


def compute_mean_hertz(before: ClockSnapshot, after: ClockSnapshot, cpu: Cpu) -> float:
    """Return the mean clock of busy CPUs between two moments.

    A clock is the time-weighted mean of its states if the kernel counts them, else the mean of both ends. Several
    clocks are weighted by the busy time of their CPUs, whatever ran on them, since the CPUs of this process are not
    known. The state counters include idle time, so moments should lie about as close as a governor follows the load.

    Args:
        cpu: CPU table of the profile, whose correction applies.
    """
    busy = count_busy_seconds(before.cpus, after.cpus)
    weights = [sum(busy.get(number, 0.0) for number in clock.cpus) for clock in after.clocks]
    if not any(weights):
        weights = [float(max(1, len(clock.cpus))) for clock in after.clocks]
    earlier = {clock.name: clock.hertz for clock in before.clocks}
    each = []
    for clock in after.clocks:
        times = subtract_times(before.states.get(clock.name, {}), after.states.get(clock.name, {}))
        ends = (earlier.get(clock.name, clock.hertz) + clock.hertz) / 2
        corrected = {correct_hertz(hertz, cpu)[0]: seconds for hertz, seconds in (times or {}).items()}
        each.append(mean_hertz(corrected) if corrected else ends)
    return sum(weight * hertz for weight, hertz in zip(weights, each, strict=True)) / sum(weights)


def count_busy_seconds(before: Mapping[str, CpuSeconds], after: Mapping[str, CpuSeconds]) -> dict[int, float]:
    """Return busy seconds by CPU number, for CPUs in both samples; 0 if a counter went backwards."""
    return {
        int(name.removeprefix(ALL_CPUS)): max(0.0, after[name].busy - before[name].busy)
        for name in after.keys() & before.keys()
        if name != ALL_CPUS
    }


def subtract_times(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float] | None:
    """Return the seconds at each clock between two counts; None if no time was counted, or the counter was reset."""
    seconds_by_hertz = {hertz: seconds - before.get(hertz, 0.0) for hertz, seconds in after.items()}
    if (
        before.keys() - after.keys()
        or min(seconds_by_hertz.values(), default=-1.0) < 0
        or not any(seconds_by_hertz.values())
    ):
        return None
    return seconds_by_hertz


def mean_hertz(seconds_by_hertz: Mapping[float, float]) -> float:
    """Return the time-weighted mean clock."""
    return sum(hertz * seconds for hertz, seconds in seconds_by_hertz.items()) / sum(seconds_by_hertz.values())


class CycleCounter:
    """Counts the cycles of this process between `start` and `stop`.

    `tick` may be called from another thread at any rate: it reads the clocks only as often as is cheap, and skips
    unreadable clocks.
    """

    def __init__(
        self, root: Path, profile: Profile, *, cpu_seconds: Clock = read_cpu_seconds, clock: Clock = monotonic
    ) -> None:
        self._root = root
        self._cpu = profile.cpu
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._started = self._counted = self._cycles = self._next = 0.0
        self._last: ClockSnapshot | None = None
        self._provenance: Provenance | None = None

    def start(self) -> None:
        """Start a block."""
        with self._lock:
            self._cycles, self._next = 0.0, -math.inf
            self._last = self._provenance = None
            self._started = self._counted = self._cpu_seconds()
        self.tick()

    def tick(self) -> None:
        """Read the clocks if the last reading is old enough."""
        with self._lock:
            if self._clock() >= self._next:
                self._read()

    def stop(self) -> Cycles:
        """End the block and return its cycles."""
        with self._lock:
            self._read()
            busy_s = self._cpu_seconds()
            cpu_s = busy_s - self._started
            if self._last is None:
                return Cycles(cpu_s=cpu_s)
            self._charge(busy_s, self._last)  # the cost of this reading, or all since the last successful one
            mean = self._cycles / cpu_s if cpu_s > 0 else None
            return Cycles(cpu_s=cpu_s, cycles=self._cycles, mean_hertz=mean, provenance=self._provenance)

    def _read(self) -> None:
        """Charge the computation since the last reading; if the clocks are unreadable, the next reading charges it."""
        began, busy_s = self._clock(), self._cpu_seconds()
        try:
            now = read_clock_snapshot(self._root, self._cpu)
        except NoData:
            return
        finally:
            self._next = began + min(MAX_PAUSE_S, (self._clock() - began) / MAX_TIME_SHARE)
        self._charge(busy_s, now)

    def _charge(self, busy_s: float, now: ClockSnapshot) -> None:
        self._cycles += (busy_s - self._counted) * compute_mean_hertz(self._last or now, now, self._cpu)
        self._counted, self._last = busy_s, now
        self._provenance = choose_worse(self._provenance, describe_clocks(now))


class Ticker:
    """Lets the counter of the current block read the clocks periodically.

    In one thread for all blocks, which sleeps without wake-ups after a pause: starting one takes longer than a short
    block.
    """

    def __init__(self) -> None:
        self._counter: CycleCounter | None = None
        self._is_needed, self._end = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def tick(self, cycles: CycleCounter) -> Iterator[None]:
        """Start a counter, and let it read the clocks during the block."""
        cycles.start()
        self._counter = cycles
        if not self._thread:
            self._thread = threading.Thread(target=self._run, name="cycles", daemon=True)
            self._thread.start()
        if not self._is_needed.is_set():
            self._is_needed.set()
        try:
            yield
        finally:
            self._counter = None

    def _run(self) -> None:
        while self._is_needed.wait():  # as long as the process lives
            self._end.wait(TICK_S)
            if counter := self._counter:
                counter.tick()
            else:
                self._is_needed.clear()
                if self._counter:  # a block has begun meanwhile
                    self._is_needed.set()


def describe_clocks(now: ClockSnapshot) -> Provenance:
    """Return the provenance of cycles counted with these clocks: that of the worst."""
    worst = max(now.clocks, key=lambda clock: WORST_LAST.index(clock.quality))
    source = "cpufreq time_in_state" if worst.name in now.states else worst.source
    return Provenance(source=f"CPU seconds by {source}", quality=worst.quality, uncertainty=UNCERTAINTY[worst.quality])


def choose_worse(current: Provenance | None, other: Provenance) -> Provenance:
    """Return the provenance of lower quality, `current` if equal."""
    if current is None or WORST_LAST.index(current.quality) < WORST_LAST.index(other.quality):
        return other
    return current


def _read_states(root: Path, clocks: tuple[CpuClock, ...], cpu: Cpu) -> dict[str, dict[float, float]]:
    """Return the time in states of the policies that count it; useless if firmware overrides the clock."""
    states = {}
    for clock in clocks:
        if clock.name.startswith("policy") and "firmware" not in cpu.sources:
            with suppress(NoData):
                states[clock.name] = read_time_in_state(root / POLICY_FOLDER / clock.name)
    return states
