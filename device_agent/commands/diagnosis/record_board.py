"""Record a board's sensor files for replay, with identities redacted.

The folder is also a test fixture: `root/` with the files that probes read and the output of the board's tools, and
`expected.json` with the probes' results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from device_agent.hardware import firmware, tools
from device_agent.hardware.files import (
    LACK_MARK,
    find_paths,
    is_folder,
    list_folder,
    path_exists,
    read_text,
    read_text_or,
)
from device_agent.hardware.hwmon import CHIP_FOLDER, I2C_CHIPS, find_addresses
from device_agent.probes import gpu, memory
from device_agent.probes.base import ProbeResult
from device_agent.probes.network import INTERFACES
from device_agent.probes.power import tegrastats
from device_agent.probes.throttle import FIRMWARE_COPIES
from device_agent.profile.schema import Profile
from shared.errors import ConfigError, NoData
from shared.protocol.measurements import Lack
from shared.runtime.diagnosis.redaction import redact

ROOT, EXPECTED = "root", "expected.json"
MAX_FILE_BYTES = 64 << 10
MAX_TREE_BYTES = 4 << 20

CPU, HWMON, NET = "sys/devices/system/cpu", "sys/class/hwmon/hwmon*", f"{INTERFACES}/*"
RADIO = ("wireless", "phy80211")
IIO, SUPPLY, ZONE = "sys/bus/i2c/drivers/ina3221x/*/iio:device*", "sys/class/power_supply/*", "sys/class/powercap/*"
PATHS = (
    "proc/cpuinfo",
    "proc/stat",
    "proc/meminfo",
    "proc/net/dev",
    "proc/net/wireless",
    "proc/pressure/*",
    "proc/sys/kernel/osrelease",
    "proc/device-tree/compatible",
    "proc/device-tree/model",
    "proc/self/cgroup",
    "etc/nv_tegra_release",
    "etc/nvpmodel.conf",
    "var/lib/nvpmodel/status",
    *(f"sys/class/dmi/id/{name}" for name in ("sys_vendor", "product_name", "board_name")),
    *(f"{CPU}/{name}" for name in ("online", "offline", "present", "possible", "cpu[0-9]*/online")),
    *(f"{CPU}/cpufreq/policy*/{name}" for name in ("*_freq", "*_cpus", "*_governor", "*_driver", "*_frequencies")),
    f"{CPU}/cpufreq/policy*/stats/time_in_state",
    *(f"sys/class/thermal/thermal_zone*/{name}" for name in ("type", "temp", "mode", "trip_point_*")),
    *(f"sys/class/thermal/cooling_device*/{name}" for name in ("type", "cur_state", "max_state")),
    *(f"{HWMON}/{name}" for name in ("name", "*_label", "*_input", "*_max", "*_crit", "*_alarm", "*_cnt", "*_en")),
    *(f"{HWMON}/{name}" for name in ("label", "update_interval", "shunt*_resistor")),
    f"{I2C_CHIPS}/name",
    *(f"{IIO}/{name}" for name in ("rail_name_*", "in_*_input", "*_limit_*", "name")),
    *(f"{ZONE}/{name}" for name in ("name", "energy_uj", "max_energy_range_uj", "constraint_*_uw", "enabled")),
    *(f"{SUPPLY}/{name}" for name in ("type", "scope", "status", "capacity", "online", "present", "*_now")),
    *FIRMWARE_COPIES,
    *(f"{NET}/{name}" for name in ("type", "speed", "operstate", "carrier", "statistics/[rt]x_bytes")),
    *(f"{NET}/{name}" for name in ("device/modalias", "phy80211/index", "wireless/*")),
    *(f"sys/class/devfreq/*/{name}" for name in ("cur_freq", "max_freq")),
    *gpu.LOAD_FILES,
    *(f"sys/fs/cgroup/{name}" for name in ("memory.pressure", "cpu.max", "cpu.stat")),
)
"""Files to copy, as patterns below the root: those that probes read now, and candidates for future probes."""

FIRMWARE_QUESTIONS = ("measure_clock arm", "measure_temp", "get_throttled", "pmic_read_adc")
RADIO_QUESTIONS = (("link",), ("station", "dump"))


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Extent of a recording: files, bytes, unreadable files, and files left out for their size."""

    files: int = 0
    size_bytes: int = 0
    lacks: dict[str, Lack] = {}
    left_out: tuple[str, ...] = ()


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Expected probe results of a recorded board, by name."""

    board: str
    readings: dict[str, float] = {}
    absent: dict[str, Lack] = {}
    facts: dict[str, str] = {}


def record(root: Path, folder: Path) -> Summary:
    """Copy the board below `root` into `folder`/root.

    Raises:
        ConfigError: The folder exists and is not empty, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; name a folder this user may write") from error
    private = (os.uname().nodename,)
    files: dict[str, str] = {}
    lacks: dict[str, Lack] = {}
    left_out, room = [], MAX_TREE_BYTES
    for question, ask in _list_sources(root):
        name, (content, lack) = redact(question, private), _read_answer(ask)
        content = redact(content, private) + "\n"
        size = len(content.encode())
        if lack == "not_present" or name in files:
            continue
        if size > min(MAX_FILE_BYTES, room):
            left_out.append(name)
            continue
        room -= size
        files[name] = content
        if lack is not None:
            lacks[name] = lack
    for name in _find_hidden(files, lacks):
        del files[name]
        lacks.pop(name, None)
    _write(folder, {f"{ROOT}/{name}": content for name, content in files.items()})
    return Summary(files=len(files), size_bytes=MAX_TREE_BYTES - room, lacks=lacks, left_out=tuple(left_out))


def _find_hidden(files: Collection[str], lacks: Collection[str]) -> set[str]:
    """Return entries that cannot coexist in a copy: an unlistable folder, or the failures recorded within it.

    Files of an unlistable folder may be readable by name; the copy then has these as its content.
    """
    within: dict[str, list[str]] = {}
    for name in files:
        for above in map(str, PurePosixPath(name).parents):
            if above in lacks:
                within.setdefault(above, []).append(name)
    hidden = set[str]()
    for folder, names in within.items():
        hidden |= {folder} if any(name not in lacks for name in names) else set(names)
    return hidden


def find_root(folder: str) -> Path:
    """Return the root of a recorded board, given either the root itself or the folder written by `record`."""
    return Path(folder, ROOT) if path_exists(Path(folder, EXPECTED)) else Path(folder)


def save_expected(folder: Path, expected: Expected) -> None:
    """Save the expected results beside the tree; raises ConfigError if they cannot be written."""
    _write(folder, {EXPECTED: msgspec.json.format(msgspec.json.encode(expected)).decode() + "\n"})


def make_expected(profile: Profile, result: ProbeResult) -> Expected:
    """Return the readings, absences and facts of a probe result, without sources, times and causes."""
    return Expected(
        board=profile.id,
        readings={name: reading.value for name, reading in sorted(result.readings.items())},
        absent={name: lack.lack for name, lack in sorted(result.absent.items())},
        facts=dict(sorted(result.facts.items())),
    )


def _list_sources(root: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    for pattern in PATHS:
        for path in find_paths(root, pattern):
            if not is_folder(path) or not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
                yield str(path.relative_to(root)), partial(read_text, path)
    for chip, address in find_addresses(root).items():  # a copy has no links from which to read the address
        name = I2C_CHIPS.replace("*-*", address).replace("hwmon*", chip)
        yield f"{name}/name", partial(read_text, root / CHIP_FOLDER / chip / "name")
    for path in _find_cgroup_files(root):
        yield str(path.relative_to(root)), partial(read_text, path)
    for question in FIRMWARE_QUESTIONS:
        yield f"{tools.RECORDED_TOOLS}/vcgencmd {question}", partial(firmware.ask, root, question)
    commands: list[tuple[tuple[str, ...], Callable[..., str]]] = [
        (("nvpmodel", "-q"), tools.run_tool),
        (tegrastats.COMMAND, tools.run_tool_first_line),
    ]
    radios = [interface for interface in _list_interfaces(root) if any(path_exists(interface / name) for name in RADIO)]
    commands += [
        (("iw", "dev", radio.name, *question), tools.run_tool) for radio in radios for question in RADIO_QUESTIONS
    ]
    for command, ask in commands:
        yield f"{tools.RECORDED_TOOLS}/{' '.join(command)}", partial(ask, root, command)


def _list_interfaces(root: Path) -> list[Path]:
    try:
        return list_folder(root / INTERFACES)
    except NoData:
        return []  # recorded with the files


def _find_cgroup_files(root: Path) -> Iterator[Path]:
    """Yield the files of the control groups that limit this process's memory."""
    for mount, group, files in memory.parse_cgroups(read_text_or(root / memory.OWN_CGROUP)):
        for folder in (root / mount / level for level in (group, *group.parents)):
            yield from (folder / name for name in (*files.limits, files.usage, "memory.stat"))


def _read_answer(ask: Callable[[], str]) -> tuple[str, Lack | None]:
    try:
        return ask().rstrip("\n"), None
    except NoData as error:
        return LACK_MARK + error.lack, error.lack


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}; name a folder this user may write") from error
