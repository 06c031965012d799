"""Measure the cost of a task. Unmeasurable figures are None, never zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import msgspec

from device_agent.config import EmulatedPower
from device_agent.measurement.cpu_cycles import CycleCounter, Ticker, read_cpu_seconds
from device_agent.measurement.power_log import PowerLog, describe_energy
from shared.protocol.measurements import Cost, Provenance
from shared.runtime.clock import Clock, monotonic

WALL_CLOCK = Provenance(source="monotonic clock", quality="measured")
CPU_CLOCK = Provenance(source="getrusage", quality="measured")
MIN_RESOLVED_PERIODS = 2.0
"""Shorter waits, in sample periods, get the same watts as the computation around them, whatever each really took."""


class BlockCost(msgspec.Struct):
    """Cost of a block, filled in at its end.

    Attributes:
        compute_s: Wall seconds, exchanges excluded.
        cpu_s: CPU seconds of all threads, and of child processes that have ended.
        cycles: CPU cycles of all cores.
        joules: Energy of the entire device, idle power included, exchanges excluded.
        exchange_s: Wall seconds in which a split session waited for its server.
        exchange_joules: Energy of the entire device during the exchanges.
        provenance: Source and quality of each figure, by its name in `Cost`.
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
        """Return a task's cost with this block as its computation."""
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

    def measure_exchange(self) -> AbstractContextManager[None]:
        """Mark a block as an exchange. No effect here: a replay's predetermined costs contain the exchange."""
        return nullcontext()


class _MeasuredBlock(BlockCost):
    """A block being measured, which records its exchanges.

    Attributes:
        waits: Start and end of each exchange, in seconds of `clock`.
    """

    clock: Clock = monotonic
    waits: list[tuple[float, float]] = []

    @contextmanager
    def measure_exchange(self) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.waits.append((began, self.clock()))


@dataclass(frozen=True)
class ProcessMeter:
    """Meter of this process; measures cycles and joules if there is a source for them.

    Attributes:
        clock: Wall seconds; the same clock as the power log's.
        cpu_clock: CPU seconds of this process.
        emulated: Power of an emulated board, used instead of sensors.
        ticker: Shared by the meters of a process.
    """

    clock: Clock = monotonic
    cpu_clock: Clock = read_cpu_seconds
    cycles: CycleCounter | None = None
    power: PowerLog | None = None
    idle_w: float | None = None
    emulated: EmulatedPower | None = None
    ticker: Ticker = field(default_factory=Ticker)

    @contextmanager
    def task(self) -> Iterator[BlockCost]:
        """Measure the block."""
        cost = _MeasuredBlock(idle_w=self.idle_w, clock=self.clock)
        ticking = self.ticker.tick(self.cycles) if self.cycles else nullcontext()
        with self.power.busy() if self.power else nullcontext(), ticking:
            if self.power:
                self.power.mark()
            start, cpu = self.clock(), self.cpu_clock()
            try:
                yield cost
            finally:
                stop = self.clock()
                cost.compute_s, cost.cpu_s = stop - start, self.cpu_clock() - cpu
                cost.provenance = {"compute_s": WALL_CLOCK, "cpu_s": CPU_CLOCK}
                if cost.waits:
                    cost.exchange_s = math.fsum(end - begin for begin, end in cost.waits)
                    cost.compute_s -= cost.exchange_s
                    cost.provenance["exchange_s"] = WALL_CLOCK
                if self.cycles:
                    total = self.cycles.stop()
                    cost.cycles, cost.mean_hertz = total.cycles, total.mean_hertz
                    cost.provenance |= {"cycles": total.provenance} if total.provenance else {}
                if self.emulated:
                    _add_emulated_joules(cost, self.emulated)
                if self.power:
                    self.power.mark()
                    _add_joules(cost, self.power, start, stop)
                    if cost.waits:
                        _split_waits(cost, self.power)


def _add_joules(cost: BlockCost, power: PowerLog, start: float, stop: float) -> None:
    energy = power.energy(start, stop)
    if energy:
        cost.joules = energy.joules
        cost.provenance["compute_joules"] = describe_energy(power.source, energy)


def _add_emulated_joules(cost: _MeasuredBlock, board: EmulatedPower) -> None:
    """Charge a block by the emulated board's power, idle during exchanges."""
    provenance = describe_emulated(board)
    cost.idle_w, cost.joules = board.idle_w, board.idle_w * (cost.compute_s or 0) + board.busy_w * (cost.cpu_s or 0)
    cost.provenance["compute_joules"] = provenance
    if cost.exchange_s is not None:
        cost.exchange_joules = board.idle_w * cost.exchange_s
        cost.provenance["exchange_joules"] = provenance


def describe_emulated(board: EmulatedPower) -> Provenance:
    """Return the provenance of joules computed from an emulated board's power."""
    return Provenance(source=f"emulated: {board.idle_w:g} W, {board.busy_w:g} W a busy core", quality="modelled")


def charge_transfer(board: EmulatedPower, cost: Cost, figure: str, start: float, stop: float) -> Cost:
    """Add the energy of a transfer on an emulated board to a cost; see `Reporter.charge`.

    Args:
        figure: Field of `Cost`: `download_joules` or `upload_joules`.
        start: Seconds on the same clock as `stop`.
    """
    cost = msgspec.structs.replace(cost, idle_w=board.idle_w)
    watts = board.tx_w if figure == "upload_joules" else board.rx_w
    if watts is None:
        return cost
    named = {figure: Provenance(source=f"emulated: {board.idle_w + watts:g} W", quality="modelled")}
    joules = {figure: (board.idle_w + watts) * (stop - start)}
    return msgspec.structs.replace(cost, provenance=cost.provenance | named, **joules)


def _split_waits(cost: _MeasuredBlock, power: PowerLog) -> None:
    """Move the exchanges' share of the joules to `exchange_joules`."""
    energy = power.energies(cost.waits)
    if cost.joules is None or not energy:
        cost.joules = None
        cost.provenance.pop("compute_joules", None)
        return
    cost.exchange_joules = energy.joules
    cost.joules = max(0.0, cost.joules - energy.joules)
    provenance = describe_energy(power.source, energy)
    if energy.seconds < len(cost.waits) * MIN_RESOLVED_PERIODS * power.pause_s():
        provenance = msgspec.structs.replace(
            provenance, quality="modelled", source=f"{provenance.source}, waits shorter than its samples"
        )
        cost.provenance["compute_joules"] = provenance
    cost.provenance["exchange_joules"] = provenance


@dataclass(frozen=True)
class FixedMeter:
    """Meter for replay: blocks cost predetermined figures.

    Attributes:
        first: Cost of the first block, the task.
        step: Cost of each later block, in which steps are timed; None to use the task's.
    """

    first: BlockCost
    step: BlockCost | None = None
    _later: list[BlockCost] = field(default_factory=list)

    @contextmanager
    def task(self) -> Iterator[BlockCost]:
        """Charge the block."""
        yield msgspec.structs.replace(self._later[0] if self._later else self.first)
        self._later[:] = [self.step or self.first]
