"""Bars of time and energy; arrivals by round and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_server.report.axes import Axis
from edge_server.report.charts import BOTTOM, LEFT, MANY_POINTS, RIGHT, TOP, drawing, figure, frame, thin_points
from edge_server.report.digest import ARRIVALS, Arrival, RoundDigest, TaskDigest
from edge_server.report.html import Markup, element, number

CELL, GAP = 11, 1
LABEL_LETTERS, LETTER_WIDTH = 24, 5.8
HEADER_HEIGHT = 16
LABEL_INTERVAL = 5
"""Rounds between two labels above the grid."""
_FULL = CELL - GAP
CELLS: dict[Arrival, str] = {
    "arrived": f"h{_FULL}v{_FULL}h-{_FULL}z",
    "late": f"m0 {_FULL - 3}h{_FULL}v3h-{_FULL}z",
    "failed": f"l{_FULL} {_FULL}m0-{_FULL}l-{_FULL} {_FULL}",
}


@dataclass(frozen=True)
class Slice:
    """A part of a bar: its CSS class, its size and its tooltip."""

    name: str
    size: float
    title: str


def bar(slices: Sequence[Slice], most: float) -> Markup:
    """Return a stacked bar that is full where its slices sum to `most`."""
    parts, x = [], 0.0
    for slice_ in slices:
        width = 1000 * slice_.size / most if most > 0 else 0.0
        if width > 0:
            parts.append(
                element("rect", element("title", slice_.title), x=x, width=width, height=10, class_=slice_.name)
            )
        x += width
    return element("svg", parts, viewBox="0 0 1000 10", preserveAspectRatio="none", class_="bar")


def arrivals(title: str, rounds: Sequence[RoundDigest], x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Markup:
    """Return the devices of each round as columns, stacked by arrival; a column extends to the next round."""
    x, y = Axis(tuple(x_ticks), LEFT, RIGHT), Axis(tuple(y_ticks), BOTTOM, TOP)
    visible_rounds = thin_points(rounds)
    width = (visible_rounds[-1].round - visible_rounds[0].round + 1) / len(visible_rounds)
    gap = GAP if len(visible_rounds) <= MANY_POINTS else 0
    below = [0] * len(visible_rounds)
    parts = []
    for arrival in ARRIVALS:
        above = [base + count_of(round_, arrival) for base, round_ in zip(below, visible_rounds, strict=True)]
        if above != below:
            columns = "".join(
                f"M{number(x.at(round_.round - 1))} {number(y.at(low))}V{number(y.at(high))}"
                f"H{number(x.at(round_.round - 1 + width) - gap)}V{number(y.at(low))}z"
                for round_, low, high in zip(visible_rounds, below, above, strict=True)
                if high > low
            )
            parts.append(element("path", element("title", arrival), d=columns, class_=arrival))
        below = above
    return figure(title, drawing(title, [frame(x, y, "round"), *parts]))


def count_of(round_: RoundDigest, arrival: Arrival) -> int:
    """Return the number of a round's devices with an arrival."""
    return {"arrived": round_.arrived, "late": round_.late, "failed": round_.failed}[arrival]


def arrival_grid(devices: Sequence[str], rounds: Sequence[int], tasks: Sequence[TaskDigest]) -> Markup:
    """Return a row per device and a column per round: a full cell arrived, a low one was late, a cross failed.

    Args:
        devices: Rows, from the top.
        tasks: Tasks of these devices in these rounds.
    """
    row = {device: index for index, device in enumerate(devices)}
    column = {number_: index for index, number_ in enumerate(rounds)}
    grid_x = CELL + LETTER_WIDTH * min(LABEL_LETTERS, max(map(len, devices), default=0))
    parts = []
    for arrival in ARRIVALS:
        cells = "".join(
            f"M{number(grid_x + column[task.round] * CELL)} {HEADER_HEIGHT + row[task.device] * CELL}{CELLS[arrival]}"
            for task in tasks
            if task.arrival == arrival
        )
        if cells:
            parts.append(element("path", d=cells, class_=arrival))
    names = [
        element(
            "text", device[:LABEL_LETTERS], x=grid_x - 6, y=HEADER_HEIGHT + index * CELL + CELL - 1.5, text_anchor="end"
        )
        for device, index in row.items()
    ]
    heads = [
        element("text", str(number_), x=grid_x + index * CELL + CELL / 2, y=HEADER_HEIGHT - 5, text_anchor="middle")
        for number_, index in column.items()
        if number_ % LABEL_INTERVAL == 0 or number_ == 1
    ]
    width, height = grid_x + len(rounds) * CELL + CELL, HEADER_HEIGHT + len(devices) * CELL + 2
    svg = element(
        "svg",
        (*names, *heads, *parts),
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        aria_label="devices by round: arrived, late, failed",
        class_="grid",
    )
    return element("div", svg, class_="wide")


def legend(names: Iterable[tuple[str, str]]) -> Markup:
    """Return a legend of pairs of a CSS class and its label."""
    rect = {"x": 0, "y": 0, "width": 12, "height": 12}
    items = [
        element("span", [element("svg", element("rect", **rect, class_=name), viewBox="0 0 12 12", class_="key"), text])
        for name, text in names
    ]
    return element("p", items, class_="legend")
