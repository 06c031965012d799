"""Power sources that do as they are told, and a board's that was recorded; boards whose clocks can be set.

Recorded power of a Raspberry Pi 3B+ at full rate, and what a meter that reads it more rarely would have seen. Boards'
clocks and power modes are files below a folder.
"""

from __future__ import annotations

import csv
import gzip
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Literal

from device_agent.measurement.energy import Energy, Sample, integrate_energy
from device_agent.measurement.tuning.plan import CPUFREQ_FOLDER
from shared.errors import NoData
from shared.protocol.measurements import Provenance, Reading
from shared.runtime.clock import Clock, monotonic
from tests.machine import grow

PROVENANCE = Provenance(source="given", quality="measured", uncertainty=0.02)


@dataclass
class Given:
    """Watts as a function of time; counts its reads, fails or hangs when told to."""

    watts: Callable[[float], float] = lambda _: 4.0
    clock: Clock = monotonic
    kind: Literal["instant", "mean"] = "instant"
    period_s: float = 0.01
    cost_s: float = 0.0
    provenance: Provenance = PROVENANCE
    fails: bool = False
    reads: int = 0
    free: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.free.set()

    def read(self) -> Reading:
        self.reads += 1
        self.free.wait(20)
        if self.fails:
            raise NoData("it does not answer", lack="busy")
        at = self.clock()
        return Reading(value=self.watts(at), unit="watts", source="given", quality="measured", at=at)


@dataclass
class Hand:
    """A clock that somebody moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


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


KHZ = (600_000, 900_000, 1_200_000, 1_500_000)
GOVERNORS = "ondemand performance powersave"
CONF = "\n".join(f"< POWER_MODEL ID={number} NAME={name} >" for number, name in enumerate(("15W", "25W", "7W")))
JETSON = """
schema = 1
id = "jetson"
name = "Jetson"
[power_mode]
kind = "nvpmodel"
needs_reboot = ["7W"]
"""


def with_clocks(root: Path, *policies: str, least: int = KHZ[0], most: int = KHZ[-1]) -> Path:
    """Grow CPU frequency policies, all of them at `least` to `most` kHz."""
    for name in policies or ("policy0",):
        folder = f"{CPUFREQ_FOLDER}/{name}"
        files = {
            "scaling_governor": "ondemand",
            "scaling_available_governors": GOVERNORS,
            "scaling_available_frequencies": " ".join(map(str, KHZ)),
            "scaling_min_freq": least,
            "scaling_max_freq": most,
            "cpuinfo_min_freq": KHZ[0],
            "cpuinfo_max_freq": KHZ[-1],
        }
        grow(root, {f"{folder}/{file}": content for file, content in files.items()})
    return root


def with_modes(root: Path, number: int) -> Path:
    """Grow the power modes of a Jetson that is in one of them."""
    status = f"pmode:{number:04d} fmode:fan_mode_quiet"
    return grow(root, {"etc/nvpmodel.conf": CONF, "var/lib/nvpmodel/status": status})


def content(root: Path) -> dict[str, str]:
    """Return what all files below a folder hold."""
    return {str(path.relative_to(root)): path.read_text().strip() for path in root.rglob("*") if path.is_file()}


def clocks(root: Path, policy: str = "policy0") -> tuple[str, int, int]:
    """Return governor, least and most kHz of a policy."""
    folder = root / CPUFREQ_FOLDER / policy
    governor, least, most = (folder / f"scaling_{name}" for name in ("governor", "min_freq", "max_freq"))
    return governor.read_text().strip(), int(least.read_text()), int(most.read_text())
