"""Sample a board's power in a thread: often while something is going on, now and then while nothing is."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


import msgspec

from device_agent.measurement.energy import MAX_GAP_PERIODS, Energy, Sample, integrate_spans
from device_agent.probes.power.source import PowerSource
from shared.errors import NoData
from shared.protocol.measurements import Cost, Provenance, Reading
from shared.runtime.clock import Clock, monotonic

log = logging.getLogger(__name__)

IDLE_PERIOD_S, FIRST_IDLE_PERIOD_S = 5.0, 1.0
IDLE_SAMPLES, MIN_IDLE_SAMPLES = 60, 3
MAX_SAMPLES = 8192
"""Of 112 bytes each; at 5 Hz they are 27 minutes."""
MAX_CPU_SHARE, MAX_WAIT_SHARE = 0.01, 0.1
"""Of one core that sampling may compute, and of the time that it may wait for a bus, a firmware or a meter: a source
whose reads take more is read more rarely."""
COST_READS = 9
"""Reads whose median cost counts."""
END_PATIENCE_S, HURRY_S = 0.5, 5.0
CHEAP_S = 0.04
"""A read that takes no longer may be made in passing, at the ends of a block."""
WELL_COVERED = 0.9
"""Where gaps are longer, what fills them is so much of the figure that it counts as modelled."""


class PowerLog:
    """Thread that owns a power source. A source that does not answer makes a gap, nothing more.

    Attributes:
        cpu_s: CPU seconds that sampling took so far, this process's own.
    """

    def __init__(
        self,
        source: PowerSource,
        clock: Clock = monotonic,
        *,
        period_s: float = 0.0,
        idle_period_s: float = IDLE_PERIOD_S,
        size: int = MAX_SAMPLES,
    ) -> None:
        self._thread = threading.Thread(target=self.run, name="power", daemon=True)
        self.source, self.cpu_s = source, 0.0
        self.clock, self._period_s = clock, period_s or source.period_s
        self._idle_period_s = max(idle_period_s, self._period_s)
        self._samples: deque[Sample] = deque(maxlen=size)
        self._idle: deque[float] = deque(maxlen=IDLE_SAMPLES)
        self._costs: deque[float] = deque(maxlen=COST_READS)
        self._since = clock()
        self._latest: Reading | None = None
        self._busy = self._occupied = 0
        self._hurried = clock()
        self._touched = self._ended = False
        self._reading, self._noting = threading.Lock(), threading.Lock()  # the first is held for as long as a read
        self._wake = threading.Event()

    def start(self) -> None:
        """Sample in a thread of its own, until the process ends or the block is left."""
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join(END_PATIENCE_S)
        log.debug("power: sampling took %.3f CPU seconds", self.cpu_s)

    def run(self) -> None:
        """Sample until the block is left; a source may hang for a while, and nobody waits for it."""
        while not self._ended:
            self._wake.clear()
            began = self.clock()
            with self._reading:
                self._read()
            self._wake.wait(max(0.0, began + self.pause_s(full_rate=self.is_busy()) - self.clock()))

    def pause_s(self, *, full_rate: bool = True) -> float:
        """Return the seconds from one read to the next."""
        import statistics  # noqa: PLC0415 - a quarter of a megabyte, on boards with a meter alone

        cpu_s = statistics.median(self._costs) if len(self._costs) == COST_READS else 0.0  # the first ones warm up
        learns = len(self._idle) < MIN_IDLE_SAMPLES and self._idle_period_s <= IDLE_PERIOD_S
        rest_s = self._idle_period_s
        if learns:
            rest_s = min(rest_s, max(self._period_s, FIRST_IDLE_PERIOD_S))
        return max(self._period_s if full_rate else rest_s, cpu_s / MAX_CPU_SHARE, self.source.cost_s / MAX_WAIT_SHARE)

    @contextmanager
    def busy(self, *, full_rate: bool = True) -> Iterator[None]:
        """Sample at full rate while the block lasts, from its very begin; else only know that the board is not idle."""
        self._touched = True
        self._occupied += 1
        self._busy += full_rate
        if full_rate:
            self._wake.set()
        try:
            yield
        finally:
            self._busy -= full_rate
            self._occupied -= 1

    def hurry(self, seconds: float = HURRY_S) -> None:
        """Sample at full rate for so long, from now: something is going on whose end will not be announced."""
        self._touched, self._hurried = True, self.clock() + seconds
        self._wake.set()

    def mark(self) -> None:
        """Take a sample now, at an end of a block, unless the source is slow or is being read anyway."""
        if self.source.cost_s <= CHEAP_S and self._reading.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._reading.release()

    def energy(self, start: float, stop: float) -> Energy | None:
        """Return the energy between two moments of the log's clock; None where too little of it was sampled."""
        return self.energies([(start, stop)])

    def energies(self, spans: Sequence[tuple[float, float]]) -> Energy | None:
        """Return the energy of several spans together; None where too little of one was sampled."""
        with self._noting:
            samples = list(self._samples)
        source = self.source
        return integrate_spans(
            samples,
            spans,
            kind=source.kind,
            period_s=self.pause_s(),
            uncertainty=source.provenance.uncertainty,
            uncertainty_w=source.uncertainty_w,
        )

    def idle_w(self) -> float | None:
        """Return the median watts of the idle board, last seen; None before it has idled for a few samples."""
        import statistics  # noqa: PLC0415 - as above

        with self._noting:
            return statistics.median(self._idle) if len(self._idle) >= MIN_IDLE_SAMPLES else None

    def latest(self) -> Reading | None:
        """Return the last reading, unless it is so old that the source must have fallen silent."""
        reading = self._latest
        fresh = reading and self.clock() - reading.at <= MAX_GAP_PERIODS * self.pause_s(full_rate=False)
        return reading if fresh else None

    def is_busy(self) -> bool:
        """Tell whether samples are taken at full rate."""
        return self._busy > 0 or self.clock() < self._hurried

    def _read(self) -> None:
        cpu = time.thread_time()
        idle, self._touched = not (self._occupied or self._touched or self.is_busy()), False
        try:
            reading = self.source.read()
        except NoData as error:
            log.debug("power: %s", error)
        else:
            with self._noting:
                self._note(reading, idle=idle and not self._touched)
        cost = time.thread_time() - cpu
        self._costs.append(cost)
        self.cpu_s += cost

    def _note(self, reading: Reading, *, idle: bool) -> None:
        if not self._samples and self.source.kind == "mean":
            self._samples.append(Sample(self._since, reading.value))  # it stands for the time since counting began
        if self._samples and reading.at <= self._samples[-1].at:
            return  # a meter that has nothing new
        self._samples.append(Sample(reading.at, reading.value))
        self._latest = reading
        if idle:
            self._idle.append(reading.value)


def describe_energy(source: PowerSource, found: Energy) -> Provenance:
    """Return the provenance of an energy; gaps are named, and many of them make it a modelled figure."""
    plain = source.provenance
    whole = found.covered_ratio >= WELL_COVERED
    told = "" if whole else f", {found.covered_ratio:.0%} of the time covered"
    return Provenance(
        source=plain.source + told,
        quality=plain.quality if whole else "modelled",
        uncertainty=found.uncertainty,
    )


def charge_energy(cost: Cost, figure: str, power: PowerLog | None, start: float, stop: float) -> Cost:
    """Return a cost with the joules between two moments as one of its figures; as it was where they are not known.

    Args:
        figure: Name of the figure in `Cost`, such as `download_joules`.
        power: The board's power log; None where nothing measures it.
        start: Monotonic seconds.
    """
    found = power.energy(start, stop) if power else None
    if power is None or found is None:
        return cost
    named = {figure: describe_energy(power.source, found)}
    return msgspec.structs.replace(cost, provenance=cost.provenance | named, **{figure: found.joules})
