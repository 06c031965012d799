"""Line charts and bars as data, which templates draw as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from edge_server.report.axes import Axis, ticks

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
LEFT, RIGHT, TOP, BOTTOM = 46.0, 348.0, 10.0, 182.0


@dataclass(frozen=True)
class Point:
    """A point of a curve; `title` is its tooltip."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class ChartLine:
    """A curve through points; `colour` is the index of its colour, dash pattern and marker.

    Attributes:
        band: Shaded range around it, as (x, lower, upper).
    """

    name: str
    colour: int
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Chart:
    """A line chart: name and unit of its axes, `title` upright and `across`; curves without points are omitted."""

    title: str
    across: str
    x: Axis
    y: Axis
    curves: Sequence[ChartLine] = ()


@dataclass(frozen=True)
class Slice:
    """A part of a bar: its CSS class, its size and its tooltip."""

    name: str
    size: float
    title: str


def chart(
    title: str, across: str, x_ticks: Sequence[float], y_ticks: Sequence[float], curves: Sequence[ChartLine] = ()
) -> Chart:
    """Return a line chart; the ticks are round values that enclose all x or y, as `axes.ticks` returns them."""
    return Chart(title, across, Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP), curves)


def upright_ticks(heights: Sequence[float]) -> tuple[float, ...]:
    """Return y ticks; from 0 if that leaves at least half of the height to the data."""
    least, most = min(heights), max(heights)
    return ticks(0.0 if 0 <= least < most / 2 else least, most)


def thin_points(points: Sequence[T], most: int = MOST_POINTS) -> Sequence[T]:
    """Return at most so many of the points, evenly spaced, always with the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def mark_shape(colour: int) -> Markup:
    """Return the path of a curve's marker."""
    return Markup(SHAPES[colour % len(SHAPES)])  # noqa: S704 - a constant
