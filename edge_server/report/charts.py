"""Line charts as SVG that scale with the page and take its colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edge_server.report.axes import Axis, format_tick
from edge_server.report.html import Markup, element, join, number

T = TypeVar("T")
COLOURS = 8
"""Colours that the page's style defines; further curves repeat them."""
MANY_POINTS = 60
"""Points of a curve beyond which markers appear only under the pointer."""
MOST_POINTS = 240
"""Points drawn of a curve; more would lie closer than a pixel."""
SHAPES = (
    "m-2.4 0a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0-4.8 0",
    "m-2.2-2.2h4.4v4.4h-4.4z",
    "m0-3l2.7 4.7h-5.4z",
    "m0-3.1l3.1 3.1l-3.1 3.1l-3.1-3.1z",
)
WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 348, 10, 182


@dataclass(frozen=True)
class Point:
    """A point of a curve; `title` is its tooltip."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class ChartLine:
    """A curve through points.

    Attributes:
        colour: Index of its colour, dash pattern and marker.
        band: Shaded range around it, as (x, lower, upper).
    """

    name: str
    colour: int
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


def chart(
    title: str, across: str, x_ticks: Sequence[float], y_ticks: Sequence[float], curves: Sequence[ChartLine]
) -> Markup:
    """Return a line chart as a figure.

    Args:
        title: Name and unit of the y axis; also the caption.
        across: Name and unit of the x axis.
        x_ticks: Round values that enclose all x, as `axes.ticks` returns them.
        curves: Those without points are omitted.
    """
    x, y = Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP)
    content = [frame(x, y, across), *(_curve(curve, x, y) for curve in curves if curve.points)]
    return figure(title, drawing(f"{title} over {across}", content))


def figure(caption: str, content: Markup) -> Markup:
    """Return a drawing with its caption."""
    return element("figure", [element("figcaption", caption), content])


def drawing(name: str, content: Iterable[str], *, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    """Return an SVG that scales to the width of its container.

    Args:
        name: Label for screen readers.
        width: In units of the drawing; the height too.
    """
    return element("svg", content, viewBox=f"0 0 {number(width)} {number(height)}", role="img", aria_label=name)


def frame(x: Axis, y: Axis, across: str) -> Markup:
    """Return both axes with their ticks, and the name of the x axis."""
    rules = "".join(f"M{LEFT} {number(y.at(tick))}H{RIGHT}" for tick in y.ticks)
    strokes = "".join(f"M{number(x.at(tick))} {BOTTOM}v4" for tick in x.ticks)
    texts = [
        element("text", format_tick(tick), x=LEFT - 6, y=y.at(tick) + 3.5, text_anchor="end") for tick in y.ticks
    ] + [element("text", format_tick(tick), x=x.at(tick), y=BOTTOM + 16, text_anchor="middle") for tick in x.ticks]
    name = element("text", across, x=(LEFT + RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle", class_="name")
    return join([element("path", d=rules, class_="rule"), element("path", d=strokes, class_="tick"), *texts, name])


def _curve(curve: ChartLine, x: Axis, y: Axis) -> Markup:
    colour = f"c{curve.colour % COLOURS}"
    points = thin_points(curve.points)
    parts = []
    if curve.band:
        band = thin_points(curve.band)
        upper = [f"{number(x.at(at))} {number(y.at(most))}" for at, _, most in band]
        lower = [f"{number(x.at(at))} {number(y.at(least))}" for at, least, _ in reversed(band)]
        parts.append(element("path", d=f"M{'L'.join([*upper, *lower])}z", class_="band"))
    line = "L".join(f"{number(x.at(point.x))} {number(y.at(point.y))}" for point in points)
    parts.append(element("path", d=f"M{line}", class_="line"))
    shape = SHAPES[curve.colour % len(SHAPES)]
    parts += [
        element(
            "path",
            element("title", f"{curve.name}: {point.title}"),
            d=f"M{number(x.at(point.x))} {number(y.at(point.y))}{shape}",
            class_="point",
        )
        for point in points
    ]
    return element("g", parts, class_=f"{colour} many" if len(points) > MANY_POINTS else colour)


def thin_points(points: Sequence[T], most: int = MOST_POINTS) -> Sequence[T]:
    """Return at most so many of the points, evenly spaced, always with the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def key(colour: int) -> Markup:
    """Return a short sample of a curve for a legend."""
    shape = SHAPES[colour % len(SHAPES)]
    parts = (element("path", d="M0 6H26", class_="line"), element("path", d=f"M13 6{shape}", class_="point"))
    return element("svg", element("g", parts, class_=f"c{colour % COLOURS}"), viewBox="0 0 26 12", class_="key")
