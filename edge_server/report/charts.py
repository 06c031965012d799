"""Curves over an axis, as SVG that scales with the page and takes its colours from it.

Axes: where a figure lies on the paper, and which round figures stand beside it.

Sums as bars: where a device's time and energy went, and what became of the devices of each round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from edge_server.report.digest import ARRIVALS, Arrival, RoundDigest, TaskDigest
from edge_server.report.html import Markup, element, joined, number

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
FLAT = 1e-9
"""Differences below this, or below this share of a figure, are none on paper."""

T = TypeVar("T")
COLOURS = 8
"""Colours of the page; where there are more curves, they come again."""

MANY = 60
"""Points of a curve beyond which their marks show under the pointer only."""

MOST = 240
"""Points that are drawn of a curve; more than a pixel each would not be seen."""

SHAPES = (
    "m-2.4 0a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0-4.8 0",
    "m-2.2-2.2h4.4v4.4h-4.4z",
    "m0-3l2.7 4.7h-5.4z",
    "m0-3.1l3.1 3.1l-3.1 3.1l-3.1-3.1z",
)

HEADS = 16
EVERY = 5
"""Rounds between two numbers above the grid."""


@dataclass(frozen=True)
class Axis:
    """A linear scale.

    Attributes:
        ticks: Round figures in ascending order; the first and the last are the ends of the axis.
        start: Where on the paper the first tick lies.
        end: Where the last one lies.
    """

    ticks: tuple[float, ...]
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return where on the paper a value lies."""
        least, most = self.ticks[0], self.ticks[-1]
        return self.start + (value - least) / (most - least) * (self.end - self.start)


def ticks(least: float, most: float, about: int = 5) -> tuple[float, ...]:
    """Return about so many round figures that enclose a range; of an empty range, some around it.

    Args:
        least: Lower end of the range.
        most: Upper end.
    """
    if most - least <= FLAT * max(1.0, abs(least), abs(most)):
        pad = abs(most) * 0.1 if abs(most) > FLAT else 1.0
        least, most = (least - pad if least else 0.0), most + pad
    step = _step((most - least) / about)
    first, last = math.floor(least / step + FLAT), math.ceil(most / step - FLAT)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def whole_ticks(most: int, about: int = 5) -> tuple[float, ...]:
    """Return about so many round whole figures from 0 to at least `most`."""
    most = max(1, most)
    step = max(1, round(_step(most / about)))
    return tuple(float(number * step) for number in range(math.ceil(most / step) + 1))


def _step(about: float) -> float:
    """Return the least round figure that is no less."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(step * power for step in STEPS if step * power >= about * (1 - FLAT))


def label(tick: float) -> str:
    """Return a tick's figure."""
    return f"{tick:.10g}".replace("-", "\N{MINUS SIGN}")


WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 348, 10, 182


@dataclass(frozen=True)
class Point:
    """A point of a curve, and what is said of it under the pointer."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class ChartLine:
    """A line through points.

    Attributes:
        name: What it is of.
        colour: Number of its colour, dashes and marks.
        band: Where it lies in, as (x, least, most).
    """

    name: str
    colour: int
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


def chart(
    title: str, across: str, x_ticks: Sequence[float], y_ticks: Sequence[float], curves: Sequence[ChartLine]
) -> Markup:
    """Return a figure.

    Args:
        title: What stands on the upright axis, with its unit; the figure's caption.
        across: What stands on the other, with its unit.
        x_ticks: Round figures that enclose all x, as `axes.ticks`.
        curves: Of which those without points are left out.
    """
    x, y = Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP)
    content = [frame(x, y, across), *(_curve(curve, x, y) for curve in curves if curve.points)]
    return figure(title, drawing(f"{title} over {across}", *content))


def figure(caption: str, *content: str) -> Markup:
    """Return a drawing with its caption."""
    return element("figure", element("figcaption", caption), *content)


def drawing(name: str, *content: str, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    """Return an SVG that fills the width it is given.

    Args:
        name: Said to who cannot see it.
        width: In units of the drawing.
    """
    return element("svg", *content, viewBox=f"0 0 {number(width)} {number(height)}", role="img", aria_label=name)


def frame(x: Axis, y: Axis, across: str) -> Markup:
    """Return both axes with their ticks, and the name of the lower one.

    Args:
        across: Name of the lower one.
    """
    rules = "".join(f"M{LEFT} {number(y.at(tick))}H{RIGHT}" for tick in y.ticks)
    strokes = "".join(f"M{number(x.at(tick))} {BOTTOM}v4" for tick in x.ticks)
    texts = [element("text", label(tick), x=LEFT - 6, y=y.at(tick) + 3.5, text_anchor="end") for tick in y.ticks] + [
        element("text", label(tick), x=x.at(tick), y=BOTTOM + 16, text_anchor="middle") for tick in x.ticks
    ]
    name = element("text", across, x=(LEFT + RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle", class_="name")
    return joined(element("path", d=rules, class_="rule"), element("path", d=strokes, class_="tick"), *texts, name)


def _curve(curve: ChartLine, x: Axis, y: Axis) -> Markup:
    colour = f"c{curve.colour % COLOURS}"
    points = thin_points(curve.points)
    parts = []
    if curve.band:
        band = thin_points(curve.band)
        there = [f"{number(x.at(at))} {number(y.at(most))}" for at, _, most in band]
        back = [f"{number(x.at(at))} {number(y.at(least))}" for at, least, _ in reversed(band)]
        parts.append(element("path", d=f"M{'L'.join([*there, *back])}z", class_="band"))
    line = "L".join(f"{number(x.at(one.x))} {number(y.at(one.y))}" for one in points)
    parts.append(element("path", d=f"M{line}", class_="line"))
    shape = SHAPES[curve.colour % len(SHAPES)]
    parts += [
        element(
            "path",
            element("title", f"{curve.name}: {one.title}"),
            d=f"M{number(x.at(one.x))} {number(y.at(one.y))}{shape}",
            class_="point",
        )
        for one in points
    ]
    return element("g", *parts, class_=f"{colour} many" if len(points) > MANY else colour)


def thin_points(points: Sequence[T], most: int = MOST) -> Sequence[T]:
    """Return no more than so many of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def key(colour: int) -> Markup:
    """Return a piece of a curve, to stand beside its name in a legend."""
    shape = SHAPES[colour % len(SHAPES)]
    parts = (element("path", d="M0 6H26", class_="line"), element("path", d=f"M13 6{shape}", class_="point"))
    return element("svg", element("g", *parts, class_=f"c{colour % COLOURS}"), viewBox="0 0 26 12", class_="key")


CELL, GAP = 11, 1
LABELS, LETTER = 24, 5.8


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
    """Return the devices of each round, stacked by what became of them; a round is as wide as from it to the next.

    Args:
        x_ticks: Rounds that are labelled.
        y_ticks: Counts that are labelled.
    """
    x, y = Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP)
    shown = thin_points(rounds)
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
    """Return one row a device, one column a round: a full cell arrived, a low one came late, a cross failed.

    Args:
        devices: Rows, from the top.
        tasks: Of any of them.
    """
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
