"""Terminal tables of devices: figures marked by quality, absences with their reason."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge_server.fleet.device_rows import Device
from edge_server.fleet.reading_cell import MARKS, NOTHING, Column, absence_cell, cell
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.measurements import Cost, Reading
from shared.protocol.units import SECONDS, choose_unit, format_figure
from shared.runtime.text_table import TextColumn, TextTable, printable_text

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
MEGA, GIGA, MEBI = 1e6, 1e9, float(1 << 20)

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
    """Return a table with one row per device; GPU and swap columns only where a device has them."""
    more = [GPU] * any(GPU.reading in device.readings for device in devices)
    swaps = [device.readings[SWAP.reading] for device in devices if SWAP.reading in device.readings]
    more += [SWAP] * any(swap.value > 0 for swap in swaps)
    figures = (
        *(column.heading for column in COLUMNS),
        *("throt\ntled", "Mbit/s\nup/down", FREE.heading),
        *(column.heading for column in more),
    )
    serves = [TextColumn("model", least=12)] if any(device.models for device in devices) else []
    if serves:
        serves.append(TextColumn("p95 ms\nerrors", right=True))
    columns = (
        *(TextColumn("device", least=16), TextColumn("on"), TextColumn("board", least=12), *serves),
        *(TextColumn(heading, right=True) for heading in (*figures, "s", "J", "age")),
    )
    rows = [
        (
            *(short_text(device.device), _online_cell(device), short_text(device.board or NOTHING)),
            *(
                (", ".join(map(cell_of, device.models)) or NOTHING for cell_of in (model_cell, health_cell))
                if serves
                else ()
            ),
            *(cell(device, column) for column in COLUMNS),
            *(throttle_cell(device), "/".join(cell(device, column) for column in LINK), cell(device, FREE)),
            *(cell(device, column) for column in more),
            task_cost_cell(device, "compute_s", "upload_s"),
            task_cost_cell(device, "compute_joules", "upload_joules"),
            NOTHING if device.age_s is None else duration(device.age_s),
        )
        for device in devices
    ]
    offline = [number for number, device in enumerate(devices) if device.online is False]
    lacks_link = any(column.reading not in device.readings for device in devices if device.readings for column in LINK)
    legend = LEGEND + LINK_LEGEND * lacks_link
    return TextTable(columns, rows, "Devices", legend, styles=dict.fromkeys(offline, "dim"))


def model_cell(status: ModelStatus) -> str:
    """Return the served version of a model, and the state of another offered version."""
    served = f"{status.name}/{status.committed}" if status.committed else f"{status.name}: none"
    is_settled = status.state in ("", "committed", "superseded")
    return short_text(served if is_settled else f"{served}, {status.candidate} {status.state}")


def health_cell(status: ModelStatus) -> str:
    """Return the health of a served model: 95th percentile of latency in milliseconds, and error rate."""
    p95_s, requests = status.figures.get("p95_s"), status.figures.get("requests", 0.0)
    if p95_s is None or not requests > 0:
        return NOTHING
    return f"{1e3 * p95_s:.3g}/{status.figures.get('errors', 0.0) / requests:.1%}"


def model_lines(device: Device) -> list[str]:
    """Return one line per served model: version, previous version, figures, and the reason of a rejection."""
    lines = []
    for status in device.models:
        before = f", {status.previous} before" if status.previous else ""
        figures = "".join(f", {name} {value:.4g}" for name, value in sorted(status.figures.items()))
        reason = f": {status.reason}" if status.reason else ""
        lines.append(short_text(f"model {model_cell(status)}{before}{figures}{reason}"))
    return lines


def throttle_cell(device: Device) -> str:
    """Return the throttling state: now, since boot, or by undervoltage."""
    now, since = (device.readings.get(f"throttle.{name}_flag") for name in ("now", "since_boot"))
    volts = device.readings.get("throttle.undervoltage_flag")
    if volts is not None and volts.value:
        return f"volts{MARKS[volts.quality]}"
    if now is None:
        return absence_cell(device, "throttle.now_flag")
    state = "yes" if now.value else "was" if since is not None and since.value else "no"
    return f"{state}{MARKS[now.quality]}"


def task_cost_cell(device: Device, *names: str) -> str:
    """Return figures of the last task's cost, such as compute and upload."""
    cost = device.spent.cost if device.spent else Cost()
    return "/".join(cost_cell(cost, name) for name in names)


def cost_cell(cost: Cost, name: str) -> str:
    """Return a figure of a cost with its quality mark."""
    value, provenance = getattr(cost, name), cost.provenance.get(name)
    return NOTHING if value is None else f"{value:.3g}{MARKS[provenance.quality] if provenance else ''}"


def readings_table(device: Device) -> TextTable:
    """Return a table of all readings of a device, in the units of `probe`."""
    columns = (
        *(TextColumn("reading", least=24), TextColumn("value", right=True), TextColumn("±", right=True)),
        *(TextColumn("quality"), TextColumn("source", least=12), TextColumn("age", right=True)),
    )
    rows = []
    for name, reading in sorted(device.readings.items()):
        spread = NOTHING if reading.uncertainty is None else format_figure(name, reading.uncertainty, reading.unit)
        age = duration(max(0.0, (device.at or 0.0) - reading.at))
        cells = short_text(name), format_figure(name, reading.value, reading.unit), spread
        rows.append((*cells, reading.quality, short_text(reading.source), age))
    return TextTable(columns, rows, f"Readings of {device.device}")


def absences_table(device: Device) -> TextTable:
    """Return a table of the readings that a device could not measure, with the reasons."""
    rows = []
    for name, absence in sorted(device.absent.items()):
        reason = ": ".join(part for part in (absence.lack.replace("_", " "), absence.cause) if part)
        rows.append((short_text(f"{NOTHING} {name}"), short_text(reason)))
    return TextTable((TextColumn(), TextColumn(least=24)), rows)


def plot_readings(
    name: str, readings: Sequence[tuple[float, Reading]], since_utc_s: float, until_utc_s: float
) -> list[str]:
    """Return a text plot of a reading over time; intervals without reports are blank.

    Args:
        readings: Pairs of server time in seconds and reading.
        since_utc_s: Left end of the time axis.
    """
    values = [(at, reading.value) for at, reading in readings if since_utc_s <= at <= until_utc_s]
    if not values:
        return [f"{name}: nothing was kept in the last {duration(until_utc_s - since_utc_s)}"]
    least, most = min(value for _, value in values), max(value for _, value in values)
    figures = [format_figure(name, value, readings[-1][1].unit) for value in (least, most, values[-1][1])]
    bars = sparkline(values, since_utc_s, until_utc_s)
    return [
        f"{name}, last {duration(until_utc_s - since_utc_s)}: {len(values)} reports",
        f"|{bars}|",
        f"least {figures[0]}, most {figures[1]}, last {figures[2]}",
    ]


def sparkline(values: Sequence[tuple[float, float]], since: float, until: float, width: int = 60) -> str:
    """Return one bar for the mean of each of `width` equal intervals, scaled from the least to the most.

    Args:
        values: Pairs of time in seconds and value.
        since: Left end, in seconds.
        until: Right end, in seconds.
    """
    bins: list[list[float]] = [[] for _ in range(width)]
    for at, value in values:
        bins[min(width - 1, int((at - since) / (until - since) * width))].append(value)
    means = [math.fsum(values) / len(values) if values else None for values in bins]
    present = [mean for mean in means if mean is not None]
    least, span = min(present), max(present) - min(present)
    return "".join(" " if mean is None else BARS[_level(mean, least, span)] for mean in means)


def _level(mean: float, least: float, span: float) -> int:
    return min(len(BARS) - 1, int((mean - least) / span * len(BARS))) if span > 0 else 0


def duration(seconds: float) -> str:
    """Return a duration in a suitable unit."""
    unit = choose_unit(seconds, SECONDS, between=("d", "s"))
    return f"{seconds / unit.size:.0f} {unit.name}"


def _online_cell(device: Device) -> str:
    return NOTHING if device.online is None else "yes" if device.online else "no"


def short_text(text: str) -> str:
    """Return a device's text without control characters, cut at `MAX_TEXT`."""
    return printable_text(text[:MAX_TEXT])
