"""INA219 family: I2C power monitors added to a board (Documentation/hwmon/ina2xx.rst).

The power register is unsigned, so the sign is taken from the current. Such a chip may also sit at a UPS's battery.
"""

from __future__ import annotations

import os.path
from collections.abc import Collection
from pathlib import Path

from device_agent.hardware.files import read_text
from device_agent.hardware.hwmon import CHIP_FOLDER, Chips, find_addresses, find_chips
from device_agent.probes.base import describe_absence, read_number, read_within
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData
from shared.protocol.measurements import Absent
from shared.protocol.plausible import AMPERES, VOLTS

CHIPS = frozenset(f"ina{part}" for part in (219, 220, 226, 228, 230, 231, 232, 234, 237, 238, 260))
MILLI, MICRO = 1e-3, 1e-6


def open_sensor(root: Path) -> RailReader:
    """Open all chips of the family; raises NoData if there is none.

    A single chip measures the total, unless there is an unidentified chip too.
    """
    chips = find_chips(root, CHIPS)
    folders = _choose_labels(chips, root)
    if not folders:
        raise chips.refusal or NoData(f"no {min(CHIPS)} or similar chip below {root / CHIP_FOLDER}")
    total_labels = tuple(folders) if len(folders) == 1 and chips.refusal is None else ()

    def ask(labels: Collection[str] | None) -> Rails:
        watts: dict[str, float] = {}
        volts: dict[str, float] = {}
        lacks: dict[str, Absent] = {}
        for label in folders if labels is None else folders.keys() & set(labels):
            try:
                watts[label], bus = _read_chip(folders[label])
            except NoData as error:
                lacks[label] = describe_absence(error)
            else:
                volts |= {} if bus is None else {label: bus}
        return Rails(watts=watts, lacks=lacks, total_labels=total_labels, volts=volts)

    return ask


def _read_chip(chip: Path) -> tuple[float, float | None]:
    """Return watts with the sign of the current, and bus volts (None if not measured); raises NoData."""
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
    """Read milliunits; None if there is no such file. Raises NoData if it is unreadable."""
    try:
        return read_within(path, bounds, MILLI)
    except NoData as error:
        if error.lack == "not_present":
            return None
        raise


def _choose_labels(chips: Chips, root: Path) -> dict[str, Path]:
    """Return folders by unique label: from the device tree, else the chip's name, plus its address if ambiguous."""
    labelled = [(_read_label(folder, name), folder) for folder, name in chips.folders]
    labels = [label for label, _ in labelled]
    addresses = find_addresses(root) if len(set(labels)) < len(labels) else {}
    return {
        label if labels.count(label) == 1 else f"{label}-{addresses.get(folder.name, folder.name)}": Path(
            os.path.realpath(folder)
        )
        for label, folder in labelled
    }


def _read_label(folder: Path, name: str) -> str:
    for file in ("label", "power1_label"):
        try:
            return read_text(folder / file) or name
        except NoData:
            continue
    return name
