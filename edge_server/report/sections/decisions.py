"""What was decided over the rounds, and what became of it: cohorts, arrivals, and the values of the assignments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from edge_server.report.charts import ChartLine, Point, arrivals, chart, grid, key, legend, ticks, whole_ticks
from edge_server.report.digest import Digest, TaskDigest, Told, quantile
from edge_server.report.html import Markup, element, joined
from edge_server.report.tables import table

MOST_ROWS, MOST_CELLS = 200, 20_000
MOST_CURVES = 6
MOST_CAUSES = 20
SPREAD = "median, and least to most, of all devices"
BOOKKEEPING = frozenset(
    {"first_step", "total_steps", "model_seed", "model_draw", "chain", "statistics", "merges_single"}
)
"""What tasks are told so that devices count and draw alike: nobody decided any of it. By name, as `PERSONAL` is."""
LEGEND = (("arrived", "arrived: its update counts"), ("late", "late when the round ended"), ("failed", "failed"))


def decisions(run: Digest) -> Markup:
    """Return a run's decisions."""
    if not run.tasks:
        return element("p", "No round has ended: nothing was decided yet.")
    rounds = run.rounds
    most = max(one.selected for one in rounds)
    stacked = arrivals("devices selected", rounds, whole_ticks(rounds[-1].round), whole_ticks(most))
    values = _values(run)
    charts = element("div", stacked, *_online(run), *values, class_="charts")
    keys = _values_legend(run) if values else joined()
    return joined(legend(*LEGEND), keys, charts, _constant(run.tasks), _grid(run), _causes(run.tasks))


def _online(run: Digest) -> list[Markup]:
    """Return how many devices were there when each round began; nothing where that was not recorded."""
    points = [
        Point(one.round, one.online, f"round {one.round}: {one.online}") for one in run.rounds if one.online is not None
    ]
    if not points:
        return []
    most = max(int(one.y) for one in points)
    curve = ChartLine("online", 0, points)
    return [chart("devices connected", "round", whole_ticks(run.rounds[-1].round), whole_ticks(most), [curve])]


def _grid(run: Digest) -> Markup:
    devices, rounds = [one.device for one in run.devices], [one.round for one in run.rounds]
    if len(devices) > MOST_ROWS or len(devices) * len(rounds) > MOST_CELLS:
        said = f"{len(devices)} devices in {len(rounds)} rounds are too many to show one by one; "
        return element("p", said + "the CSV and JSON hold each of them.")
    drawn = joined(
        element(
            "p", "A full cell: its update counts. A low one: late. A cross: failed. None: not selected.", class_="note"
        ),
        grid(devices, rounds, run.tasks),
    )
    return joined(element("h4", "Every device, every round"), drawn)


def _causes(tasks: Iterable[TaskDigest]) -> Markup:
    counts = Counter(task.cause for task in tasks if task.arrival == "failed")
    if not counts:
        return joined()
    rows = [[cause or "no cause was given", str(count)] for cause, count in counts.most_common(MOST_CAUSES)]
    if len(counts) > MOST_CAUSES:
        rows.append(
            [
                f"{len(counts) - MOST_CAUSES} other causes",
                str(sum(counts.values()) - sum(c for _, c in counts.most_common(MOST_CAUSES))),
            ]
        )
    return joined(element("h4", "Why tasks failed"), table(["cause", "times"], rows, class_="texts"))


def _names(tasks: Iterable[TaskDigest]) -> dict[str, list[Told]]:
    """Return what was decided by name, each value once, in order."""
    found: dict[str, dict[Told, None]] = {}
    for task in tasks:
        for name, value in task.told.items():
            if name not in BOOKKEEPING:
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _constant(tasks: Sequence[TaskDigest]) -> Markup:
    same = ", ".join(f"{name} {_told(values[0])}" for name, values in _names(tasks).items() if len(values) == 1)
    return element("p", f"Told alike to all devices in all rounds: {same}.", class_="note") if same else joined()


def _told(value: Told) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _values(run: Digest) -> list[Markup]:
    """Return one chart for every value that differed between devices or rounds; words are counted in no chart."""
    return [
        _chart(run, name)
        for name, values in _names(run.tasks).items()
        if len(values) > 1 and not any(isinstance(value, str) for value in values)
    ]


def _chart(run: Digest, name: str) -> Markup:
    found = [(task.round, task.device, value) for task in run.tasks if isinstance(value := task.told.get(name), float)]
    values = [value for _, _, value in found]
    curves = _by_device(run, found) if len(run.devices) <= MOST_CURVES else [_spread(found)]
    x_ticks = whole_ticks(run.rounds[-1].round)
    title = f"{name} that devices were told"
    return joined(chart(title, "round", x_ticks, ticks(min(values), max(values)), curves))


def _by_device(run: Digest, found: Sequence[tuple[int, str, float]]) -> list[ChartLine]:
    return [
        ChartLine(
            one.device,
            colour,
            [
                Point(float(at), value, f"round {at}: {value:.6g}")
                for at, device, value in found
                if device == one.device
            ],
        )
        for colour, one in enumerate(run.devices)
    ]


def _spread(found: Sequence[tuple[int, str, float]]) -> ChartLine:
    by_round: dict[int, list[float]] = {}
    for at, _, value in found:
        by_round.setdefault(at, []).append(value)
    ordered = {at: sorted(values) for at, values in by_round.items()}
    return ChartLine(
        SPREAD,
        0,
        [
            Point(float(at), quantile(one, 0.5), f"round {at}: {one[0]:.6g} to {one[-1]:.6g}")
            for at, one in ordered.items()
        ],
        [(float(at), one[0], one[-1]) for at, one in ordered.items()],
    )


def _values_legend(run: Digest) -> Markup:
    """Return which line is of which device; of many devices there is one line for all."""
    named = [SPREAD] if len(run.devices) > MOST_CURVES else [one.device for one in run.devices]
    items = [element("span", key(colour), name) for colour, name in enumerate(named)]
    return element("p", *items, class_="legend")
