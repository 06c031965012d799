"""Report section: time and energy by device, with quantiles over tasks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter

from markupsafe import Markup

from edge_server.record.amounts import Amount, quantile, worst_quality
from edge_server.report.charts import Slice
from edge_server.report.digest import DeviceDigest, Digest
from edge_server.report.formatting import NOTHING, bytes_label, format_amount, format_metric, format_share
from edge_server.report.html import macro, render
from edge_server.report.summarise import PARTS, TASK_AMOUNTS, sum_joules
from edge_server.report.tables import table
from shared.protocol.measurements import Quality

MOST_BARS = 120
"""Devices beyond which only quantiles are shown."""

QUANTILES = {"least": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "most": 1.0}
PART_LABELS = {
    "exchange": "exchanging features and gradients",
    "statistics": "measuring running statistics",
    "waiting": "waiting for the others",
}
READING_HEADINGS: Mapping[str, str] = {
    "gpu.load_ratio": "highest GPU load",
    "gpu.hottest_celsius": "hottest GPU",
    "gpu.rail_watts": "highest GPU rail power",
    "memory.swap_used_bytes": "highest swap use",
}
"""Column headings of the highest readings; a column appears if some device has a value above zero."""


def activities(run: Digest) -> list[str]:
    """Return the activities of a run: exchange and statistics only if it has them."""
    measured = ["statistics"] if "statistics_bytes" in run.traffic else []
    return [part for part in PARTS if part != "exchange" or run.split] + measured


def time_and_energy(run: Digest) -> Markup:
    """Return a run's time and energy by device."""
    if not run.devices:
        return Markup("<p>No round has ended yet.</p>")
    rows, absent = _quantile_rows(run)
    is_small = len(run.devices) <= MOST_BARS
    return render(
        "time_energy.html",
        clock=run.clock,
        keys=[(part, PART_LABELS.get(part, part)) for part in activities(run)],
        bars=_bars(run) if is_small else None,
        devices=_device_table(run) if is_small else None,
        quantiles=table(["per task", "known for", *QUANTILES], rows) if rows else "",
        absent="; ".join(absent),
        count=len(run.devices),
    )


def _quantile_rows(run: Digest) -> tuple[list[list[str]], list[str]]:
    """Return the distribution over tasks of each known amount, and the names of those that no task knows."""
    names = activities(run)
    figures = {f"{part}, {run.clock} time": f"seconds.{part}" for part in (*names, "waiting")}
    figures |= {f"{part}, energy": f"joules.{part}" for part in names}
    figures |= {"energy above idle": "joules.above_idle"} | {_frames(name, run): name for name in run.traffic}
    known_values = {name: array("d") for name in figures.values()}
    qualities: dict[str, set[Quality | None]] = {name: set() for name in figures.values()}
    for task in run.tasks:
        for name, values_of_name in known_values.items():
            amount = TASK_AMOUNTS[name](task)
            if amount.value is not None and amount.whole:
                values_of_name.append(amount.value)
                qualities[name].add(amount.quality)
    rows, absent = list[list[str]](), []
    for label, name in figures.items():
        values, quality = sorted(known_values[name]), worst_quality(qualities[name])
        if not values:
            absent.append(label)
            continue
        kind = name.partition(".")[0] if "." in name else "bytes"
        spread = (Amount(value=quantile(values, share), quality=quality) for share in QUANTILES.values())
        rows.append([label, f"{len(values)} of {len(run.tasks)}", *(format_amount(amount, kind) for amount in spread)])
    return rows, absent


def _frames(name: str, run: Digest) -> str:
    return bytes_label(name, split=run.split).replace("bytes", "frames")


def _bars(run: Digest) -> dict[str, list[list[str]]]:
    """Return rows of bars of the time, and of the energy if any device measured it."""
    slices = {device.device: _time_slices(device, activities(run)) for device in run.devices}
    most_s = max(sum(part.size for part in parts) for parts in slices.values())  # a late task outlives its round
    joules = {device.device: sum_joules(device) for device in run.devices}
    most_j = max((amount.value or 0.0 for amount in joules.values()), default=0.0)
    time, energy = list[list[str]](), list[list[str]]()
    for device in run.devices:
        total = format_amount(Amount(value=device.rounds_s), "seconds")
        time.append([device.device, macro("bar")(slices[device.device], most_s), total])
        parts = [_slice(device, "joules", part) for part in activities(run)]
        energy.append([device.device, macro("bar")(parts, most_j), format_amount(joules[device.device], "joules")])
    return {"time": time, "energy": energy if most_j else []}


def _time_slices(device: DeviceDigest, names: Sequence[str]) -> list[Slice]:
    parts = (*names, "waiting")
    slices = [_slice(device, "seconds", part) for part in parts]
    if all(getattr(device.seconds, part).whole for part in parts):
        return slices
    unknown_s = max(0.0, device.rounds_s - sum(part.size for part in slices))
    title = f"{device.device}: {format_amount(Amount(value=unknown_s), 'seconds')} not attributed"
    return [*slices, Slice("unknown", unknown_s, title)]


def _slice(device: DeviceDigest, kind: str, part: str) -> Slice:
    amount: Amount = attrgetter(f"{kind}.{part}")(device)
    return Slice(part, amount.value or 0.0, f"{device.device}: {part} {format_amount(amount, kind)}")


def _highest_reading(device: DeviceDigest, name: str) -> str:
    value = device.most.get(name)
    if value is None:
        return NOTHING
    if name.endswith("_ratio"):
        return format_share(value)
    if name.endswith("_bytes"):
        return format_amount(Amount(value=value, quality="measured"), "bytes")
    return f"{value:.3g} {'°C' if name.endswith('_celsius') else 'W'}"


def _device_table(run: Digest) -> Markup:
    """Return a row per device; columns that are unknown for all devices are left out."""
    columns: dict[str, list[str]] = {"device": [device.device for device in run.devices]}
    columns["board"] = [device.board or NOTHING for device in run.devices]
    for name in ("went_away", "selected", "arrived", "late", "failed"):
        columns[name.replace("_", " ")] = [str(getattr(device, name)) for device in run.devices]
    names = activities(run)
    amounts = {f"{part} time": ("seconds", f"seconds.{part}") for part in (*names, "waiting")}
    amounts |= {f"{part} energy": ("joules", f"joules.{part}") for part in names} | {"total energy": ("joules", "")}
    amounts |= {"above idle": ("joules", "joules.above_idle")}
    amounts |= {_frames(name, run): ("bytes", name) for name in run.traffic}
    for heading, (kind, name) in amounts.items():
        read_amount = attrgetter(name) if name else sum_joules
        columns[heading] = [format_amount(read_amount(device), kind) for device in run.devices]
    columns[run.metric.name] = [format_metric(device.metric_value(), run.metric) for device in run.devices]
    for name, heading in READING_HEADINGS.items():
        if any(device.most.get(name) for device in run.devices):
            columns[heading] = [_highest_reading(device, name) for device in run.devices]
    visible = {head: cells for head, cells in columns.items() if head == "device" or {*cells} != {NOTHING}}
    return table(list(visible), list(zip(*visible.values(), strict=True)))
