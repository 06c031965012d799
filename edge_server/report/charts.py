"""Curves over an axis, as SVG that scales with the page and takes its colours from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from edge_server.report.axes import Axis, label
from edge_server.report.html import Markup, element, joined, number

T = TypeVar("T")

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 348, 10, 182
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


@dataclass(frozen=True)
class Point:
    """A point of a curve, and what is said of it under the pointer."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Curve:
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
    title: str, across: str, x_ticks: Sequence[float], y_ticks: Sequence[float], curves: Sequence[Curve]
) -> Markup:
    """Return a figure.

    Args:
        title: What stands on the upright axis, with its unit; the figure's caption.
        across: What stands on the other, with its unit.
        x_ticks: Round figures that enclose all x, as `axes.ticks`.
        y_ticks: Likewise.
        curves: Of which those without points are left out.
    """
    x, y = Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP)
    content = [frame(x, y, across), *(_curve(curve, x, y) for curve in curves if curve.points)]
    return figure(title, drawing(f"{title} over {across}", *content))


def nothing(title: str, why: str) -> Markup:
    """Return a figure that says why there is nothing in it."""
    text = element("text", why, x=WIDTH / 2, y=HEIGHT / 2, class_="none", text_anchor="middle")
    return figure(title, drawing(f"{title}: {why}", text))


def figure(caption: str, *content: str) -> Markup:
    """Return a drawing with its caption."""
    return element("figure", element("figcaption", caption), *content)


def drawing(name: str, *content: str, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    """Return an SVG that fills the width it is given."""
    return element("svg", *content, viewBox=f"0 0 {number(width)} {number(height)}", role="img", aria_label=name)


def frame(x: Axis, y: Axis, across: str) -> Markup:
    """Return both axes with their ticks, and the name of the lower one."""
    rules = "".join(f"M{LEFT} {number(y.at(tick))}H{RIGHT}" for tick in y.ticks)
    strokes = "".join(f"M{number(x.at(tick))} {BOTTOM}v4" for tick in x.ticks)
    texts = [element("text", label(tick), x=LEFT - 6, y=y.at(tick) + 3.5, text_anchor="end") for tick in y.ticks] + [
        element("text", label(tick), x=x.at(tick), y=BOTTOM + 16, text_anchor="middle") for tick in x.ticks
    ]
    name = element("text", across, x=(LEFT + RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle", class_="name")
    return joined(element("path", d=rules, class_="rule"), element("path", d=strokes, class_="tick"), *texts, name)


def _curve(curve: Curve, x: Axis, y: Axis) -> Markup:
    colour = f"c{curve.colour % COLOURS}"
    points = thinned(curve.points)
    parts = []
    if curve.band:
        band = thinned(curve.band)
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


def thinned(points: Sequence[T], most: int = MOST) -> Sequence[T]:
    """Return no more than so many of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def key(colour: int) -> Markup:
    """Return a piece of a curve, to stand beside its name in a legend."""
    shape = SHAPES[colour % len(SHAPES)]
    parts = (element("path", d="M0 6H26", class_="line"), element("path", d=f"M13 6{shape}", class_="point"))
    return element("svg", element("g", *parts, class_=f"c{colour % COLOURS}"), viewBox="0 0 26 12", class_="key")
