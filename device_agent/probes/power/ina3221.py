"""INA3221 of a Jetson: three rails a chip, matched by their labels, since numbers of devices change.

JetPack 5 and newer have the kernel's hwmon driver (Documentation/hwmon/ina3221.rst): millivolts and milliamperes, no
power. JetPack 4 has one of NVIDIA's own below iio, with power in milliwatts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from device_agent.hardware.files import read_text
from device_agent.probes.base import describe_absence
from device_agent.probes.power.rails import RailReader, Rails, multiply
from shared.errors import NoData
from shared.protocol.measurements import Absent

HWMON, DRIVER, IIO = "sys/class/hwmon", "sys/bus/i2c/drivers/ina3221", "sys/bus/i2c/drivers/ina3221x"
CHIP = "ina3221"
UNCONNECTED = frozenset({"", "NC"})
CHANNELS = 3
"""in4 to in7 and curr4 of hwmon are shunt voltages and sums across channels, parts and wholes together."""


class Channel(msgspec.Struct, frozen=True):
    """One rail: files whose product is its power, and what a product of one is in watts."""

    files: tuple[Path, ...]
    scale: float


def open_sensor(root: Path) -> RailReader:
    """Return a reader of all rails of all chips; raises NoData where there is none."""
    rails: dict[str, Channel] = {}
    twice: set[str] = set()
    for label, channel in [*_find_hwmon_channels(root)] or [*_find_iio_channels(root)]:
        twice |= {label} & rails.keys()
        rails[label] = channel
    if not rails:
        raise NoData(f"no rail of an {CHIP} below {root / HWMON} or {root / IIO}")

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


def _find_hwmon_channels(root: Path) -> Iterator[tuple[str, Channel]]:
    """Yield labels and channels of the kernel's driver; the same chips lie below its folder and below the class."""
    folders = [one for one in sorted((root / HWMON).glob("hwmon*")) if _text_or_empty(one / "name") == CHIP]
    for folder in folders or sorted((root / DRIVER).glob("*-*/hwmon/hwmon*")):
        for number in range(1, CHANNELS + 1):
            label = _text_or_empty(folder / f"in{number}_label")
            if label not in UNCONNECTED:
                yield label, Channel((folder / f"in{number}_input", folder / f"curr{number}_input"), 1e-6)


def _find_iio_channels(root: Path) -> Iterator[tuple[str, Channel]]:
    for chip in sorted((root / IIO).glob("*-*")):
        folders = sorted(chip.glob("iio:device*")) or [chip / "iio_device"]
        for number in range(CHANNELS):
            label = _text_or_empty(folders[0] / f"rail_name_{number}")
            if label not in UNCONNECTED:
                yield label, Channel((folders[0] / f"in_power{number}_input",), 1e-3)


def _text_or_empty(path: Path) -> str:
    try:
        return read_text(path)
    except NoData:
        return ""


def _read_watts(channel: Channel) -> float:
    factors = [channel.scale]
    for path in channel.files:
        content = read_text(path)
        try:
            factors.append(float(int(content.partition(" ")[0])))  # some drivers put the unit behind the figure
        except (ValueError, OverflowError):
            raise NoData(f"{path}: {content[:40]!r} is no whole number", lack="invalid") from None
    return multiply(*factors)
