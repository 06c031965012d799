"""Table cell of a reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edge_server.fleet.device_rows import Device
from shared.protocol.measurements import Quality

MARKS: Mapping[Quality, str] = {"measured": "", "corrected": "~", "modelled": "≈"}
NOTHING = "-"
WIDE = 1e6
"""Values from here on are written with three digits and a power of ten."""


class Column(NamedTuple):
    """A reading as a table column: heading, divisor of its unit, decimals."""

    heading: str
    reading: str
    scale: float = 1.0
    decimals: int = 1


def cell(device: Device, column: Column) -> str:
    """Return a reading with its quality mark, or the reason of its absence."""
    reading = device.readings.get(column.reading)
    if reading is None:
        return absence_cell(device, column.reading)
    value = reading.value / column.scale
    text = f"{value:.{column.decimals}f}" if abs(value) < WIDE else f"{value:.3g}"  # keep the column narrow
    return f"{text}{MARKS[reading.quality]}"


def absence_cell(device: Device, name: str) -> str:
    """Return a dash, with the reason unless the board simply has no such sensor."""
    lack = device.lack(name)
    return NOTHING if lack is None or lack.lack == "not_present" else f"{NOTHING} {lack.lack}"
