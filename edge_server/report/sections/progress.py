"""Report section: accuracy, or other metrics, and loss against rounds, seconds, joules and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeAlias

from markupsafe import Markup

from edge_server.journal.compared_metric import ACCURACY
from edge_server.record.amounts import Amount
from edge_server.report import formatting
from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.charts import Chart, ChartLine, Point, chart, upright_ticks
from edge_server.report.digest import Digest, RoundDigest, Scope, common_metric, known_fleet_scopes, metric_name
from edge_server.report.html import render
from edge_server.report.tables import run_names, seconds_label
from shared.protocol.plausible import is_plausible

AXES = ("rounds", "seconds", "joules", "bytes")
Height: TypeAlias = Callable[[RoundDigest], float | None]

TITLES: Mapping[Scope, str] = {
    "": "{metric} on test data{unit}",
    "global": "{metric} of the aggregated model on test data{unit}",
    "fleet": "{metric} on the data of all devices{unit}",
}
"""Titles of the charts of the compared metric by scope; accuracies are drawn in percent."""

PERSONAL_TITLE = "{metric} on the devices' own data{unit}, each with its own model"
MIXED_TITLE = "{metric}{unit}, of each run as its summary says"


@dataclass(frozen=True)
class LowerAxis:
    """The x axis, an element of `AXES`, shared by the charts of a column; its ticks enclose all rounds of all runs."""

    kind: str
    name: str
    size: float
    ticks: Sequence[float]


def progress(runs: Sequence[Digest]) -> Markup:
    """Return a row of charts per metric, one per axis; metrics that no run knows are omitted."""
    axes = [axis for kind in AXES if (axis := _lower_axis(runs, kind))]
    rows, missing = list[list[Chart]](), []
    for title, height in _heights(runs).items():
        values = [value for run in runs for round_ in run.rounds if (value := height(round_)) is not None]
        if values:
            rows.append([_chart(runs, title, height, axis, upright_ticks(values)) for axis in axes])
        else:
            missing.append(title)
    unknown = [kind for kind in AXES if kind not in {axis.kind for axis in axes}] if axes else []
    texts = [f"no run knows its {kind}" for kind in unknown] + [f"{title}: not evaluated" for title in missing]
    return render("progress.html", rows=rows, missing="; ".join(texts))


def _heights(runs: Sequence[Digest]) -> dict[str, Height]:
    """Return the getter of each chart's plausible values by title."""
    titles = dict(TITLES)
    if any(run.personal for run in runs):
        titles[""] = PERSONAL_TITLE if all(run.personal for run in runs) else MIXED_TITLE
    unit, scale = (", %", 100.0) if common_metric(runs) == ACCURACY else ("", 1.0)
    rounds = [round_ for run in runs for round_ in run.rounds]
    scopes: list[Scope] = [""]
    scopes += [scope for scope in known_fleet_scopes(runs) if any(_points(run, scope) > 1 for run in runs)]
    heights: dict[str, Height] = {
        titles[scope].format(metric=metric_name(runs), unit=unit): partial(_scale_metric, scope, scale)
        for scope in scopes
    }
    for name in sorted({name for round_ in rounds for name in round_.metrics or ()}):
        heights[f"{name} on test data"] = partial(_read_entry, "metrics", name)
    heights |= {"loss on test data": attrgetter("test_loss"), "training loss": attrgetter("loss")}
    for name in sorted({name for round_ in rounds for name in round_.terms}):
        heights[name.replace("_", " ")] = partial(_read_entry, "terms", name)
    return {title: partial(_plausible, height) for title, height in heights.items()}


def _plausible(height: Height, round_: RoundDigest) -> float | None:
    value = height(round_)
    return value if is_plausible("amount", value) else None


def _scale_metric(scope: Scope, scale: float, round_: RoundDigest) -> float | None:
    value = round_.metric_value(scope)
    return None if value is None else scale * value


def _read_entry(field: str, name: str, round_: RoundDigest) -> float | None:
    entries: dict[str, float] = getattr(round_, field) or {}
    return entries.get(name)


def _points(run: Digest, scope: Scope) -> int:
    return sum(round_.metric_value(scope) is not None for round_ in run.rounds)


def _across(round_: RoundDigest, kind: str) -> Amount:
    """Return a round's coordinate on an x axis."""
    return Amount(value=float(round_.round)) if kind == "rounds" else getattr(round_.until, kind)


def _lower_axis(runs: Sequence[Digest], kind: str) -> LowerAxis | None:
    """Return the axis of all rounds, marked as a lower bound unless every amount is fully known.

    None if no run knows their coordinates.
    """
    amounts = [amount for run in runs for round_ in run.rounds if (amount := _across(round_, kind)).value is not None]
    if not amounts:
        return None
    most = max(amount.value or 0.0 for amount in amounts)
    if kind == "rounds":
        return LowerAxis(kind, "round", 1.0, whole_ticks(int(most)))
    unit, size = formatting.unit_of(most, kind)
    names = {"seconds": seconds_label(runs).replace("seconds", "time"), "joules": "energy of all devices"}
    least = "" if all(amount.whole for amount in amounts) else ", at least"
    name = f"{names.get(kind, 'frames up and down')}, {unit}{least}"
    return LowerAxis(kind, name, size, ticks(0.0, most / size))


def _chart(runs: Sequence[Digest], title: str, height: Height, axis: LowerAxis, y_ticks: Sequence[float]) -> Chart:
    curves = []
    for colour, (name, run) in enumerate(zip(run_names(runs), runs, strict=True)):
        points = []
        for round_ in run.rounds:
            amount, value = _across(round_, axis.kind), height(round_)
            if amount.value is not None and value is not None:
                place = "" if axis.kind == "rounds" else formatting.format_amount(amount, axis.kind)
                points.append(Point(amount.value / axis.size, value, f"round {round_.round}: {value:.4g}; {place}"))
        curves.append(ChartLine(name, colour, points))
    return chart(title, axis.name, axis.ticks, y_ticks, curves)
