"""Report section: selected devices, arrivals and task settings by round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from markupsafe import Markup

from edge_server.record.amounts import quantile
from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.charts import MANY_POINTS, Chart, ChartLine, Point, chart, thin_points
from edge_server.report.digest import ARRIVALS, Arrival, Digest, TaskDigest, TaskValue
from edge_server.report.html import clean, render

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
MOST_ROWS, MOST_CELLS = 200, 20_000
MOST_CURVES = 6
MOST_CAUSES = 20
SPREAD = "median, and least to most, of all devices"
BOOKKEEPING = frozenset(
    {"first_step", "total_steps", "model_seed", "model_draw", "chain", "statistics", "merges_single"}
)
"""Assigned values that keep devices in step rather than express a decision."""


def decisions(run: Digest) -> Markup:
    """Return the section's content."""
    if not run.tasks:
        return Markup("<p>No round has ended yet.</p>")
    last, most = run.rounds[-1].round, max(round_.selected for round_ in run.rounds)
    stacked = chart("devices selected", "round", whole_ticks(last), whole_ticks(most))
    values = _distinct_values(run.tasks)
    same = [
        f"{name} {single}" if isinstance(single, str) else f"{name} {single:.6g}"
        for name, (single, *others) in values.items()
        if not others
    ]
    varied = {name: several for name, several in values.items() if len(several) > 1}
    numeric = [name for name, several in varied.items() if not any(isinstance(value, str) for value in several)]
    is_small = len(run.devices) <= MOST_ROWS and len(run.devices) * len(run.rounds) <= MOST_CELLS
    return render(
        "decisions.html",
        stacked=stacked,
        columns=_stacked_columns(run, stacked),
        online=_online(run),
        curves=[_value_chart(run, name) for name in numeric],
        names=[SPREAD] if len(run.devices) > MOST_CURVES else [device.device for device in run.devices],
        same=", ".join(same),
        grid=_arrival_grid(run) if is_small else None,
        devices=len(run.devices),
        rounds=len(run.rounds),
        causes=_cause_rows(run.tasks),
    )


def _stacked_columns(run: Digest, stacked: Chart) -> dict[str, str]:
    """Return the SVG path of the devices by arrival, stacked; a column extends to the next round."""
    rounds, x, y = thin_points(run.rounds), stacked.x, stacked.y
    width = (rounds[-1].round - rounds[0].round + 1) / len(rounds)
    gap = GAP if len(rounds) <= MANY_POINTS else 0
    below, paths = [0] * len(rounds), dict[str, str]()
    for arrival in ARRIVALS:
        above = [base + getattr(round_, arrival) for base, round_ in zip(below, rounds, strict=True)]
        if above != below:
            paths[arrival] = "".join(
                f"M{clean(x.at(round_.round - 1))} {clean(y.at(low))}V{clean(y.at(high))}"
                f"H{clean(x.at(round_.round - 1 + width) - gap)}V{clean(y.at(low))}z"
                for round_, low, high in zip(rounds, below, above, strict=True)
                if high > low
            )
        below = above
    return paths


def _online(run: Digest) -> list[Chart]:
    """Return a chart of connected devices at the start of each round; nothing if not recorded."""
    counts = [(round_.round, round_.online) for round_ in run.rounds if round_.online is not None]
    curve = ChartLine("online", 0, [Point(number, count, f"round {number}: {count}") for number, count in counts])
    most = whole_ticks(max((count for _, count in counts), default=0))
    return [chart("devices connected", "round", whole_ticks(run.rounds[-1].round), most, [curve])] if counts else []


def _arrival_grid(run: Digest) -> dict[str, object]:
    """Return a grid of a row per device and a column per round: positions of labels, and paths of cells by arrival."""
    devices = [device.device for device in run.devices]
    start_x = CELL + LETTER_WIDTH * min(LABEL_LETTERS, max(map(len, devices), default=0))
    rows = {device: HEADER_HEIGHT + index * CELL for index, device in enumerate(devices)}
    columns = {round_.round: start_x + index * CELL for index, round_ in enumerate(run.rounds)}
    cells: dict[str, str] = {}
    for arrival in ARRIVALS:
        tasks = [task for task in run.tasks if task.arrival == arrival]
        if tasks:
            places = (f"M{clean(columns[task.round])} {rows[task.device]}" for task in tasks)
            cells[arrival] = "".join(f"{place}{CELLS[arrival]}" for place in places)
    return {
        "x": start_x,
        "width": start_x + len(columns) * CELL + CELL,
        "height": HEADER_HEIGHT + len(devices) * CELL + 2,
        "names": [(device[:LABEL_LETTERS], y) for device, y in rows.items()],
        "heads": [(n, x + CELL / 2) for n, x in columns.items() if n % LABEL_INTERVAL == 0 or n == 1],
        "paths": cells,
    }


def _cause_rows(tasks: Sequence[TaskDigest]) -> list[list[str]]:
    ranked = Counter(task.cause for task in tasks if task.arrival == "failed").most_common()
    rows = [[cause or "no cause reported", str(count)] for cause, count in ranked[:MOST_CAUSES]]
    if others := ranked[MOST_CAUSES:]:
        rows.append([f"{len(others)} other causes", str(sum(count for _, count in others))])
    return rows


def _distinct_values(tasks: Sequence[TaskDigest]) -> dict[str, list[TaskValue]]:
    values_by_name: dict[str, dict[TaskValue, None]] = {}
    for task in tasks:
        for name, value in task.told.items():
            if name not in BOOKKEEPING:
                values_by_name.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in values_by_name.items()}


def _value_chart(run: Digest, name: str) -> Chart:
    """Return a chart of a numeric value that differed: a curve per device, or one for many devices."""
    by_device, by_round = defaultdict[str, list[Point]](list), defaultdict[int, list[float]](list)
    for task in run.tasks:
        if isinstance(value := task.told.get(name), float):
            by_device[task.device].append(Point(task.round, value, f"round {task.round}: {value:.6g}"))
            by_round[task.round].append(value)
    spreads = [(number, sorted(values)) for number, values in by_round.items()]
    medians = [
        Point(number, quantile(values, 0.5), f"round {number}: {values[0]:.6g} to {values[-1]:.6g}")
        for number, values in spreads
    ]
    curves = [ChartLine(SPREAD, 0, medians, [(number, values[0], values[-1]) for number, values in spreads])]
    if len(run.devices) <= MOST_CURVES:
        names = [device.device for device in run.devices]
        curves = [ChartLine(device, colour, by_device[device]) for colour, device in enumerate(names)]
    heights = ticks(min(values[0] for _, values in spreads), max(values[-1] for _, values in spreads))
    return chart(f"{name} assigned to devices", "round", whole_ticks(run.rounds[-1].round), heights, curves)
