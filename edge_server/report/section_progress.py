"""Accuracy and loss against rounds, seconds, joules and bytes, of all runs in one chart each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from edge_server.journal.costs import MOST
from edge_server.report import formatting
from edge_server.report.charts import ChartLine, Point, chart, empty_figure, ticks, whole_ticks
from edge_server.report.digest import Amount, Digest, RoundDigest, fleet_figures
from edge_server.report.html import Markup, element
from edge_server.report.tables import names, seconds_of

AXES = ("rounds", "seconds", "joules", "bytes")
Height: TypeAlias = Callable[[RoundDigest], float | None]


def _percent(name: str) -> Height:
    def height(one: RoundDigest) -> float | None:
        share = getattr(one, name)
        return None if share is None else 100 * share

    return height


OWN = "accuracy on the devices' own data, %, each with its own model"
HEIGHTS: Sequence[tuple[str, Height]] = (
    ("accuracy on test data, %", _percent("accuracy")),
    ("loss on test data", lambda one: one.test_loss),
    ("training loss", lambda one: one.loss),
)
FLEETS: Mapping[str, tuple[str, Height]] = {
    "global_accuracy": ("accuracy of the aggregated model on test data, %", _percent("global_accuracy")),
    "fleet_accuracy": ("accuracy on the data of all devices, %", _percent("fleet_accuracy")),
}


def progress(runs: Sequence[Digest]) -> Markup:
    """Return one row of charts a figure, one chart an axis; of some figures only where a run knows them."""
    (title, accuracy), *others = HEIGHTS
    if any(run.personal for run in runs):
        title = OWN if all(run.personal for run in runs) else "accuracy, %, of each run as its summary says"
    curves = [FLEETS[name] for name in fleet_figures(runs) if any(_points(run, name) > 1 for run in runs)]
    heights = [(title, accuracy), *curves, *others]
    return element("div", *(_chart(runs, title, of, kind) for title, of in heights for kind in AXES), class_="charts")


def _points(run: Digest, name: str) -> int:
    return sum(getattr(one, name) is not None for one in run.rounds)


def across(one: RoundDigest, kind: str) -> Amount:
    """Return where a round lies on an axis."""
    return Amount(value=float(one.round)) if kind == "rounds" else getattr(one.until, kind)


def _chart(runs: Sequence[Digest], title: str, of: Callable[[RoundDigest], float | None], kind: str) -> Markup:
    found = {
        name: [
            (place, height, one)
            for one in run.rounds
            if (height := of(one)) is not None and abs(height) < MOST and (place := across(one, kind)).value is not None
        ]
        for name, run in zip(names(runs), runs, strict=True)
    }
    flat = [(place, height) for points in found.values() for place, height, _ in points]
    if not flat:
        named = f"{title}, over {kind}"
        return empty_figure(named, f"no run knows its {kind}" if _any(runs, of) else "not evaluated")
    unit, size = formatting.unit_of(max(place.value or 0.0 for place, _ in flat), kind)
    curves = [
        ChartLine(
            name,
            colour,
            [
                Point((place.value or 0.0) / size, height, f"round {one.round}: {height:.4g}; {_place(place, kind)}")
                for place, height, one in points
            ],
        )
        for colour, (name, points) in enumerate(found.items())
    ]
    heights = [height for _, height in flat]
    x = [point.x for curve in curves for point in curve.points]
    x_ticks = whole_ticks(int(max(x))) if kind == "rounds" else ticks(0.0, max(x))
    return chart(f"{title}", _axis(runs, kind, unit, [place for place, _ in flat]), x_ticks, _upright(heights), curves)


def _upright(heights: Sequence[float]) -> tuple[float, ...]:
    """Return the ticks of heights; from 0 where that costs less than half of the paper."""
    least, most = min(heights), max(heights)
    return ticks(0.0 if least < most / 2 else least, most)


def _any(runs: Sequence[Digest], of: Callable[[RoundDigest], float | None]) -> bool:
    return any(of(one) is not None for run in runs for one in run.rounds)


def _place(place: Amount, kind: str) -> str:
    return "" if kind == "rounds" else formatting.amount(place, kind)


def _axis(runs: Sequence[Digest], kind: str, unit: str, places: Sequence[Amount]) -> str:
    """Return an axis's name with its unit, and whether all of what it counts is known."""
    least = "" if all(place.whole for place in places) else ", at least"
    match kind:
        case "rounds":
            return "round"
        case "seconds":
            return f"{seconds_of(runs).replace('seconds', 'time')}, {unit}{least}"
        case "joules":
            return f"energy of all devices, {unit}{least}"
        case _:
            return f"frames up and down, {unit}{least}"
