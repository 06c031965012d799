"""INA219 and kin: I2C power monitors that somebody added to the board (kernel: Documentation/hwmon/ina2xx.rst).

Their power register has no sign: the direction is that of the current. Such a chip may also be at a UPS's battery.
"""

from __future__ import annotations

import os.path
from collections.abc import Collection
from pathlib import Path

from device_agent.hardware.bounds import AMPERES, VOLTS
from device_agent.hardware.files import read_text
from device_agent.hardware.hwmon import CHIP_FOLDER, Chips, find_addresses, find_chips
from device_agent.probes.base import describe_absence, read_number, read_within
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData
from shared.protocol.measurements import Absent

CHIPS = frozenset(f"ina{part}" for part in (219, 220, 226, 228, 230, 231, 232, 234, 237, 238, 260))
MILLI, MICRO = 1e-3, 1e-6


def open_sensor(root: Path) -> RailReader:
    """Return a reader of all such chips; raises NoData where there is none.

    A chip alone is the total by itself, unless there is a chip that does not say what it is.
    """
    there = find_chips(root, CHIPS)
    chips = _choose_labels(there, root)
    if not chips:
        raise there.refusal or NoData(f"no {min(CHIPS)} or one of its kin below {root / CHIP_FOLDER}")
    whole = tuple(chips) if len(chips) == 1 and there.refusal is None else ()

    def ask(labels: Collection[str] | None) -> Rails:
        watts: dict[str, float] = {}
        volts: dict[str, float] = {}
        lacks: dict[str, Absent] = {}
        for label in chips if labels is None else chips.keys() & set(labels):
            try:
                watts[label], bus = _read_chip(chips[label])
            except NoData as error:
                lacks[label] = describe_absence(error)
            else:
                volts |= {} if bus is None else {label: bus}
        return Rails(watts=watts, lacks=lacks, whole=whole, volts=volts)

    return ask


def _read_chip(chip: Path) -> tuple[float, float | None]:
    """Return watts with the sign of the current, and volts of the bus, None where the chip has none; raises NoData."""
    volts = _read_optional(chip / "in1_input", VOLTS)
    amperes = _read_optional(chip / "curr1_input", AMPERES)
    try:
        watts = read_number(chip / "power1_input", MICRO)
    except NoData as error:
        if error.lack != "not_present" or volts is None or amperes is None:
            raise
        return volts * amperes, volts
    return -abs(watts) if amperes is not None and amperes < 0 else watts, volts


def _read_optional(path: Path, bounds: tuple[float, float]) -> float | None:
    """Return a figure in thousandths, None where there is no such file; raises NoData where it does not answer."""
    try:
        return read_within(path, bounds, MILLI)
    except NoData as error:
        if error.lack == "not_present":
            return None
        raise


def _choose_labels(chips: Chips, root: Path) -> dict[str, Path]:
    """Return folders by label: the device tree's word, else the chip's name, with its address where that is shared."""
    found = [(_read_label(folder, name), folder) for folder, name in chips.folders]
    labels = [label for label, _ in found]
    addresses = find_addresses(root) if len(set(labels)) < len(labels) else {}
    return {
        label if labels.count(label) == 1 else f"{label}-{addresses.get(folder.name, folder.name)}": Path(
            os.path.realpath(folder)
        )
        for label, folder in found
    }


def _read_label(folder: Path, name: str) -> str:
    for file in ("label", "power1_label"):
        try:
            return read_text(folder / file) or name
        except NoData:
            continue
    return name
