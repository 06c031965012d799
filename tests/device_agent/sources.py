"""Test doubles of power sources and boards whose clocks can be set.

Recorded power of a Raspberry Pi 3B+ at full rate, and what a meter that reads it more rarely would have seen. Boards'
clocks and power modes are files below a folder. Reports such as a board with a power sensor sends, from a seed.
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
from shared.protocol.measurements import Absent, Cost, Provenance, Reading, TaskCost
from shared.protocol.messages import Report
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
    uncertainty_w: float = 0.0
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


CONSTANT = {
    "cpu.policy0_max_hertz": 1.728e9,
    "cpu.policy4_max_hertz": 1.728e9,
    "cpu.online_count": 6.0,
    "memory.total_bytes": 7_990_247_424.0,
    "memory.limit_bytes": 4_294_967_296.0,
    "disk.total_bytes": 122_000_000_000.0,
    "throttle.now_flag": 0.0,
    "throttle.since_boot_flag": 1.0,
    "net.eth0_speed_bits_per_s": 1e9,
}
RAILS = ("total", "VDD_CPU_GPU_CV", "VDD_SOC")
ZONES = ("cpu-thermal", "gpu-thermal", "soc0-thermal", "tj-thermal", "hottest")


def report(random: Random, at: float, device: str = "orin", **changes: object) -> Report:
    """Return what a Jetson Orin Nano might say at a moment: 30 figures, of which 21 change."""
    figures: dict[str, float] = dict(CONSTANT)
    figures |= {f"power.{rail}_watts": random.randrange(3000, 15000) / 1000 for rail in RAILS}
    figures |= {f"thermal.{zone}_celsius": random.randrange(45000, 70000) / 1000 for zone in ZONES}
    figures |= {f"cpu.{name}_hertz": float(random.choice((729_600_000, 1_344_000_000))) for name in ("f", "policy0")}
    figures["memory.available_bytes"] = float(random.randrange(1 << 30, 1 << 32, 4096))
    figures["memory.pressure_ratio"] = random.randrange(100) / 10_000
    figures["disk.free_bytes"] = 5e10 - at * 1000
    figures["cputime.busy_seconds"], figures["cputime.total_seconds"] = at * 1.25, at * 6.0
    figures |= {f"net.eth0_{way}_bytes": at * 12_345.0 // 1 for way in ("received", "sent")}
    figures |= {f"link.{way}_bits_per_s": random.uniform(5e6, 2e7) for way in ("up", "down")}
    readings = {name: _reading(name, value, at) for name, value in figures.items()}
    spent = TaskCost(run="run-1", round=int(at // 600), cost=Cost(compute_s=4.5, compute_joules=31.25, upload_s=0.5))
    known = Report(
        device=device,
        at=at,
        board="nvidia-orin-nano-8gb",
        readings=readings,
        absent={"wifi": Absent(lack="not_present", cause="no wireless interface")},
        facts={"mode": "15W", "governor": "schedutil", "kernel": "5.15.148-tegra", "l4t": "36.4.3"},
        spent=spent,
        instance="0123456789abcdef0123456789abcdef",
    )
    return Report(**{**{name: getattr(known, name) for name in known.__struct_fields__}, **changes})


def _reading(name: str, value: float, at: float) -> Reading:
    group, _, rest = name.partition(".")
    is_power = group == "power"
    return Reading(
        value=value,
        unit=rest.rpartition("_")[2],
        source=f"{group} of sysfs",
        quality="corrected" if is_power else "measured",
        at=at - 3.0 if group == "link" else at,
        uncertainty=value * 0.03 if is_power else None,
    )
