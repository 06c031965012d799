"""INA219 and kin: I2C power monitors that somebody added to the board (kernel: Documentation/hwmon/ina2xx.rst)."""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection
from pathlib import Path

from device_agent.hardware.files import read_text
from device_agent.hardware.hwmon import CHIP_FOLDER, Chips, find_chips
from device_agent.probes.base import describe_absence, read_number
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData

CHIPS = frozenset(f"ina{part}" for part in (219, 220, 226, 228, 230, 231, 232, 234, 237, 238, 260))
MICROWATT = 1e-6


def open_sensor(root: Path) -> RailReader:
    """Return a reader of all such chips; raises NoData where there is none.

    A chip alone is the total by itself, unless there is a chip that does not say what it is.
    """
    there = find_chips(root, CHIPS)
    chips = _choose_labels(there)
    if not chips:
        raise there.refusal or NoData(f"no {min(CHIPS)} or one of its kin below {root / CHIP_FOLDER}")
    whole = tuple(chips) if len(chips) == 1 and there.refusal is None else ()

    def ask(labels: Collection[str] | None) -> Rails:
        watts, lacks = {}, {}
        for label in chips if labels is None else chips.keys() & set(labels):
            try:
                watts[label] = read_number(chips[label] / "power1_input", MICROWATT)
            except NoData as error:
                lacks[label] = describe_absence(error)
        return Rails(watts=watts, lacks=lacks, whole=whole)

    return ask


def _choose_labels(chips: Chips) -> dict[str, Path]:
    """Return folders by label: the device tree's word, else the chip's name, with its address where that is shared."""
    found = [(_read_label(folder, name), folder) for folder, name in chips.folders]
    labels = [label for label, _ in found]
    return {
        label if labels.count(label) == 1 else f"{label}-{_find_address(folder)}": Path(os.path.realpath(folder))
        for label, folder in found
    }


def _read_label(folder: Path, name: str) -> str:
    for file in ("label", "power1_label"):
        try:
            return read_text(folder / file) or name
        except NoData:
            continue
    return name


def _find_address(folder: Path) -> str:
    """Return bus and address as the kernel writes them, `1-0040`; where no folder above says so, the hwmon's name."""
    return next(
        (part for part in Path(os.path.realpath(folder)).parts if re.fullmatch(r"\d+-[0-9a-f]{4}", part)), folder.name
    )
