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
    """The x axis shared by the charts of a column.

    Attributes:
        kind: An element of `AXES`.
        ticks: Round values that enclose all rounds of all runs.
    """

    kind: str
    name: str
    size: float
    ticks: Sequence[float]


def progress(runs: Sequence[Digest]) -> Markup:
    """Return a row of charts per metric, one per axis; metrics that no run knows are omitted."""
    axes = [axis for kind in AXES if (axis := _lower_axis(runs, kind))]
    rows, missing = list[list[Chart]](), []
    for title, height in _heights(runs).items():
        if _values(runs, height):
            rows.append([_chart(runs, title, height, axis) for axis in axes])
        else:
            missing.append(title)
    unknown = [kind for kind in AXES if kind not in {axis.kind for axis in axes}] if axes else []
    texts = [f"no run knows its {kind}" for kind in unknown] + [f"{title}: not evaluated" for title in missing]
    return render("progress.html", rows=rows, missing="; ".join(texts))


def _heights(runs: Sequence[Digest]) -> dict[str, Height]:
    titles = dict(TITLES)
    if any(run.personal for run in runs):
        titles[""] = PERSONAL_TITLE if all(run.personal for run in runs) else MIXED_TITLE
    is_share = common_metric(runs) == ACCURACY
    fleets = [scope for scope in known_fleet_scopes(runs) if any(_points(run, scope) > 1 for run in runs)]
    scopes: list[Scope] = ["", *fleets]
    unit, scale = (", %", 100.0) if is_share else ("", 1.0)
    heights: dict[str, Height] = {
        titles[scope].format(metric=metric_name(runs), unit=unit): partial(_read_metric, scope, scale)
        for scope in scopes
    }
    rounds = [round_ for run in runs for round_ in run.rounds]
    for name in sorted({name for round_ in rounds for name in round_.metrics or ()}):
        heights[f"{name} on test data"] = partial(_read_entry, "metrics", name)
    heights |= {"loss on test data": attrgetter("test_loss"), "training loss": attrgetter("loss")}
    for name in sorted({name for round_ in rounds for name in round_.terms}):
        heights[name.replace("_", " ")] = partial(_read_entry, "terms", name)
    return heights


def _read_metric(scope: Scope, scale: float, round_: RoundDigest) -> float | None:
    value = round_.metric_value(scope)
    return None if value is None else scale * value


def _read_entry(field: str, name: str, round_: RoundDigest) -> float | None:
    entries: dict[str, float] = getattr(round_, field) or {}
    return entries.get(name)


def _points(run: Digest, scope: Scope) -> int:
    return sum(round_.metric_value(scope) is not None for round_ in run.rounds)


def _values(runs: Sequence[Digest], height: Height) -> list[float]:
    heights = (height(round_) for run in runs for round_ in run.rounds)
    return [value for value in heights if value is not None and is_plausible("amount", value)]


def _across(round_: RoundDigest, kind: str) -> Amount:
    """Return a round's coordinate on an x axis."""
    return Amount(value=float(round_.round)) if kind == "rounds" else getattr(round_.until, kind)


def _lower_axis(runs: Sequence[Digest], kind: str) -> LowerAxis | None:
    """Return the axis of all rounds, marked as a lower bound unless every amount is fully known.

    None if no run knows their coordinates.
    """
    amounts = [_across(round_, kind) for run in runs for round_ in run.rounds]
    known_amounts = [(amount, amount.value) for amount in amounts if amount.value is not None]
    if not known_amounts:
        return None
    most = max(value for _, value in known_amounts)
    if kind == "rounds":
        return LowerAxis(kind, "round", 1.0, whole_ticks(int(most)))
    unit, size = formatting.unit_of(most, kind)
    names = {"seconds": seconds_label(runs).replace("seconds", "time"), "joules": "energy of all devices"}
    least = "" if all(amount.whole for amount, _ in known_amounts) else ", at least"
    name = f"{names.get(kind, 'frames up and down')}, {unit}{least}"
    return LowerAxis(kind, name, size, ticks(0.0, most / size))


def _chart(runs: Sequence[Digest], title: str, height: Height, axis: LowerAxis) -> Chart:
    curves = [
        ChartLine(name, colour, _curve(run, height, axis))
        for colour, (name, run) in enumerate(zip(run_names(runs), runs, strict=True))
    ]
    return chart(title, axis.name, axis.ticks, upright_ticks(_values(runs, height)), curves)


def _curve(run: Digest, height: Height, axis: LowerAxis) -> list[Point]:
    points = []
    for round_ in run.rounds:
        amount, value = _across(round_, axis.kind), height(round_)
        if amount.value is not None and value is not None and is_plausible("amount", value):
            place = "" if axis.kind == "rounds" else formatting.format_amount(amount, axis.kind)
            points.append(Point(amount.value / axis.size, value, f"round {round_.round}: {value:.4g}; {place}"))
    return points
