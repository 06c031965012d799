"""Report section: cohorts, arrivals and assigned values by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from edge_server.report.axes import ticks, whole_ticks
from edge_server.report.bars import arrival_grid, arrivals, legend
from edge_server.report.charts import ChartLine, Point, chart, key
from edge_server.report.digest import Digest, TaskDigest, TaskValue, quantile
from edge_server.report.html import Markup, element, join
from edge_server.report.tables import table

MOST_ROWS, MOST_CELLS = 200, 20_000
MOST_CURVES = 6
MOST_CAUSES = 20
SPREAD = "median, and least to most, of all devices"
BOOKKEEPING = frozenset(
    {"first_step", "total_steps", "model_seed", "model_draw", "chain", "statistics", "merges_single"}
)
"""Assigned values that keep devices in step rather than express a decision; by name, as in `PERSONAL`."""
LEGEND = (("arrived", "arrived: its update counts"), ("late", "late when the round ended"), ("failed", "failed"))


def decisions(run: Digest) -> Markup:
    """Return the section's content."""
    if not run.tasks:
        return element("p", "No round has ended yet.")
    rounds = run.rounds
    most = max(round_.selected for round_ in rounds)
    stacked = arrivals("devices selected", rounds, whole_ticks(rounds[-1].round), whole_ticks(most))
    values = _values(run)
    charts = element("div", [stacked, *_online(run), *values], class_="charts")
    keys = _values_legend(run) if values else join()
    return join([legend(LEGEND), keys, charts, _constant_values(run.tasks), _device_grid(run), _causes(run.tasks)])


def _online(run: Digest) -> list[Markup]:
    """Return a chart of connected devices at the start of each round; nothing if not recorded."""
    points = [
        Point(round_.round, round_.online, f"round {round_.round}: {round_.online}")
        for round_ in run.rounds
        if round_.online is not None
    ]
    if not points:
        return []
    most = max(int(point.y) for point in points)
    curve = ChartLine("online", 0, points)
    return [chart("devices connected", "round", whole_ticks(run.rounds[-1].round), whole_ticks(most), [curve])]


def _device_grid(run: Digest) -> Markup:
    devices, rounds = [device.device for device in run.devices], [round_.round for round_ in run.rounds]
    if len(devices) > MOST_ROWS or len(devices) * len(rounds) > MOST_CELLS:
        note = f"{len(devices)} devices in {len(rounds)} rounds are too many to show each; "
        return element("p", note + "see the CSV or JSON.")
    legend_and_grid = join(
        [
            element(
                "p",
                "A full cell: its update counts. A low one: late. A cross: failed. None: not selected.",
                class_="note",
            ),
            arrival_grid(devices, rounds, run.tasks),
        ],
    )
    return join([element("h4", "Every device, every round"), legend_and_grid])


def _causes(tasks: Iterable[TaskDigest]) -> Markup:
    counts = Counter(task.cause for task in tasks if task.arrival == "failed")
    if not counts:
        return join()
    rows = [[cause or "no cause reported", str(count)] for cause, count in counts.most_common(MOST_CAUSES)]
    if len(counts) > MOST_CAUSES:
        rows.append(
            [
                f"{len(counts) - MOST_CAUSES} other causes",
                str(sum(counts.values()) - sum(c for _, c in counts.most_common(MOST_CAUSES))),
            ]
        )
    return join([element("h4", "Why tasks failed"), table(["cause", "times"], rows, class_="texts")])


def _distinct_values(tasks: Iterable[TaskDigest]) -> dict[str, list[TaskValue]]:
    values_by_name: dict[str, dict[TaskValue, None]] = {}
    for task in tasks:
        for name, value in task.told.items():
            if name not in BOOKKEEPING:
                values_by_name.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in values_by_name.items()}


def _constant_values(tasks: Sequence[TaskDigest]) -> Markup:
    same = ", ".join(
        f"{name} {_format_value(values[0])}" for name, values in _distinct_values(tasks).items() if len(values) == 1
    )
    return element("p", f"Same for all devices and rounds: {same}.", class_="note") if same else join()


def _format_value(value: TaskValue) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _values(run: Digest) -> list[Markup]:
    """Return a chart for every numeric value that differed between devices or rounds."""
    return [
        _chart(run, name)
        for name, values in _distinct_values(run.tasks).items()
        if len(values) > 1 and not any(isinstance(value, str) for value in values)
    ]


def _chart(run: Digest, name: str) -> Markup:
    samples = [
        (task.round, task.device, value) for task in run.tasks if isinstance(value := task.told.get(name), float)
    ]
    values = [value for _, _, value in samples]
    curves = _by_device(run, samples) if len(run.devices) <= MOST_CURVES else [_spread(samples)]
    x_ticks = whole_ticks(run.rounds[-1].round)
    title = f"{name} assigned to devices"
    return join([chart(title, "round", x_ticks, ticks(min(values), max(values)), curves)])


def _by_device(run: Digest, samples: Sequence[tuple[int, str, float]]) -> list[ChartLine]:
    return [
        ChartLine(
            device.device,
            colour,
            [
                Point(float(at), value, f"round {at}: {value:.6g}")
                for at, name, value in samples
                if name == device.device
            ],
        )
        for colour, device in enumerate(run.devices)
    ]


def _spread(samples: Sequence[tuple[int, str, float]]) -> ChartLine:
    by_round: dict[int, list[float]] = {}
    for at, _, value in samples:
        by_round.setdefault(at, []).append(value)
    ordered = {at: sorted(values) for at, values in by_round.items()}
    return ChartLine(
        SPREAD,
        0,
        [
            Point(float(at), quantile(values, 0.5), f"round {at}: {values[0]:.6g} to {values[-1]:.6g}")
            for at, values in ordered.items()
        ],
        [(float(at), values[0], values[-1]) for at, values in ordered.items()],
    )


def _values_legend(run: Digest) -> Markup:
    """Return the legend of devices; beyond `MOST_CURVES` one curve stands for all."""
    named = [SPREAD] if len(run.devices) > MOST_CURVES else [device.device for device in run.devices]
    items = [element("span", [key(colour), name]) for colour, name in enumerate(named)]
    return element("p", items, class_="legend")
