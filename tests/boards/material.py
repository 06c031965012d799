"""Turn what was recorded of a board into files as they lie below its root: path -> content.

Recordings are prints of people's tools: they hold megahertz, volts and degrees where a board's files hold kHz, mV and
thousandths. A file that did not answer holds `#lack busy`, as in recordings of our own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Tree: TypeAlias = dict[str, str]

CPU, ZONE = "sys/devices/system/cpu", "sys/class/thermal/thermal_zone"
ERRNO_LACKS = {"11": "busy"}


def write(tree: Tree, root: Path) -> Path:
    """Write the files; a chip's folder below its driver is also reached through /sys/class, as on a board."""
    for name, content in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for chip in sorted(root.glob("sys/bus/i2c/drivers/*/*/hwmon/hwmon*")):
        link = root / "sys/class/hwmon" / chip.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(chip)
    return root


def compatible(text: str) -> Tree:
    """Tokens, one a line."""
    return {"proc/device-tree/compatible": "".join(f"{token}\0" for token in text.split())}


def model(text: str) -> Tree:
    """The first of the strings recorded on boards of this kind."""
    return {"proc/device-tree/model": text.splitlines()[0] + "\0"}


def tsv(text: str) -> Tree:
    """`path<TAB>content` or `mode<TAB>path<TAB>content`; a file of mode 400 is one that the agent may not read."""
    tree = {}
    for line in text.splitlines():
        *mode, name, content = line.split("\t")
        name = name.lstrip("/")
        name = name if name.startswith(("sys/", "proc/", "etc/")) else f"sys/{name}"
        content = content.removesuffix("EOF").replace("\\n", "\n")
        tree[name] = "#lack denied\n" if mode == ["400"] else content + "\n"
    return tree


def topology(text: str) -> Tree:
    """Rows of CPU, cluster, policy, lowest and highest MHz, kind of core."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+ +\d+ +\d+ +\d+ +\d+ ", line)]
    tree = {f"{CPU}/online": f"0-{len(rows) - 1}\n", f"{CPU}/present": f"0-{len(rows) - 1}\n"}
    for first in {row[2] for row in rows}:
        members = [row for row in rows if row[2] == first]
        tree |= policy(int(first), [int(row[0]) for row in members], int(members[0][3]), int(members[0][4]))
    return tree


def policy(first: int, cpus: Iterable[int], low_mhz: int, high_mhz: int) -> Tree:
    """CPUs that share a clock."""
    names = " ".join(map(str, cpus))
    low, high = f"{low_mhz * 1000}\n", f"{high_mhz * 1000}\n"
    files = {"affected_cpus": names + "\n", "related_cpus": names + "\n", "scaling_governor": "schedutil\n"}
    files |= {"cpuinfo_min_freq": low, "scaling_min_freq": low, "cpuinfo_max_freq": high, "scaling_max_freq": high}
    return {f"{CPU}/cpufreq/policy{first}/{name}": content for name, content in files.items()}


def clocks(mhz: dict[int, float]) -> Tree:
    """What the driver says, by first CPU of the policy."""
    return {f"{CPU}/cpufreq/policy{first}/scaling_cur_freq": f"{value * 1000:.0f}\n" for first, value in mhz.items()}


def load_line(text: str, line: int, policies: tuple[int, ...] = (0,), zone: str = "cpu-thermal") -> Tree:
    """One line of a load monitor: clock as the driver says and, on a Pi, as the firmware does; temperature.

    `big.LITTLE` names the last cluster first; with three clusters the middle one is taken to run as the last.
    """
    head, *rows = [one for one in text.splitlines() if re.match(r"Time |\d\d:", one)]
    found = re.match(r"[\d:]+: +(\d+)(?:/ *(\d+))?MHz .*? (?:(-?[\d.]+)°C|--)", rows[line])
    assert found, rows[line]
    first, second, celsius = found.groups()
    if "fake/real" in head:
        tree = clocks(dict.fromkeys(policies, float(first)))
        tree["tools/vcgencmd measure_clock arm"] = f"frequency(48)={int(second) * 1_000_000}\n"
    else:
        tree = clocks(dict.fromkeys(policies, float(first)) | {policies[0]: float(second or first)})
    return tree | (thermal({zone: celsius}) if celsius else {})


def thermal(celsius: dict[str, str], first: int = 0) -> Tree:
    """Thermal zones by type."""
    tree = {}
    for number, (kind, value) in enumerate(celsius.items(), first):
        tree[f"{ZONE}{number}/type"] = kind + "\n"
        tree[f"{ZONE}{number}/temp"] = f"{round(float(value) * 1000)}\n"
    return tree


def observed_zones(text: str) -> Tree:
    """Zones as someone's program met them: a figure in thousandths, or the error it got."""
    tree = {}
    for number, line in enumerate(text.splitlines()):
        kind, value, outcome = line.split("\t")
        refused = re.search(r"errno=(\d+)", outcome)
        tree[f"{ZONE}{number}/type"] = kind + "\n"
        tree[f"{ZONE}{number}/temp"] = f"#lack {ERRNO_LACKS[refused[1]]}\n" if refused else value + "\n"
    return tree


def lm_sensors(text: str) -> Tree:
    """Chips as `sensors` prints them: volts, amperes and degrees by label."""
    tree: Tree = {}
    for number, block in enumerate(re.split(r"\n\s*\n", text)):
        lines = block.strip().splitlines()
        chip = re.fullmatch(r"(\w+)-(?:i2c-(\d+)-([0-9a-f]+)|\w+-\w+)", lines[0].replace("-fan-est", "_fan_est"))
        if chip is None:
            continue
        name, bus, address = chip.groups()
        folder = f"sys/class/hwmon/hwmon{number}"
        if bus:
            folder = f"sys/bus/i2c/drivers/{name}/{bus}-{int(address, 16):04x}/hwmon/hwmon{number}"
        tree |= {f"{folder}/name": name + "\n"} | _chip(folder, lines[1:])
    return tree


def _chip(folder: str, lines: list[str]) -> Tree:
    tree, volts = {}, 0
    for line in lines:
        found = re.match(r"([^:]+): +([+-]?[\d.]+|N/A) *°?(mV|V|mA|A|C|RPM)?", line)
        if found is None:
            continue
        label, value, unit = found.groups()
        limits = re.findall(r"(max|crit max) = +\+([\d.]+) A", line)
        if unit in {"V", "mV"} or (value == "N/A" and not label.startswith(("curr", "temp"))):
            volts += 1
            tree |= {} if re.fullmatch(r"in\d+", label) else {f"{folder}/in{volts}_label": label + "\n"}
            label = f"in{volts}"
        if value != "N/A" and re.fullmatch(r"(in|curr|temp|fan)\d+", label):
            tree[f"{folder}/{label}_input"] = f"{round(float(value) * (1 if unit in {'mV', 'mA', 'RPM'} else 1000))}\n"
        for kind, amperes in limits:
            tree[f"{folder}/{label}_{'max' if kind == 'max' else 'crit'}"] = f"{round(float(amperes) * 1000)}\n"
    return tree


def throttled_picture(text: str) -> Tree:
    """The bits as sbc-bench draws them."""
    bits = next(line for line in text.splitlines() if re.fullmatch("[01]+", line))
    return {"tools/vcgencmd get_throttled": f"throttled={int(bits, 2):#x}\n"}


def firmware_answers(text: str) -> Tree:
    """Answers of a Pi's firmware, each on a line."""
    questions = {"temp": "measure_temp", "frequency(48)": "measure_clock arm", "frequency(0)": "measure_clock arm"}
    questions["throttled"] = "get_throttled"
    return {f"tools/vcgencmd {questions[line.partition('=')[0]]}": line + "\n" for line in text.split()}


def power_modes(text: str) -> Tree:
    """The modes of `nvpmodel -p --verbose`, or of its file, as its file."""
    modes = re.findall(r"POWER_MODEL:? ID=(\d+) NAME=(\S+)", text)
    return {"etc/nvpmodel.conf": "".join(f"< POWER_MODEL ID={number} NAME={name} >\n" for number, name in modes)}


def tegrastats(line: str) -> Tree:
    """One line, as the command prints it at once."""
    return {"tools/tegrastats --interval 100": line + "\n"}


def as_file(name: str, text: str) -> Tree:
    """A file as it was."""
    return {name: text}
