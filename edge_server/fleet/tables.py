"""Devices as tables, for people: every figure with the mark of its quality, every absence with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edge_server.fleet.view import Device
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.measurements import Cost, Quality, Reading
from shared.protocol.units import SECONDS, choose_unit, format_figure
from shared.runtime.text_table import TextColumn, TextTable, printable_text

MARKS: Mapping[Quality, str] = {"measured": "", "corrected": "~", "modelled": "≈"}
NOTHING = "-"
MAX_TEXT = 1000
LEGEND = (
    "~ corrected, ≈ modelled, no mark: measured; -: not there, and why\n"
    "s, J: of the last task, compute/upload; throttled: was: since it booted"
)
LINK_LEGEND = (
    "\nMbit/s -: not known before the device's first long transfer that way (256 KiB, 0.5 s); "
    "`device-agent probe --link` measures it now"
)
BARS = "▁▂▃▄▅▆▇█"
MEGA, GIGA, MEBI, WIDE = 1e6, 1e9, float(1 << 20), 1e6


class Column(NamedTuple):
    """A figure as a column: its heading, what its unit is divided by, and its decimals."""

    heading: str
    reading: str
    scale: float = 1.0
    decimals: int = 1


COLUMNS = (
    Column("GHz", "cpu.f_hertz", GIGA, 2),
    Column("W", "power.total_watts", 1.0, 2),
    Column("°C", "thermal.hottest_celsius"),
)
LINK = (Column("up", "link.up_bits_per_s", MEGA), Column("down", "link.down_bits_per_s", MEGA))
FREE = Column("free\nMiB", "memory.available_bytes", MEBI, 0)
GPU = Column("GPU\n%", "gpu.load_ratio", 0.01, 0)
SWAP = Column("swap\nMiB", "memory.swap_used_bytes", MEBI, 0)


def devices_table(devices: Sequence[Device]) -> TextTable:
    """Return one row a device; columns of the GPU and of swap where a device has one."""
    more = [GPU] * any(GPU.reading in one.readings for one in devices)
    more += [SWAP] * any(one.readings[SWAP.reading].value > 0 for one in devices if SWAP.reading in one.readings)
    figures = (
        *(column.heading for column in COLUMNS),
        *("throt\ntled", "Mbit/s\nup/down", FREE.heading),
        *(column.heading for column in more),
    )
    serves = [TextColumn("model", least=12)] if any(one.models for one in devices) else []
    if serves:
        serves.append(TextColumn("p95 ms\nerrors", right=True))
    columns = (
        *(TextColumn("device", least=16), TextColumn("on"), TextColumn("board", least=12), *serves),
        *(TextColumn(heading, right=True) for heading in (*figures, "s", "J", "age")),
    )
    rows = [
        (
            *(short_text(one.device), _online(one), short_text(one.board or NOTHING)),
            *(
                (", ".join(map(cell_of, one.models)) or NOTHING for cell_of in (model_cell, health_cell))
                if serves
                else ()
            ),
            *(cell(one, column) for column in COLUMNS),
            *(throttled(one), "/".join(cell(one, column) for column in LINK), cell(one, FREE)),
            *(cell(one, column) for column in more),
            *(task_cost_cell(one, "compute_s", "upload_s"), task_cost_cell(one, "compute_joules", "upload_joules")),
            NOTHING if one.age_s is None else duration(one.age_s),
        )
        for one in devices
    ]
    offline = [number for number, one in enumerate(devices) if one.online is False]
    lacks_link = any(column.reading not in one.readings for one in devices if one.readings for column in LINK)
    legend = LEGEND + LINK_LEGEND * lacks_link
    return TextTable(columns, rows, "Devices", legend, styles=dict.fromkeys(offline, "dim"))


def model_cell(one: ModelStatus) -> str:
    """Return which version of a model a device serves, and how it stands with another that it was offered."""
    served = f"{one.name}/{one.committed}" if one.committed else f"{one.name}: none"
    is_settled = one.state in ("", "committed", "superseded")
    return short_text(served if is_settled else f"{served}, {one.candidate} {one.state}")


def health_cell(one: ModelStatus) -> str:
    """Return how the version of a model that a device serves does: milliseconds of its answers, and failed requests."""
    p95_s, requests = one.figures.get("p95_s"), one.figures.get("requests", 0.0)
    if p95_s is None or not requests > 0:
        return NOTHING
    return f"{1e3 * p95_s:.3g}/{one.figures.get('errors', 0.0) / requests:.1%}"


def model_lines(device: Device) -> list[str]:
    """Return what a device says of each of its models: version, the one before, and why another did not stay."""
    lines = []
    for one in device.models:
        before = f", {one.previous} before" if one.previous else ""
        figures = "".join(f", {name} {value:.4g}" for name, value in sorted(one.figures.items()))
        reason = f": {one.reason}" if one.reason else ""
        lines.append(short_text(f"model {model_cell(one)}{before}{figures}{reason}"))
    return lines


def cell(device: Device, column: Column) -> str:
    """Return a figure with its mark, or why it is not there."""
    reading = device.readings.get(column.reading)
    if reading is None:
        return absence_cell(device, column.reading)
    value = reading.value / column.scale
    shown = f"{value:.{column.decimals}f}" if abs(value) < WIDE else f"{value:.3g}"  # else it takes the others' room
    return f"{shown}{MARKS[reading.quality]}"


def absence_cell(device: Device, name: str) -> str:
    """Return a dash, with the reason where it is more than that the board has no such thing."""
    lack = device.lack(name)
    return NOTHING if lack is None or lack.lack == "not_present" else f"{NOTHING} {lack.lack}"


def throttled(device: Device) -> str:
    """Return whether it is throttled now, or was since it booted."""
    now, since = (device.readings.get(f"throttle.{name}_flag") for name in ("now", "since_boot"))
    volts = device.readings.get("throttle.undervoltage_flag")
    if volts is not None and volts.value:
        return f"volts{MARKS[volts.quality]}"
    if now is None:
        return absence_cell(device, "throttle.now_flag")
    word = "yes" if now.value else "was" if since is not None and since.value else "no"
    return f"{word}{MARKS[now.quality]}"


def task_cost_cell(device: Device, *names: str) -> str:
    """Return parts of what its last task cost, such as compute and upload."""
    cost = device.spent.cost if device.spent else Cost()
    return "/".join(cost_cell(cost, name) for name in names)


def cost_cell(cost: Cost, name: str) -> str:
    """Return a figure of a cost with its mark."""
    value, provenance = getattr(cost, name), cost.provenance.get(name)
    return NOTHING if value is None else f"{value:.3g}{MARKS[provenance.quality] if provenance else ''}"


def readings_table(device: Device) -> TextTable:
    """Return all that a device measured, in the units of `probe`: value, uncertainty, quality, source, age."""
    columns = (
        *(TextColumn("reading", least=24), TextColumn("value", right=True), TextColumn("±", right=True)),
        *(TextColumn("quality"), TextColumn("source", least=12), TextColumn("age", right=True)),
    )
    rows = []
    for name, one in sorted(device.readings.items()):
        spread = NOTHING if one.uncertainty is None else format_figure(name, one.uncertainty, one.unit)
        age = duration(max(0.0, (device.at or 0.0) - one.at))
        shown = short_text(name), format_figure(name, one.value, one.unit), spread
        rows.append((*shown, one.quality, short_text(one.source), age))
    return TextTable(columns, rows, f"Readings of {device.device}")


def absences_table(device: Device) -> TextTable:
    """Return all that a device could not measure, and why."""
    rows = []
    for name, one in sorted(device.absent.items()):
        why = ": ".join(part for part in (one.lack.replace("_", " "), one.cause) if part)
        rows.append((short_text(f"{NOTHING} {name}"), short_text(why)))
    return TextTable((TextColumn(), TextColumn(least=24)), rows)


def plot(name: str, found: Sequence[tuple[float, Reading]], since_utc_s: float, until_utc_s: float) -> list[str]:
    """Return a figure over time as lines of text; an interval in which nothing came is blank.

    Args:
        found: Readings, each with the second at which the server heard it.
        since_utc_s: Left end of the time axis.
    """
    values = [(at, one.value) for at, one in found if since_utc_s <= at <= until_utc_s]
    if not values:
        return [f"{name}: nothing was kept in the last {duration(until_utc_s - since_utc_s)}"]
    least, most = min(value for _, value in values), max(value for _, value in values)
    shown = [format_figure(name, value, found[-1][1].unit) for value in (least, most, values[-1][1])]
    bars = sparkline(values, since_utc_s, until_utc_s)
    return [
        f"{name}, last {duration(until_utc_s - since_utc_s)}: {len(values)} reports",
        f"|{bars}|",
        f"least {shown[0]}, most {shown[1]}, last {shown[2]}",
    ]


def sparkline(values: Sequence[tuple[float, float]], since: float, until: float, width: int = 60) -> str:
    """Return one bar for the mean of each of `width` equal intervals, from the least value to the most.

    Args:
        values: Second and value.
        since: Left end, in seconds.
        until: Right end, in seconds.
    """
    bins: list[list[float]] = [[] for _ in range(width)]
    for at, value in values:
        bins[min(width - 1, int((at - since) / (until - since) * width))].append(value)
    means = [math.fsum(one) / len(one) if one else None for one in bins]
    known = [mean for mean in means if mean is not None]
    least, span = min(known), max(known) - min(known)
    return "".join(" " if mean is None else BARS[_level(mean, least, span)] for mean in means)


def _level(mean: float, least: float, span: float) -> int:
    return min(len(BARS) - 1, int((mean - least) / span * len(BARS))) if span > 0 else 0


def duration(seconds: float) -> str:
    """Return seconds in the unit that fits them."""
    unit = choose_unit(seconds, SECONDS, between=("d", "s"))
    return f"{seconds / unit.size:.0f} {unit.name}"


def _online(device: Device) -> str:
    return NOTHING if device.online is None else "yes" if device.online else "no"


def short_text(text: str) -> str:
    """Return a device's text without control characters; no device's text is longer than `MAX_TEXT`."""
    return printable_text(text[:MAX_TEXT])
