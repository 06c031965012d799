"""Tables of a study's summary, for terminals and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import Amount
from edge_server.replay.study.summary import CellRow, CostSpread, Group, SeedSpread, StudySummary
from edge_server.report.formatting import LEGEND, NOTHING, format_amount, format_number, unit_of
from shared.runtime.text_table import TextColumn, TextTable

KINDS: Mapping[str, str] = {
    "rounds": "rounds",
    "seconds": "time",
    "joules": "energy",
    "bytes": "traffic",
    "exchanged": "of it features, gradients",
}
"""Headings by kind of cost; `exchanged` is shown only for split training."""

UNITS = {"exchanged": "bytes"}


def tables(summary: StudySummary) -> list[TextTable]:
    """Return a table with one row per setting, and one about reaching the target, if there is a target."""
    kinds = [
        kind for kind in KINDS if kind != "exchanged" or any(group.whole.exchanged.count for group in summary.groups)
    ]
    headings = [KINDS[kind] for kind in kinds]
    totals = [
        (
            *(
                group.setting,
                f"{group.ended}/{group.cells}",
                _metric(group.accuracy, group),
                _metric(group.best, group),
            ),
            *_outlay(group.whole, kinds),
        )
        for group in summary.groups
    ]
    caption = f"mean \N{PLUS-MINUS SIGN} standard deviation over seeds. {LEGEND}"
    names = {group.metric or ACCURACY.name for group in summary.groups}
    name = names.pop() if len(names) == 1 else "metric"
    columns = _columns(["runs", name, "best", *headings])
    overview = TextTable(columns, totals, f"Study {summary.study}", caption)
    if summary.target is None:
        return [overview]
    until = [
        (group.setting, f"{group.reached}/{group.ended}", *_outlay(group.target, kinds)) for group in summary.groups
    ]
    target = f"{100 * summary.target:g} %" if name == ACCURACY.name else f"{summary.target:g}"
    return [overview, TextTable(_columns(["reached", *headings]), until, f"Until {name} {target}")]


def _columns(headings: Sequence[str]) -> list[TextColumn]:
    return [TextColumn("setting", least=24), *(TextColumn(heading, right=True) for heading in headings)]


def _outlay(outlay: CostSpread | None, kinds: Sequence[str]) -> list[str]:
    return [_figure(getattr(outlay, kind), UNITS.get(kind, kind)) if outlay else NOTHING for kind in kinds]


def _figure(spread: SeedSpread, kind: str) -> str:
    """Format the mean and, if runs differ, the deviation in the mean's unit."""
    if spread.mean.value is None or not spread.std:
        return format_amount(spread.mean, kind)
    _, size = unit_of(abs(spread.mean.value), kind)
    number = format_number(spread.mean.value / size)
    with_std = f"{number} \N{PLUS-MINUS SIGN} {format_number(spread.std / size)}"
    return format_amount(spread.mean, kind).replace(number, with_std, 1)


def _metric(spread: SeedSpread, group: Group) -> str:
    """Format an accuracy in percent, or another metric with four digits."""
    if spread.mean.value is None:
        return NOTHING
    is_share = group.metric is msgspec.UNSET
    scale, digits, std_digits, unit = (100.0, ".2f", ".2f", " %") if is_share else (1.0, ".4g", ".2g", "")
    deviation = "" if spread.std is None else f" \N{PLUS-MINUS SIGN} {scale * spread.std:{std_digits}}"
    return f"{scale * spread.mean.value:{digits}}{deviation}{unit}"


def cells_csv(rows: Sequence[CellRow]) -> str:
    """Return one line per cell in SI units; a column `_whole` is false for amounts with unknown parts."""
    metric = _metric_column(rows)
    return _csv(
        {"cell": row.cell, "setting": row.setting, "variant": row.variant}
        | _settings(row.settings)
        | _settings(row.seeds)
        | {"state": row.state, "cause": row.cause, metric: row.metric_value(), "best": row.best}
        | _amounts("", {kind: getattr(row.whole, kind) for kind in KINDS})
        | _amounts("target_", {kind: getattr(row.target, kind, Amount()) for kind in KINDS})
        for row in rows
    )


def groups_csv(groups: Sequence[Group]) -> str:
    """Return one line per setting in SI units, with means and sample standard deviations."""
    metric = _metric_column(groups)
    return _csv(
        {"setting": group.setting, "variant": group.variant}
        | _settings(group.settings)
        | {"cells": group.cells, "ended": group.ended, "reached": group.reached}
        | _spreads("", {metric: group.accuracy, "best": group.best})
        | _spreads("", {kind: getattr(group.whole, kind) for kind in KINDS})
        | _spreads("target_", {kind: getattr(group.target, kind, None) for kind in KINDS})
        for group in groups
    )


def _metric_column(rows: Sequence[CellRow] | Sequence[Group]) -> str:
    """Return the metric of all that have a model; a failed cell does not know it."""
    return next((row.metric for row in rows if row.metric), ACCURACY.name)


def _settings(values: Mapping[str, object]) -> dict[str, object]:
    scalars = (bool, int, float, str)
    return {
        k: value if isinstance(value, scalars) else msgspec.json.encode(value).decode() for k, value in values.items()
    }


def _amounts(prefix: str, amounts: Mapping[str, Amount]) -> dict[str, object]:
    named = [(f"{prefix}{kind}", value) for kind, value in amounts.items()]
    completeness = {f"{name}_whole": None if value.value is None else value.whole for name, value in named}
    return {**{name: value.value for name, value in named}, **completeness}


def _spreads(prefix: str, spreads: Mapping[str, SeedSpread | None]) -> dict[str, object]:
    row: dict[str, object] = {}
    for kind, spread in spreads.items():
        row[f"{prefix}{kind}_mean"] = spread.mean.value if spread else None
        row[f"{prefix}{kind}_std"] = spread.std if spread else None
    return row


def _csv(lines: Iterable[dict[str, object]]) -> str:
    rows = list(lines)
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()
