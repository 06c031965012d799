"""Find hwmon chips by name: device numbers change with every boot."""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from device_agent.hardware.files import find_paths, list_folder, read_text
from shared.errors import NoData

CHIP_FOLDER = "sys/class/hwmon"
I2C_CHIPS = "sys/bus/i2c/devices/*-*/hwmon/hwmon*"
I2C_ADDRESS = re.compile(r"[0-9]{1,3}-[0-9a-f]{4}", re.ASCII)
"""Bus and address as the kernel writes them, `1-0040`; unlike hwmon numbers they are stable."""


class Chips(NamedTuple):
    """Chip folders with chip names, in order; and the error of a chip whose name cannot be read."""

    folders: tuple[tuple[Path, str], ...]
    refusal: NoData | None = None

    def require(self) -> tuple[Path, ...]:
        """Return the folders; raises NoData if there is none and an unreadable chip may be one."""
        if not self.folders and self.refusal:
            raise self.refusal
        return tuple(folder for folder, _ in self.folders)


def find_chips(root: Path, names: Collection[str]) -> Chips:
    """Find the chips with these driver names.

    Raises:
        NoData: The kernel's list of chips may not be read.
    """
    chips: list[tuple[Path, str]] = []
    refusal: NoData | None = None
    for folder in list_folder(root / CHIP_FOLDER, "hwmon*"):
        try:
            name = read_text(folder / "name")
        except NoData as error:
            if error.lack != "not_present":
                refusal = error
            continue
        if not name:
            refusal = NoData(f"{folder}/name: is empty", lack="invalid")
        elif name in names:
            chips.append((folder, name))
    return Chips(tuple(chips), refusal)


def find_addresses(root: Path) -> dict[str, str]:
    """Return the I2C addresses of chips by hwmon folder name; chips on other buses are left out."""
    folders = [path for path in find_paths(root, I2C_CHIPS) if path.name.startswith("hwmon")]
    addresses = {
        path.name: path.parent.parent.name for path in folders if I2C_ADDRESS.fullmatch(path.parent.parent.name)
    }
    try:
        chips = list_folder(root / CHIP_FOLDER, "hwmon*")
    except NoData:
        return addresses
    top = len(Path(os.path.realpath(root)).parts)
    for chip in chips:
        below = Path(os.path.realpath(chip)).parts[top:]
        address = next((part for part in reversed(below) if I2C_ADDRESS.fullmatch(part)), "")
        if address:
            addresses.setdefault(chip.name, address)
    return addresses
