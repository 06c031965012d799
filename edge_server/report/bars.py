"""Sums as bars: where a device's time and energy went, and what became of the devices of each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_server.report.axes import Axis
from edge_server.report.charts import BOTTOM, LEFT, MANY, RIGHT, TOP, drawing, figure, frame, thinned
from edge_server.report.digest import ARRIVALS, Arrival, RoundDigest, TaskDigest
from edge_server.report.html import Markup, element, joined, number

CELL, GAP = 11, 1
LABELS, LETTER = 24, 5.8
HEADS = 16
EVERY = 5
"""Rounds between two numbers above the grid."""


@dataclass(frozen=True)
class Slice:
    """A part of a bar: what it is, how much, and in words."""

    name: str
    size: float
    title: str


def bar(slices: Sequence[Slice], most: float) -> Markup:
    """Return one bar as wide as its place where its slices sum to `most`."""
    parts, left = [], 0.0
    for one in slices:
        width = 1000 * one.size / most if most > 0 else 0.0
        if width > 0:
            parts.append(element("rect", element("title", one.title), x=left, width=width, height=10, class_=one.name))
        left += width
    return element("svg", *parts, viewBox="0 0 1000 10", preserveAspectRatio="none", class_="bar")


def arrivals(title: str, rounds: Sequence[RoundDigest], x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Markup:
    """Return the devices of each round, stacked by what became of them; a round is as wide as from it to the next."""
    x, y = Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP)
    shown = thinned(rounds)
    width = (shown[-1].round - shown[0].round + 1) / len(shown)
    below = [0] * len(shown)
    parts = []
    for arrival in ARRIVALS:
        above = [base + count_of(one, arrival) for base, one in zip(below, shown, strict=True)]
        if above != below:
            columns = "".join(
                f"M{number(x.at(one.round - 1))} {number(y.at(low))}V{number(y.at(high))}"
                f"H{number(x.at(one.round - 1 + width) - (GAP if len(shown) <= MANY else 0))}V{number(y.at(low))}z"
                for one, low, high in zip(shown, below, above, strict=True)
                if high > low
            )
            parts.append(element("path", element("title", arrival), d=columns, class_=arrival))
        below = above
    return figure(title, drawing(title, frame(x, y, "round"), *parts))


def count_of(one: RoundDigest, arrival: Arrival) -> int:
    """Return how many devices of a round ended so."""
    return {"arrived": one.arrived, "late": one.late, "failed": one.failed}[arrival]


def grid(devices: Sequence[str], rounds: Sequence[int], tasks: Sequence[TaskDigest]) -> Markup:
    """Return one row a device, one column a round: a full cell arrived, a low one came late, a cross failed."""
    row = {device: place for place, device in enumerate(devices)}
    column = {number_: place for place, number_ in enumerate(rounds)}
    left = CELL + LETTER * min(LABELS, max(map(len, devices), default=0))
    parts = []
    for arrival in ARRIVALS:
        cells = "".join(
            f"M{number(left + column[one.round] * CELL)} {HEADS + row[one.device] * CELL}{CELLS[arrival]}"
            for one in tasks
            if one.arrival == arrival
        )
        if cells:
            parts.append(element("path", d=cells, class_=arrival))
    names = [
        element("text", device[:LABELS], x=left - 6, y=HEADS + place * CELL + CELL - 1.5, text_anchor="end")
        for device, place in row.items()
    ]
    heads = [
        element("text", str(number_), x=left + place * CELL + CELL / 2, y=HEADS - 5, text_anchor="middle")
        for number_, place in column.items()
        if number_ % EVERY == 0 or number_ == 1
    ]
    width, height = left + len(rounds) * CELL + CELL, HEADS + len(devices) * CELL + 2
    svg = element(
        "svg",
        *(*names, *heads, *parts),
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        aria_label="devices by round: arrived, late, failed",
        class_="grid",
    )
    return element("div", svg, class_="wide")


_FULL = CELL - GAP
CELLS: dict[Arrival, str] = {
    "arrived": f"h{_FULL}v{_FULL}h-{_FULL}z",
    "late": f"m0 {_FULL - 3}h{_FULL}v3h-{_FULL}z",
    "failed": f"l{_FULL} {_FULL}m0-{_FULL}l-{_FULL} {_FULL}",
}


def legend(*names: tuple[str, str]) -> Markup:
    """Return what the colours of bars mean: pairs of a colour's name and words."""
    rect = {"x": 0, "y": 0, "width": 12, "height": 12}
    items = [
        element("span", element("svg", element("rect", **rect, class_=name), viewBox="0 0 12 12", class_="key"), words)
        for name, words in names
    ]
    return element("p", joined(*items), class_="legend")
