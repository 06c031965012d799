"""Tables of a study's summary, for terminals and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import msgspec

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import NONE
from edge_server.replay.study.summary import CellRow, CostSpread, Group, SeedSpread, StudySummary, is_complete
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
    has_exchange = any(group.whole.exchanged.count for group in summary.groups)
    kinds = [kind for kind in KINDS if kind != "exchanged" or has_exchange]
    name, headings = _metric_name(summary.groups), [KINDS[kind] for kind in kinds]
    totals, until = list[list[str]](), list[list[str]]()
    for group in summary.groups:
        figures = [_metric(spread, group) for spread in (group.accuracy, group.best)]
        totals.append([group.setting, f"{group.ended}/{group.cells}", *figures, *_costs(group.whole, kinds)])
        until.append([group.setting, f"{group.reached}/{group.ended}", *_costs(group.target, kinds)])
    caption = f"mean \N{PLUS-MINUS SIGN} standard deviation over seeds. {LEGEND}"
    overview = TextTable(_columns(["runs", name, "best", *headings]), totals, f"Study {summary.study}", caption)
    if summary.target is None:
        return [overview]
    target = f"{100 * summary.target:g} %" if name == ACCURACY.name else f"{summary.target:g}"
    return [overview, TextTable(_columns(["reached", *headings]), until, f"Until {name} {target}")]


def _columns(headings: Sequence[str]) -> list[TextColumn]:
    return [TextColumn("setting", least=24), *(TextColumn(heading, right=True) for heading in headings)]


def _costs(costs: CostSpread | None, kinds: Sequence[str]) -> list[str]:
    return [_figure(getattr(costs, kind), UNITS.get(kind, kind)) if costs else NOTHING for kind in kinds]


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
    metric, lines = _metric_name(rows), list[dict[str, object]]()
    for row in rows:
        line: dict[str, object] = {"cell": row.cell, "setting": row.setting, "variant": row.variant}
        line |= _settings(row.settings | row.seeds)
        line |= {"state": row.state, "cause": row.cause, metric: row.metric_value(), "best": row.best}
        for prefix, cost in (("", row.whole), ("target_", row.target)):
            amounts = {f"{prefix}{kind}": getattr(cost, kind, NONE) for kind in KINDS}
            line |= {name: amount.value for name, amount in amounts.items()}
            line |= {f"{name}_whole": None if part.value is None else part.whole for name, part in amounts.items()}
        lines.append(line)
    return _csv(lines)


def groups_csv(groups: Sequence[Group]) -> str:
    """Return one line per setting in SI units, with means and sample standard deviations."""
    metric, lines = _metric_name(groups), list[dict[str, object]]()
    for group in groups:
        line: dict[str, object] = {"setting": group.setting, "variant": group.variant, **_settings(group.settings)}
        line |= {"cells": group.cells, "ended": group.ended, "reached": group.reached}
        spreads: dict[str, SeedSpread | None] = {metric: group.accuracy, "best": group.best}
        spreads |= {kind: getattr(group.whole, kind) for kind in KINDS}
        spreads |= {f"target_{kind}": getattr(group.target, kind, None) for kind in KINDS}
        for name, spread in spreads.items():
            line |= {f"{name}_mean": spread and spread.mean.value, f"{name}_std": spread and spread.std}
        lines.append(line)
    return _csv(lines)


def _metric_name(rows: Sequence[CellRow] | Sequence[Group]) -> str:
    """Return the metric of all that have a model; a failed cell does not know its own."""
    with_model = [row for row in rows if (row.ended if isinstance(row, Group) else is_complete(row))]
    names = {row.metric or ACCURACY.name for row in with_model} or {ACCURACY.name}
    return names.pop() if len(names) == 1 else "metric"


def _settings(values: Mapping[str, object]) -> dict[str, object]:
    scalars = (bool, int, float, str)
    return {
        k: value if isinstance(value, scalars) else msgspec.json.encode(value).decode() for k, value in values.items()
    }


def _csv(rows: Sequence[dict[str, object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0] if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
