"""Recorded data beside the checkout, read where it lies; tests that need it are skipped where it is not.

Recorded power of a Raspberry Pi 3B+ at full rate, and what a meter that reads it more rarely would have seen.
"""

from __future__ import annotations

import csv
import gzip
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from random import Random

import pytest

from device_agent.measurement.energy import Energy, Sample, integrate_energy

ROOT = Path(os.environ.get("FIELDFLEET_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def shared(*parts: str) -> Path:
    """Return a file or folder of the recorded data; skips the test where there is none."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no recorded data at {path}: name its folder in FIELDFLEET_SHARED")
    return path


FILES = ("rpi3b_ina219_benchmarks.csv.gz", "rpi3b_ina219_usecases.csv.gz")
COLUMNS = ("run", "suite", "workload", "t_s", "power_mw")
MIN_S = 10.0
LATE_S = 0.01
"""A thread wakes late, by so much on average; now and then far later."""
MEAN_STALL_S, STALLS = 0.1, 0.02


@dataclass(frozen=True)
class Trace:
    """One recorded run: its suite and workload, and its samples of about 50 Hz, of which it is the whole truth."""

    suite: str
    workload: str
    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    @property
    def joules(self) -> float:
        """Return the full-rate integral."""
        return sum(
            (after.at - before.at) * (before.watts + after.watts) / 2 for before, after in pairwise(self.samples)
        )

    def windows(self, seconds: float) -> Iterator[Trace]:
        """Yield its parts of so many seconds, one after the other."""
        index, start = 0, self.samples[0].at
        while start + seconds <= self.samples[-1].at:
            stop = bisect_right(self.samples, start + seconds, key=lambda one: one.at)
            yield Trace(self.suite, self.workload, self.samples[index:stop])
            index, start = stop - 1, self.samples[stop - 1].at

    def at(self, moment: float) -> float:
        """Return what the sensor says at a moment: its last conversion."""
        index = bisect_right(self.samples, moment, key=lambda one: one.at)
        return self.samples[max(0, index - 1)].watts


def traces(folder: Path) -> Iterator[Trace]:
    """Yield the recorded runs of 10 s and more."""
    for name in FILES:
        with gzip.open(folder / name, "rt") as file:
            rows = csv.reader(file)
            run, suite, workload, at, milliwatts = map(next(rows).index, COLUMNS)
            for _, group in groupby(rows, key=itemgetter(run)):
                lines = list(group)
                if float(lines[-1][at]) - float(lines[0][at]) >= MIN_S:
                    samples = tuple(Sample(float(line[at]), float(line[milliwatts]) / 1000) for line in lines)
                    yield Trace(lines[0][suite], lines[0][workload], samples)


def metered(trace: Trace, random: Random, *, hertz: float, lost: Callable[[float], bool] = lambda _: False) -> Energy:
    """Return what the meter makes of a run: a read a period from a random moment on, each a little late, some lost.

    Args:
        trace: The run.
        random: Decides the phase and how late the reads are.
        hertz: Reads a second.
        lost: Whether the source does not answer at a moment.
    """
    start, stop = trace.samples[0].at, trace.samples[-1].at
    period, seen = 1 / hertz, []
    due = start - random.random() * period
    while due < stop:
        late = random.expovariate(1 / LATE_S) + (
            random.expovariate(1 / MEAN_STALL_S) if random.random() < STALLS else 0
        )
        moment = due + late
        if start <= moment <= stop and not lost(moment):
            seen.append(Sample(moment, trace.at(moment)))
        due = max(due + period, moment)
    found = integrate_energy(seen, start, stop, kind="instant", period_s=period, uncertainty=0.0)
    assert found is not None, "too little of the run was covered"
    return found
