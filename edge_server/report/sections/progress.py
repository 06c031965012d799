"""Report section: accuracy, or other metrics, and loss against rounds, seconds, joules and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edge_server.journal.claims import MOST_PLAUSIBLE
from edge_server.journal.compared_metric import ACCURACY
from edge_server.report import formatting
from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.charts import ChartLine, Point, chart
from edge_server.report.digest import (
    Amount,
    Digest,
    RoundDigest,
    Scope,
    common_metric,
    known_fleet_scopes,
    metric_name,
)
from edge_server.report.html import Markup, element, join
from edge_server.report.tables import run_names, seconds_label

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
    heights = _heights(runs)
    available = [(title, of) for title, of in heights if _values(runs, of)]
    rows = [
        element("div", (_chart(runs, title, of, axis) for axis in axes), class_=f"charts metric across{len(axes)}")
        for title, of in available
    ]
    return join([*rows, _note_missing([title for title, of in heights if not _values(runs, of)], axes)])


def _heights(runs: Sequence[Digest]) -> list[tuple[str, Height]]:
    titles = dict(TITLES)
    if any(run.personal for run in runs):
        titles[""] = PERSONAL_TITLE if all(run.personal for run in runs) else MIXED_TITLE
    is_share = common_metric(runs) == ACCURACY
    fleets = [scope for scope in known_fleet_scopes(runs) if any(_points(run, scope) > 1 for run in runs)]
    scopes: list[Scope] = ["", *fleets]
    unit = ", %" if is_share else ""
    curves = [
        (titles[scope].format(metric=metric_name(runs), unit=unit), _metric_height(scope, 100.0 if is_share else 1.0))
        for scope in scopes
    ]
    metrics = sorted({name for run in runs for round_ in run.rounds for name in round_.metrics or ()})
    curves += [(f"{name} on test data", _metric(name)) for name in metrics]
    curves += [("loss on test data", lambda round_: round_.test_loss), ("training loss", lambda round_: round_.loss)]
    terms = sorted({name for run in runs for round_ in run.rounds for name in round_.terms})
    return [*curves, *((name.replace("_", " "), _term(name)) for name in terms)]


def _metric_height(scope: Scope, scale: float) -> Height:
    def height(round_: RoundDigest) -> float | None:
        value = round_.metric_value(scope)
        return None if value is None else scale * value

    return height


def _metric(name: str) -> Height:
    return lambda round_: round_.metrics.get(name) if round_.metrics else None


def _term(name: str) -> Height:
    return lambda round_: round_.terms.get(name)


def _points(run: Digest, scope: Scope) -> int:
    return sum(round_.metric_value(scope) is not None for round_ in run.rounds)


def _note_missing(titles: Sequence[str], axes: Sequence[LowerAxis]) -> Markup:
    unknown = [kind for kind in AXES if kind not in {axis.kind for axis in axes}] if axes else []
    texts = [f"no run knows its {kind}" for kind in unknown] + [f"{title}: not evaluated" for title in titles]
    return element("p", f"Not drawn: {'; '.join(texts)}.", class_="note") if texts else join()


def _values(runs: Sequence[Digest], of: Height) -> list[float]:
    heights = (of(round_) for run in runs for round_ in run.rounds)
    return [value for value in heights if value is not None and abs(value) < MOST_PLAUSIBLE]


def across(round_: RoundDigest, kind: str) -> Amount:
    """Return a round's coordinate on an x axis."""
    return Amount(value=float(round_.round)) if kind == "rounds" else getattr(round_.until, kind)


def _lower_axis(runs: Sequence[Digest], kind: str) -> LowerAxis | None:
    """Return the axis of all rounds; None if no run knows their coordinates."""
    amounts = [across(round_, kind) for run in runs for round_ in run.rounds]
    known_amounts = [(amount, amount.value) for amount in amounts if amount.value is not None]
    if not known_amounts:
        return None
    most = max(value for _, value in known_amounts)
    unit, size = formatting.unit_of(most, kind)
    x_ticks = whole_ticks(int(most)) if kind == "rounds" else ticks(0.0, most / size)
    return LowerAxis(kind, _axis_name(runs, kind, unit, [amount for amount, _ in known_amounts]), size, x_ticks)


def _chart(runs: Sequence[Digest], title: str, of: Height, axis: LowerAxis) -> Markup:
    curves = [
        ChartLine(name, colour, _curve(run, of, axis))
        for colour, (name, run) in enumerate(zip(run_names(runs), runs, strict=True))
    ]
    return chart(title, axis.name, axis.ticks, _upright(_values(runs, of)), curves)


def _curve(run: Digest, of: Height, axis: LowerAxis) -> list[Point]:
    coordinates = ((across(round_, axis.kind), of(round_), round_) for round_ in run.rounds)
    return [
        Point(amount.value / axis.size, height, f"round {round_.round}: {height:.4g}; {_place(amount, axis.kind)}")
        for amount, height, round_ in coordinates
        if amount.value is not None and height is not None and abs(height) < MOST_PLAUSIBLE
    ]


def _upright(heights: Sequence[float]) -> tuple[float, ...]:
    """Return y ticks; from 0 if that leaves at least half of the height to the data."""
    least, most = min(heights), max(heights)
    return ticks(0.0 if 0 <= least < most / 2 else least, most)


def _place(amount: Amount, kind: str) -> str:
    return "" if kind == "rounds" else formatting.format_amount(amount, kind)


def _axis_name(runs: Sequence[Digest], kind: str, unit: str, amounts: Sequence[Amount]) -> str:
    """Return an axis's name with its unit, marked as a lower bound unless every amount is fully known."""
    least = "" if all(amount.whole for amount in amounts) else ", at least"
    match kind:
        case "rounds":
            return "round"
        case "seconds":
            return f"{seconds_label(runs).replace('seconds', 'time')}, {unit}{least}"
        case "joules":
            return f"energy of all devices, {unit}{least}"
        case _:
            return f"frames up and down, {unit}{least}"
