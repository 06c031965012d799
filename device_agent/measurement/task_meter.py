"""Measure what a task costs, where it is spent. A figure that cannot be measured is None, never zero."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import msgspec

from device_agent.config import EmulatedPower
from device_agent.measurement.cpu_cycles import CycleCounter, read_cpu_seconds
from device_agent.measurement.power_log import PowerLog, describe_energy
from shared.protocol.measurements import Cost, Provenance
from shared.runtime.clock import Clock, monotonic

WALL_CLOCK = Provenance(source="monotonic clock", quality="measured")
CPU_CLOCK = Provenance(source="getrusage", quality="measured")
TICK_S = 0.2
MIN_RESOLVED_PERIODS = 2.0
"""Waits shorter than so many samples take the same watts as the computing between them, whatever either took."""


class Spent(msgspec.Struct):
    """Cost of one block; filled in when the block is left.

    Attributes:
        compute_s: Wall seconds.
        cpu_s: CPU seconds of all threads, and of child processes that have ended.
        cycles: CPU cycles, all cores together.
        mean_hertz: Mean clock while it was busy.
        joules: Of the whole device, idle included.
        exchange_s: Wall seconds between, in which a split session waited for its server; nothing above counts them.
        exchange_joules: Of the whole device in that time.
        idle_w: Watts of the device while it did nothing.
        provenance: Source and quality of a figure, by its name in `Cost`.
    """

    compute_s: float | None = None
    cpu_s: float | None = None
    cycles: float | None = None
    mean_hertz: float | None = None
    joules: float | None = None
    exchange_s: float | None = None
    exchange_joules: float | None = None
    idle_w: float | None = None
    provenance: dict[str, Provenance] = {}

    def add_to(self, cost: Cost) -> Cost:
        """Return a task's earlier cost with this as the cost of its computing."""
        return msgspec.structs.replace(
            cost,
            compute_s=self.compute_s,
            cpu_s=self.cpu_s,
            cycles=self.cycles,
            compute_joules=self.joules,
            exchange_s=self.exchange_s,
            exchange_joules=self.exchange_joules,
            idle_w=self.idle_w if self.idle_w is not None else cost.idle_w,
            provenance=cost.provenance | self.provenance,
        )

    def exchanging(self) -> AbstractContextManager[None]:
        """Take what passes in a block for exchange; what is given, as in replay, says so already."""
        return nullcontext()


class _Measured(Spent):
    """A block that is being measured: it notes when it waited.

    Attributes:
        waits: Begin and end of every exchange.
    """

    clock: Clock = monotonic
    waits: list[tuple[float, float]] = []

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.waits.append((began, self.clock()))


@dataclass(frozen=True)
class ProcessMeter:
    """Meter of this process; cycles and joules where there is something that measures them.

    Attributes:
        clock: Wall seconds; the same as the log's.
        cpu_clock: CPU seconds.
        power: Samples the board's power.
        idle_w: Watts of the idle board.
        emulated: Of the board that this process stands for; then no sensor is asked.
    """

    clock: Clock = monotonic
    cpu_clock: Clock = read_cpu_seconds
    cycles: CycleCounter | None = None
    power: PowerLog | None = None
    idle_w: float | None = None
    emulated: EmulatedPower | None = None

    @contextmanager
    def task(self) -> Iterator[Spent]:
        """Measure the block."""
        spent = _Measured(idle_w=self.idle_w, clock=self.clock)
        with self.power.busy() if self.power else nullcontext(), _tick_clocks(self.cycles):
            if self.power:
                self.power.mark()
            start, cpu = self.clock(), self.cpu_clock()
            try:
                yield spent
            finally:
                stop = self.clock()
                spent.compute_s, spent.cpu_s = stop - start, self.cpu_clock() - cpu
                spent.provenance = {"compute_s": WALL_CLOCK, "cpu_s": CPU_CLOCK}
                if spent.waits:
                    spent.exchange_s = math.fsum(end - begin for begin, end in spent.waits)
                    spent.compute_s -= spent.exchange_s
                    spent.provenance["exchange_s"] = WALL_CLOCK
                if self.cycles:
                    _count(spent, self.cycles)
                if self.emulated:
                    _model(spent, self.emulated)
                if self.power:
                    self.power.mark()
                    _charge(spent, self.power, start, stop)
                    if spent.waits:
                        _split_waits(spent, self.power)


@contextmanager
def _tick_clocks(cycles: CycleCounter | None) -> Iterator[None]:
    """Let the counter look at the clocks while the block lasts."""
    if cycles is None:
        yield
        return
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(TICK_S):
            cycles.tick()

    ticker = threading.Thread(target=tick, name="cycles", daemon=True)
    cycles.start()
    ticker.start()
    try:
        yield
    finally:
        ended.set()


def _count(spent: Spent, cycles: CycleCounter) -> None:
    found = cycles.stop()
    spent.cycles, spent.mean_hertz = found.cycles, found.mean_hertz
    if found.provenance:
        spent.provenance["cycles"] = found.provenance


def _charge(spent: Spent, power: PowerLog, start: float, stop: float) -> None:
    found = power.energy(start, stop)
    if found:
        spent.joules = found.joules
        spent.provenance["compute_joules"] = describe_energy(power.source, found)


def _model(spent: _Measured, board: EmulatedPower) -> None:
    """Charge a block by the power of the board that is emulated; while it waits, that idles."""
    told = describe_emulated(board)
    spent.idle_w, spent.joules = board.idle_w, board.idle_w * (spent.compute_s or 0) + board.busy_w * (spent.cpu_s or 0)
    spent.provenance["compute_joules"] = told
    if spent.exchange_s is not None:
        spent.exchange_joules = board.idle_w * spent.exchange_s
        spent.provenance["exchange_joules"] = told


def describe_emulated(board: EmulatedPower) -> Provenance:
    """Return the provenance of joules that follow from an emulated board's power."""
    return Provenance(source=f"emulated: {board.idle_w:g} W, {board.busy_w:g} W a busy core", quality="modelled")


def charge_transfer(board: EmulatedPower, cost: Cost, figure: str, start: float, stop: float) -> Cost:
    """Return a cost with what a transfer took an emulated board; see `Reporter.charge`.

    Args:
        figure: `download_joules` or `upload_joules`.
        start: Second at which the transfer began.
        stop: Second at which it ended.
    """
    cost = msgspec.structs.replace(cost, idle_w=board.idle_w)
    watts = board.tx_w if figure == "upload_joules" else board.rx_w
    if watts is None:
        return cost
    named = {figure: Provenance(source=f"emulated: {board.idle_w + watts:g} W", quality="modelled")}
    joules = {figure: (board.idle_w + watts) * (stop - start)}
    return msgspec.structs.replace(cost, provenance=cost.provenance | named, **joules)


def _split_waits(spent: _Measured, power: PowerLog) -> None:
    """Split what the waits took off the joules of the whole."""
    found = power.energies(spent.waits)
    if spent.joules is None or not found:
        spent.joules = None
        spent.provenance.pop("compute_joules", None)
        return
    spent.exchange_joules = found.joules
    spent.joules = max(0.0, spent.joules - found.joules)
    told = describe_energy(power.source, found)
    if found.seconds < len(spent.waits) * MIN_RESOLVED_PERIODS * power.pause_s():
        told = msgspec.structs.replace(
            told, quality="modelled", source=f"{told.source}, waits shorter than its samples"
        )
        spent.provenance["compute_joules"] = told
    spent.provenance["exchange_joules"] = told


@dataclass(frozen=True)
class GivenMeter:
    """Meter of replay: a block costs what it was given, whatever it takes here.

    Attributes:
        whole: What the task costs: its first block.
        step: What each later block costs, in which steps are timed; None for as much as the task.
    """

    whole: Spent
    step: Spent | None = None
    _later: list[Spent] = field(default_factory=list)

    @contextmanager
    def task(self) -> Iterator[Spent]:
        """Charge the block."""
        yield msgspec.structs.replace(self._later[0] if self._later else self.whole)
        self._later[:] = [self.step or self.whole]
