"""INA3221 sensor: three power rails per chip, matched by label.

JetPack 5 and newer use the kernel's hwmon driver (Documentation/hwmon/ina3221.rst): millivolts and milliamperes, no
power. JetPack 4 has NVIDIA's driver below iio, with power in milliwatts. Device numbers change between boots.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from device_agent.hardware.files import find_paths, list_folder, read_text, read_text_or
from device_agent.hardware.hwmon import CHIP_FOLDER, find_addresses, find_chips
from device_agent.probes.base import describe_absence, parse_number
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData
from shared.protocol.measurements import Absent
from shared.protocol.plausible import AMPERES, VOLTS, Bounds

DRIVER, IIO = "sys/bus/i2c/drivers/ina3221", "sys/bus/i2c/drivers/ina3221x"
CHIP = "ina3221"
UNCONNECTED = frozenset({"", "NC"})
CHANNELS = 3
"""Ignored: in4 to in7 and curr4 of hwmon, which are shunt voltages and sums over channels."""

MILLI = 1e-3
NO_BOUNDS: Bounds = (-math.inf, math.inf)


class Channel(msgspec.Struct, frozen=True):
    """Rail: files in milliunits whose product is its power, each with its plausible range."""

    files: tuple[tuple[Path, Bounds], ...]


def open_sensor(root: Path) -> RailReader:
    """Open all rails of all chips; raises NoData if there is none."""
    rails: dict[str, Channel] = {}
    twice: set[str] = set()
    chips = find_chips(root, (CHIP,))
    folders = [folder for folder, _ in chips.folders] or find_paths(root, f"{DRIVER}/*-*/hwmon/hwmon*")
    for label, channel in [*_find_hwmon_channels(folders, root)] or [*_find_iio_channels(root)]:
        twice |= {label} & rails.keys()
        rails[label] = channel
    if not rails:
        raise chips.refusal or NoData(f"no rail of an {CHIP} below {root / CHIP_FOLDER} or {root / IIO}")

    def ask(labels: Collection[str] | None) -> Rails:
        watts: dict[str, float] = {}
        lacks = {label: Absent(lack="invalid", cause=f"two rails are called {label}") for label in twice}
        for label in rails if labels is None else rails.keys() & set(labels):
            try:
                watts[label] = _read_watts(rails[label])
            except NoData as error:
                lacks[label] = describe_absence(error)
        return Rails(watts={label: watts[label] for label in watts.keys() - twice}, lacks=lacks)

    return ask


def _find_hwmon_channels(folders: Sequence[Path], root: Path) -> Iterator[tuple[str, Channel]]:
    """Yield labels and channels of the kernel's driver.

    Added modules have no labels; their channels are labelled by chip name and channel number.
    """
    addresses = find_addresses(root) if len(folders) > 1 else {}
    for folder in folders:
        chip = f"{CHIP}-{addresses.get(folder.name, folder.name)}" if len(folders) > 1 else CHIP
        for number in range(1, CHANNELS + 1):
            volts, amperes = folder / f"in{number}_input", folder / f"curr{number}_input"
            channel = Channel(((volts, VOLTS), (amperes, AMPERES)))
            label = _read_label(folder / f"in{number}_label")
            if label is None and _is_answering(channel):
                label = f"{chip}-{number}"
            if label is not None and label not in UNCONNECTED:
                yield label, channel


def _read_label(path: Path) -> str | None:
    """Return a channel's label; None if the driver has none."""
    try:
        return read_text(path)
    except NoData as error:
        return None if error.lack == "not_present" else ""


def _is_answering(channel: Channel) -> bool:
    """Check that a channel is enabled: the driver refuses to read a disabled one."""
    try:
        _read_watts(channel)
    except NoData:
        return False
    return True


def _find_iio_channels(root: Path) -> Iterator[tuple[str, Channel]]:
    for chip in list_folder(root / IIO, "*-*"):
        folders = list_folder(chip, "iio:device*") or [chip / "iio_device"]
        for number in range(CHANNELS):
            label = read_text_or(folders[0] / f"rail_name_{number}")
            if label not in UNCONNECTED:
                yield label, Channel(((folders[0] / f"in_power{number}_input", NO_BOUNDS),))


def _read_watts(channel: Channel) -> float:
    watts = 1.0
    for path, (low, high) in channel.files:
        value = parse_number(read_text(path).partition(" ")[0], path) * MILLI  # some drivers append the unit
        if not low <= value <= high:
            raise NoData(f"{path}: {value:g} V or A is out of range ({low:g} to {high:g})", lack="invalid")
        watts *= value
    return watts
