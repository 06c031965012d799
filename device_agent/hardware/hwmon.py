"""Find hwmon chips by their name: numbers of devices change with every boot."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from device_agent.hardware.files import list_folder, read_text
from shared.errors import NoData

CHIP_FOLDER = "sys/class/hwmon"


class Chips(NamedTuple):
    """Folders by the names of their chips, in order; and why some chip does not say what it is, if one does not."""

    folders: tuple[tuple[Path, str], ...]
    refusal: NoData | None = None

    def require(self) -> tuple[Path, ...]:
        """Return the folders; raises NoData where there is none, and a chip that does not say its name may be one."""
        if not self.folders and self.refusal:
            raise self.refusal
        return tuple(folder for folder, _ in self.folders)


def find_chips(root: Path, names: Collection[str]) -> Chips:
    """Find the chips of these names.

    Args:
        root: The board's root folder.
        names: As the drivers write them.

    Raises:
        NoData: The kernel's list of chips may not be read.
    """
    found: list[tuple[Path, str]] = []
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
            found.append((folder, name))
    return Chips(tuple(found), refusal)
