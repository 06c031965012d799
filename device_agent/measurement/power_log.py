"""Sample a board's power in a thread, less often while idle."""

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
"""27 minutes at 5 Hz; 112 bytes each."""
MAX_CPU_SHARE, MAX_WAIT_SHARE = 0.01, 0.1
"""Fractions of one core that sampling may use, and of the time that it may wait for a bus, firmware or meter. Costlier
sources are read less often.
"""
COST_READS = 9
"""Reads whose median cost counts."""
END_PATIENCE_S, HURRY_S = 0.5, 5.0
CHEAP_S = 0.04
"""Reads up to this duration may be made synchronously at the ends of a block."""
WELL_COVERED = 0.9
"""Below this coverage the filled gaps are so large that the figure counts as modelled."""


class PowerLog:
    """Thread that samples a power source. A source that does not answer only leaves a gap.

    Attributes:
        cpu_s: CPU seconds that sampling has used in this process.
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
        self._reading, self._noting = threading.Lock(), threading.Lock()  # `_reading` is held during a read
        self._wake = threading.Event()

    def start(self) -> None:
        """Start sampling in a background thread."""
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
        """Sample until the context is left; nothing waits for a source that hangs."""
        while not self._ended:
            self._wake.clear()
            began = self.clock()
            with self._reading:
                self._read()
            self._wake.wait(max(0.0, began + self.pause_s(full_rate=self.is_busy()) - self.clock()))

    def pause_s(self, *, full_rate: bool = True) -> float:
        """Return the seconds from one read to the next."""
        import statistics  # noqa: PLC0415 - 0.25 MB, needed only on boards with a meter

        cpu_s = statistics.median(self._costs) if len(self._costs) == COST_READS else 0.0  # the first ones warm up
        learns = len(self._idle) < MIN_IDLE_SAMPLES and self._idle_period_s <= IDLE_PERIOD_S
        rest_s = self._idle_period_s
        if learns:
            rest_s = min(rest_s, max(self._period_s, FIRST_IDLE_PERIOD_S))
        return max(self._period_s if full_rate else rest_s, cpu_s / MAX_CPU_SHARE, self.source.cost_s / MAX_WAIT_SHARE)

    @contextmanager
    def busy(self, *, full_rate: bool = True) -> Iterator[None]:
        """Mark the board as not idle during the block and, with `full_rate`, sample at full rate from its start."""
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
        """Sample at full rate for some seconds, for activity whose end is not announced."""
        self._touched, self._hurried = True, self.clock() + seconds
        self._wake.set()

    def mark(self) -> None:
        """Take a sample now, at the edge of a block, unless the source is slow or being read."""
        if self.source.cost_s <= CHEAP_S and self._reading.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._reading.release()

    def energy(self, start: float, stop: float) -> Energy | None:
        """Return the energy between two moments of the log's clock; None if too little of it was sampled."""
        return self.energies([(start, stop)])

    def energies(self, spans: Sequence[tuple[float, float]]) -> Energy | None:
        """Return the total energy of several spans; None if too little of any span was sampled."""
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
        """Return the median watts of the latest idle samples; None before there are enough."""
        import statistics  # noqa: PLC0415 - as above

        with self._noting:
            return statistics.median(self._idle) if len(self._idle) >= MIN_IDLE_SAMPLES else None

    def latest(self) -> Reading | None:
        """Return the latest reading; None if it is so old that the source must have stopped answering."""
        reading = self._latest
        fresh = reading and self.clock() - reading.at <= MAX_GAP_PERIODS * self.pause_s(full_rate=False)
        return reading if fresh else None

    def is_busy(self) -> bool:
        """True while samples are taken at full rate."""
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
            self._samples.append(Sample(self._since, reading.value))  # start of the first mean
        if self._samples and reading.at <= self._samples[-1].at:
            return  # the meter has no new reading
        self._samples.append(Sample(reading.at, reading.value))
        self._latest = reading
        if idle:
            self._idle.append(reading.value)


def describe_energy(source: PowerSource, energy: Energy) -> Provenance:
    """Return the provenance of an energy, with its coverage; large gaps make it a modelled figure."""
    plain = source.provenance
    is_covered = energy.covered_ratio >= WELL_COVERED
    gaps = "" if is_covered else f", {energy.covered_ratio:.0%} of the time covered"
    return Provenance(
        source=plain.source + gaps,
        quality=plain.quality if is_covered else "modelled",
        uncertainty=energy.uncertainty,
    )


def charge_energy(cost: Cost, figure: str, power: PowerLog, start: float, stop: float) -> Cost:
    """Add the joules between two moments to a cost; unchanged if they are not known.

    Args:
        figure: Field of `Cost`, such as `download_joules`.
        start: Monotonic seconds, as is `stop`.
    """
    energy = power.energy(start, stop)
    if energy is None:
        return cost
    named = {figure: describe_energy(power.source, energy)}
    return msgspec.structs.replace(cost, provenance=cost.provenance | named, **{figure: energy.joules})
