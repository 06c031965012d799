"""GPU probe of Jetson and Rockchip boards: load, clock, rail and temperature.

Paths differ between JetPack versions: nvgpu's folder is named by the chip's address (`57000000.gpu`,
`17000000.gv11b`), below /sys/devices, /sys/devices/platform or /sys/devices/platform/bus@0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from device_agent.hardware.files import find_paths, list_folder, read_text
from device_agent.hardware.tools import run_tool_first_line
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
"""Rockchip kernels may write the unit twice."""
LOAD, CLOCK, MAX_CLOCK = "gpu.load_ratio", "gpu.f_hertz", "gpu.max_hertz"
RAIL, CELSIUS = "gpu.rail_watts", "gpu.hottest_celsius"
SHARED_ROLE = "compute"
"""Role of a rail that feeds both CPU and GPU."""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `gpu.load_ratio`, `gpu.f_hertz`, `gpu.max_hertz` (the current limit) and `gpu.hottest_celsius`.

    Reads the temperature only from tegrastats, on boards without thermal zones; `add_rail_and_temperature` adds others.

    Raises:
        NoData: The kernel shows no GPU.
    """
    line = _LazyLine(root, has_tegrastats="tegrastats" in profile.power.sources)
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
    if not readings and all(absence.lack == "not_present" for absence in missing.values()):
        raise NoData(f"{root / DEVFREQ}: no GPU")
    return ProbeResult(readings=readings, absent=missing)


def add_rail_and_temperature(profile: Profile, result: ProbeResult) -> ProbeResult:
    """Add `gpu.rail_watts` and `gpu.hottest_celsius`, derived from the results of other probes.

    The rails are those with the role `gpu` in the profile (not shared ones); the zones are given by the profile or by
    their names.
    """
    rails = [rail.label for rail in profile.power.rails if rail.role == "gpu"]
    shared = [rail.label for rail in profile.power.rails if rail.role == SHARED_ROLE]
    zones = [f"thermal.{zone}_celsius" for zone, role in profile.thermal.zones.items() if role == "gpu"]
    zones += [name for name in result.readings.keys() | result.absent.keys() if ZONE_NAME.match(name)]
    watts = _gather(result, [f"power.{label}_watts" for label in rails], math.fsum)
    celsius = _gather(result, dict.fromkeys(zones), max)
    if watts is None and (celsius or any(name.startswith("gpu.") for name in result.readings)):
        cause = f"{', '.join(shared)} feeds other parts too" if shared else "the profile names no GPU rail"
        watts = Absent(lack="not_present", cause=f"no rail feeds the GPU alone: {cause}")
    readings, absent = dict(result.readings), dict(result.absent)
    for name, figure in ((RAIL, watts), (CELSIUS, celsius)):
        if isinstance(figure, Reading):
            readings[name] = figure
            absent.pop(name, None)
        elif figure:
            absent[name] = figure
    return ProbeResult(readings=readings, absent=absent, facts=result.facts)


def _gather(
    result: ProbeResult, names: Iterable[str], combine: Callable[[list[float]], float]
) -> Reading | Absent | None:
    """Combine several readings; return an absence if one of them is absent, None if none is present."""
    present = [name for name in names if name in result.readings or name in result.absent]
    for name in present:
        if name in result.absent:
            return result.absent[name]
    if not present:
        return None
    parts = [result.readings[name] for name in present]
    first, sources = parts[0], "+".join(dict.fromkeys(part.source for part in parts))
    return Reading(
        value=combine([part.value for part in parts]),
        unit=first.unit,
        source=sources,
        quality=first.quality,
        at=first.at,
    )


class _LazyLine:
    """Lazily read line of tegrastats, since starting the tool is expensive."""

    def __init__(self, root: Path, *, has_tegrastats: bool) -> None:
        self._root, self._has_tegrastats = root, has_tegrastats
        self._parsed: tegrastats.TegraStats | NoData | None = None

    def read(self) -> tegrastats.TegraStats:
        """Return the parsed line; raises NoData."""
        if not self._has_tegrastats:
            raise NoData("not in sysfs, and the profile has no tegrastats")
        if self._parsed is None:
            try:
                self._parsed = tegrastats.parse_line(run_tool_first_line(self._root, tegrastats.COMMAND))
            except NoData as error:
                self._parsed = error
        if isinstance(self._parsed, NoData):
            raise self._parsed
        return self._parsed


def _read_load(root: Path, line: _LazyLine) -> tuple[float, str]:
    """Return the GPU's busy ratio and its source; raises NoData."""
    files = [path for pattern in LOAD_FILES for path in find_paths(root, pattern) if _is_load_of_gpu(path)]
    if files:
        return _read_load_file(files[0]), str(files[0].relative_to(root))
    busy = line.read().gpu_ratio
    if busy is None:
        raise NoData("tegrastats shows no GPU load")
    return busy, "tegrastats GR3D_FREQ"


def _read_load_file(path: Path) -> float:
    """Return a load in per mille (nvgpu) or, as in `55@300000000Hz`, in per cent (Rockchip) as a ratio."""
    content = read_text(path)
    percent, at, _ = content.partition("@")
    full_scale = 100 if at else PER_MILLE
    load = parse_number(percent, path)
    if not 0 <= load <= full_scale or (at and ROCKCHIP_LOAD.fullmatch(content) is None):
        raise NoData(f"{path}: {content[:40]!r} is not a GPU load", lack="invalid")
    return load / full_scale


def _read_clock(root: Path, line: _LazyLine) -> tuple[float, str]:
    """Return the GPU's clock and its source; raises NoData."""
    if _find_devfreq(root):
        return _read_devfreq(root, "cur_freq")
    hertz = line.read().gpu_hertz
    if hertz is None:
        raise NoData("tegrastats shows no GPU clock; it does so only for root")
    if not hertz:
        raise NoData("tegrastats: the GPU is off", lack="busy")
    if not CLOCK_HERTZ[0] <= hertz <= CLOCK_HERTZ[1]:
        raise NoData(f"tegrastats: {hertz:g} Hz is not a plausible GPU clock", lack="invalid")
    return hertz, "tegrastats GR3D_FREQ"


def _read_celsius(root: Path, line: _LazyLine) -> tuple[float, str]:
    """Return the GPU's temperature from tegrastats if the kernel shows no thermal zones; raises NoData."""
    if list_folder(root / thermal.ZONE_FOLDER, "thermal_zone[0-9]*"):
        raise NoData("no thermal zone is known to be the GPU's")
    celsius = [value for zone, value in line.read().celsius.items() if zone.lower() == "gpu"]
    if not celsius:
        raise NoData("tegrastats shows no GPU temperature: the GPU is off")
    return max(celsius), "tegrastats GPU"


def _find_devfreq(root: Path) -> list[Path]:
    return [folder for folder in list_folder(root / DEVFREQ) if GPU_NAME.fullmatch(folder.name)]


def _read_devfreq(root: Path, name: str) -> tuple[float, str]:
    """Return a clock averaged over the GPU's devfreq devices, and its source; raises NoData if one is unreadable."""
    folders = _find_devfreq(root)
    if not folders:
        raise NoData(f"{root / DEVFREQ}: no GPU")
    clocks = [read_within(folder / name, CLOCK_HERTZ) for folder in folders]
    return math.fsum(clocks) / len(clocks), "+".join(f"{DEVFREQ}/{folder.name}/{name}" for folder in folders)


def _is_load_of_gpu(path: Path) -> bool:
    """Check that a load file belongs to the GPU, by its device folder."""
    owner = path.parent.parent if path.parent.name == "device" else path.parent
    return re.fullmatch(r"gpu\.[0-9]", owner.name) is not None or GPU_NAME.fullmatch(owner.name) is not None
