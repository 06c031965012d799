"""GPU probe of a Jetson: load and clock from sysfs, else from tegrastats; rail and temperature by the profile's roles.

Names move from one JetPack to the next: nvgpu's folder is called after the chip's address (`57000000.gpu`,
`17000000.gv11b`), below /sys/devices, /sys/devices/platform or /sys/devices/platform/bus@0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from device_agent.hardware.files import find_paths, list_folder, read_text
from device_agent.hardware.tools import read_first_line
from device_agent.probes import thermal
from device_agent.probes.base import ProbeResult, describe_absence, parse_number, read_within
from device_agent.probes.power import tegrastats
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

DEVFREQ = "sys/class/devfreq"
GPU_NAME = re.compile(r"(?:[0-9a-f]+\.)?(?:gpu|gm20b|gp10b|gv11b|ga10b|gb10b)|gpu-gpc-[0-9]{1,2}")
LOAD_FILES = (
    "sys/class/devfreq/*/device/load",
    "sys/class/devfreq/*/load",
    *(
        f"sys/devices/{bus}{name}/load"
        for bus in ("", "platform/", "platform/bus@0/")
        for name in ("gpu.[0-9]", "*.g*")
    ),
)
ZONE_NAME = re.compile(r"thermal\.gpu", re.IGNORECASE)
CLOCK_HERTZ = (1e6, 1e10)
PER_MILLE = 1000
ROCKCHIP_LOAD = re.compile(r"[0-9]{1,3}@[0-9]{1,12}(?:Hz){1,2}", re.ASCII)
"""Kernels of this vendor also write the unit twice."""
LOAD, CLOCK, MAX_CLOCK = "gpu.load_ratio", "gpu.f_hertz", "gpu.max_hertz"
RAIL, CELSIUS = "gpu.rail_watts", "gpu.hottest_celsius"
SHARED_ROLE = "compute"
"""Of a rail that feeds CPU and GPU together."""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `gpu.load_ratio`, `gpu.f_hertz`, `gpu.max_hertz` (what it may be now), and `gpu.hottest_celsius`.

    The temperature here is that of tegrastats, on boards without thermal zones; elsewhere `derive_figures` has it.

    Args:
        root: The board's root folder.
        profile: Its firmware profile, which says whether there is a tegrastats to ask.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: The board has no GPU that the kernel tells of.
    """
    line = _LazyLine(root, asked="tegrastats" in profile.power.sources)
    figures: tuple[tuple[str, str, Callable[[], tuple[float, str]]], ...] = (
        (LOAD, "ratio", lambda: _read_load(root, line)),
        (CLOCK, "hertz", lambda: _read_clock(root, line)),
        (MAX_CLOCK, "hertz", lambda: _read_devfreq(root, "max_freq")),
        (CELSIUS, "celsius", lambda: _read_celsius(root, line)),
    )
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    for name, unit, ask in figures:
        try:
            value, source = ask()
        except NoData as error:
            missing[name] = describe_absence(error)
        else:
            readings[name] = Reading(value=value, unit=unit, source=source, quality="measured", at=at)
    if not readings and all(one.lack == "not_present" for one in missing.values()):
        raise NoData(f"{root / DEVFREQ}: no GPU")
    return ProbeResult(readings=readings, absent=missing)


def derive_figures(profile: Profile, found: ProbeResult) -> ProbeResult:
    """Return a board's figures with `gpu.rail_watts` and `gpu.hottest_celsius`, which other probes have read.

    Only of rails that the profile says are the GPU's, for one that feeds the CPU too is not its own; of zones that the
    profile or their own names say are.

    Args:
        found: All that its probes found.
    """
    rails = [rail.label for rail in profile.power.rails if rail.role == "gpu"]
    shared = [rail.label for rail in profile.power.rails if rail.role == SHARED_ROLE]
    zones = [f"thermal.{zone}_celsius" for zone, role in profile.thermal.zones.items() if role == "gpu"]
    zones += [name for name in found.readings.keys() | found.absent.keys() if ZONE_NAME.match(name)]
    watts = _gather(found, [f"power.{label}_watts" for label in rails], math.fsum)
    celsius = _gather(found, dict.fromkeys(zones), max)
    if watts is None and (celsius or any(name.startswith("gpu.") for name in found.readings)):
        cause = f"{', '.join(shared)} feeds others too" if shared else "the profile names no rail of the GPU"
        watts = Absent(lack="not_present", cause=f"the GPU has no rail of its own: {cause}")
    readings, absent = dict(found.readings), dict(found.absent)
    for name, figure in ((RAIL, watts), (CELSIUS, celsius)):
        if isinstance(figure, Reading):
            readings[name] = figure
            absent.pop(name, None)
        elif figure:
            absent[name] = figure
    return ProbeResult(readings=readings, absent=absent, facts=found.facts)


def _gather(
    found: ProbeResult, names: Iterable[str], combine: Callable[[list[float]], float]
) -> Reading | Absent | None:
    """Return one reading of several, an absence where one of those that are there does not answer, None of none."""
    there = [name for name in names if name in found.readings or name in found.absent]
    for name in there:
        if name in found.absent:
            return found.absent[name]
    if not there:
        return None
    parts = [found.readings[name] for name in there]
    first, sources = parts[0], "+".join(dict.fromkeys(part.source for part in parts))
    return Reading(
        value=combine([part.value for part in parts]),
        unit=first.unit,
        source=sources,
        quality=first.quality,
        at=first.at,
    )


class _LazyLine:
    """A line of tegrastats, read when it is first wanted: the tool is a process of its own."""

    def __init__(self, root: Path, *, asked: bool) -> None:
        self._root, self._asked = root, asked
        self._parsed: tegrastats.TegraStats | NoData | None = None

    def read(self) -> tegrastats.TegraStats:
        """Return what the line says; raises NoData."""
        if not self._asked:
            raise NoData("neither the kernel tells it, nor is there a tegrastats")
        if self._parsed is None:
            try:
                self._parsed = tegrastats.parse_line(read_first_line(self._root, *tegrastats.COMMAND))
            except NoData as error:
                self._parsed = error
        if isinstance(self._parsed, NoData):
            raise self._parsed
        return self._parsed


def _read_load(root: Path, line: _LazyLine) -> tuple[float, str]:
    """Return the share of time in which the GPU was busy, and its source; raises NoData."""
    files = [path for pattern in LOAD_FILES for path in find_paths(root, pattern) if _is_load_of_gpu(path)]
    if files:
        return _read_load_file(files[0]), str(files[0].relative_to(root))
    busy = line.read().gpu_ratio
    if busy is None:
        raise NoData("tegrastats tells no load of the GPU")
    return busy, "tegrastats GR3D_FREQ"


def _read_load_file(path: Path) -> float:
    """Return the load in per mille (nvgpu) or, as in `55@300000000Hz`, per cent (Rockchip) as a ratio."""
    content = read_text(path)
    percent, at, _ = content.partition("@")
    whole = 100 if at else PER_MILLE
    load = parse_number(percent, path)
    if not 0 <= load <= whole or (at and ROCKCHIP_LOAD.fullmatch(content) is None):
        raise NoData(f"{path}: {content[:40]!r} is no load of a GPU", lack="invalid")
    return load / whole


def _read_clock(root: Path, line: _LazyLine) -> tuple[float, str]:
    """Return the GPU's clock and its source; raises NoData."""
    if _find_devfreq(root):
        return _read_devfreq(root, "cur_freq")
    hertz = line.read().gpu_hertz
    if hertz is None:
        raise NoData("tegrastats tells no clock of the GPU, which it does for root alone")
    if not hertz:
        raise NoData("tegrastats: the GPU is off", lack="busy")
    if not CLOCK_HERTZ[0] <= hertz <= CLOCK_HERTZ[1]:
        raise NoData(f"tegrastats: {hertz:g} Hz is no GPU's clock", lack="invalid")
    return hertz, "tegrastats GR3D_FREQ"


def _read_celsius(root: Path, line: _LazyLine) -> tuple[float, str]:
    """Return the GPU's temperature by tegrastats, where the kernel shows no zones at all; raises NoData."""
    if list_folder(root / thermal.ZONE_FOLDER, "thermal_zone[0-9]*"):
        raise NoData("no thermal zone is known to be the GPU's")
    celsius = [value for zone, value in line.read().celsius.items() if zone.lower() == "gpu"]
    if not celsius:
        raise NoData("tegrastats tells no temperature of the GPU: it is off")
    return max(celsius), "tegrastats GPU"


def _find_devfreq(root: Path) -> list[Path]:
    return [folder for folder in list_folder(root / DEVFREQ) if GPU_NAME.fullmatch(folder.name)]


def _read_devfreq(root: Path, name: str) -> tuple[float, str]:
    """Return the mean of that clock over the GPU's parts, and its source; raises NoData where one does not answer."""
    folders = _find_devfreq(root)
    if not folders:
        raise NoData(f"{root / DEVFREQ}: no GPU")
    clocks = [read_within(folder / name, CLOCK_HERTZ) for folder in folders]
    return math.fsum(clocks) / len(clocks), "+".join(f"{DEVFREQ}/{folder.name}/{name}" for folder in folders)


def _is_load_of_gpu(path: Path) -> bool:
    """Return whether a load is the GPU's: of the folder above it, or of the devfreq device that it belongs to."""
    owner = path.parent.parent if path.parent.name == "device" else path.parent
    return re.fullmatch(r"gpu\.[0-9]", owner.name) is not None or GPU_NAME.fullmatch(owner.name) is not None
