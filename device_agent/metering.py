"""What a task costs, measured where it is spent. A figure that cannot be measured is None, never zero."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.clock import Clock, monotonic


class Spent(msgspec.Struct):
    """Seconds of one block; filled in when the block is left."""

    compute_s: float | None = None
    cpu_s: float | None = None
    joules: float | None = None


class Meter(Protocol):
    """Measure a block of computation: `with meter.task() as spent: ...`."""

    task: Callable[[], object]


@dataclass(frozen=True)
class ProcessMeter:
    """Wall seconds of the monotonic clock and CPU seconds of this process."""

    clock: Clock = monotonic
    cpu_clock: Clock = time.process_time

    @contextmanager
    def task(self) -> Iterator[Spent]:
        """Measure the block."""
        spent, wall, cpu = Spent(), self.clock(), self.cpu_clock()
        try:
            yield spent
        finally:
            spent.compute_s, spent.cpu_s = self.clock() - wall, self.cpu_clock() - cpu


@dataclass(frozen=True)
class GivenMeter:
    """Replay: the block costs what the plan says, whatever it takes here."""

    compute_s: float

    @contextmanager
    def task(self) -> Iterator[Spent]:
        """Charge the block."""
        yield Spent(compute_s=self.compute_s)
