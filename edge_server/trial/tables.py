"""Runs and rounds as tables, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from edge_server.store.base import AnyRecord, Evaluated, closed_rounds
from edge_server.trial.runs import Summary

MAX_DEVICE_COLUMNS = 6


def rounds_table(records: Sequence[AnyRecord]) -> Table:
    """Return one row a round; bytes are of frames, per device where they fit the width, else in all."""
    closed = closed_rounds(records)
    devices = sorted({device for record in closed for device in (*record.bytes_up, *record.bytes_down)})
    most = max((sum(sizes.values()) for record in closed for sizes in (record.bytes_up, record.bytes_down)), default=0)
    unit, scale = unit_of(most)
    table = Table(
        title="Rounds", caption=f"a device's column: {unit} of frames down/up", caption_justify="left", box=None
    )
    table.padding = (0, 1, 0, 0)
    for heading in ("round", "updates", "accuracy", "loss", "seconds"):
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
            *(str(record.round), updates, figure(record.accuracy), figure(record.loss), f"{record.seconds:.2f}"), *moved
        )
    return table


def device_lines(records: Sequence[AnyRecord]) -> list[str]:
    """Return what the devices measured of the final model, if they did."""
    found = [record for record in records if isinstance(record, Evaluated)]
    if not found:
        return []
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
