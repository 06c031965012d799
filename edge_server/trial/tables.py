"""Runs and rounds as tables, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from edge_server.costs import by_round
from edge_server.devices.tables import MARKS
from edge_server.store.base import AnyRecord, Evaluated, closed_rounds
from edge_server.trial.runs import Summary
from shared.measures import Cost

MAX_DEVICE_COLUMNS = 6
JOULES = {"download_joules", "compute_joules", "upload_joules"}
CAPTION = (
    "slowest: seconds to compute/upload; joules: ~ corrected, ≈ modelled, ≥ not all are known\n"
    "a device's column: {unit} of frames down/up"
)


def rounds_table(records: Sequence[AnyRecord]) -> Table:
    """Return one row a round; bytes are of frames, per device where they fit the width, else in all."""
    closed, costs = closed_rounds(records), by_round(records)
    devices = sorted({device for record in closed for device in (*record.bytes_up, *record.bytes_down)})
    most = max((sum(sizes.values()) for record in closed for sizes in (record.bytes_up, record.bytes_down)), default=0)
    unit, scale = unit_of(most)
    table = Table(title="Rounds", caption=CAPTION.format(unit=unit), caption_justify="left", box=None)
    table.padding = (0, 1, 0, 0)
    for heading in ("round", "updates", "accuracy", "loss", "seconds", "slowest", "joules"):
        table.add_column(heading, justify="right")
    columns: list[list[str]] = [[device] for device in devices]
    if len(devices) > MAX_DEVICE_COLUMNS:
        columns = [devices]
    for column in columns:
        table.add_column(column[0] if len(column) == 1 else "all devices", justify="right", no_wrap=True)
    for record in closed:
        moved = [
            f"{sum(record.bytes_down.get(d, 0) for d in column) / scale:.1f}/"
            f"{sum(record.bytes_up.get(d, 0) for d in column) / scale:.1f}"
            for column in columns
        ]
        updates = str(len(record.arrived)) if record.outcome == "aggregated" else f"{len(record.arrived)} (missed)"
        table.add_row(
            *(str(record.round), updates, figure(record.accuracy), figure(record.loss), f"{record.seconds:.2f}"),
            *(slowest(costs.get(record.round, {})), total_joules(costs.get(record.round, {}))),
            *moved,
        )
    return table


def slowest(costs: Mapping[str, Cost]) -> str:
    """Return the longest computation and the longest upload of a round's devices, of those that are known."""
    known = ([getattr(cost, name) for cost in costs.values()] for name in ("compute_s", "upload_s"))
    most = (max((one for one in found if one is not None), default=None) for found in known)
    return "/".join("-" if one is None else f"{one:.2f}" for one in most)


def total_joules(costs: Mapping[str, Cost]) -> str:
    """Return what a round's devices spent in all; at least that, where a part of it is not known."""
    parts = [getattr(cost, name) for cost in costs.values() for name in JOULES]
    known = [one for one in parts if one is not None]
    marks = {
        MARKS[cost.provenance[name].quality] for cost in costs.values() for name in JOULES & cost.provenance.keys()
    }
    worst = max(marks, key=list(MARKS.values()).index, default="")
    return f"{'≥' * (len(known) < len(parts))}{math.fsum(known):.3g}{worst}" if known else "-"


def device_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return what the devices measured of the final model, if they did."""
    found = [record for record in records if isinstance(record, Evaluated)]
    if not found:
        return []
    if not found[-1].by_device:
        return ["on the devices' held-out examples: unknown, no device answered in time; look at their links and logs"]
    by_device = ", ".join(
        f"{device} {figure(metrics.get('eval_accuracy'))}" for device, metrics in found[-1].by_device.items()
    )
    return [f"on the devices' held-out examples: {figure(found[-1].accuracy)} ({by_device})"]


def runs_table(summaries: Sequence[Summary]) -> Table:
    """Return one row a run."""
    table = Table(title="Runs")
    for heading in ("run", "algorithm", "rounds", "accuracy", "outcome", "started"):
        table.add_column(heading, overflow="fold")  # a name that is cut cannot be given to `show`
    for one in summaries:
        table.add_row(
            *(one.run, one.algorithm, f"{one.rounds}/{one.of}", figure(one.accuracy), one.outcome, one.started)
        )
    return table


def figure(value: float | None) -> str:
    """Return a figure with four decimals; a dash where nobody measured it."""
    return "-" if value is None else f"{value:.4f}"


def unit_of(count: int) -> tuple[str, float]:
    """Return the unit that fits a number of bytes, and how many bytes it is."""
    return next(((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6)) if count >= scale), ("kB", 1e3))
