"""Report section: timeline of rounds with each device's download, compute, upload and wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edge_server.report import formatting
from edge_server.report.axes import Axis, ticks
from edge_server.report.axes import format_tick as tick_label
from edge_server.report.bars import LABEL_LETTERS, legend
from edge_server.report.digest import Amount, Digest, RoundDigest, TaskDigest
from edge_server.report.html import Markup, element, join, number
from edge_server.report.sections.time_energy import PART_LABELS, activities
from edge_server.report.tables import clock_kind

WIDTH, RIGHT, TOP = 1200, 1190, 4
LANE, BAR = 18, 12
LETTER = 6.4
AXIS = 34
NUMBER = 20
"""Width in the drawing from which a round shows its number."""
MOST_LANES, MOST_TASKS = 60, 2_000


@dataclass(frozen=True)
class TimeSpan:
    """Seconds of a run, from `start` to `end`."""

    start: float
    end: float


def timeline(run: Digest) -> Markup:
    """Return the timeline of rounds and of each device's activities."""
    spans = round_spans(run)
    if not spans or max(span.end for span in spans.values()) <= 0:
        return element("p", "No round has ended.")
    lanes = [device.device for device in run.devices]
    is_small = len(lanes) <= MOST_LANES and len(run.tasks) <= MOST_TASKS
    note = f"{len(lanes)} devices in {len(run.rounds)} rounds are too many to show each; only rounds are drawn."
    names = [*activities(run), "waiting"]
    keys = [(part, PART_LABELS.get(part, part)) for part in names] + [("unknown", "not attributed")]
    svg = _drawing(run, spans, lanes if is_small else [], names)
    return join(
        [
            legend(keys) if is_small else element("p", note, class_="note"),
            element("div", svg, class_="wide", tabindex="0"),
        ],
    )


def round_spans(run: Digest) -> dict[int, TimeSpan]:
    """Return the time span of each round; rounds follow each other without gaps."""
    return {
        round_.round: TimeSpan(round_.until.seconds.value - round_.seconds, round_.until.seconds.value)
        for round_ in run.rounds
        if round_.until.seconds.value is not None
    }


def task_spans(task: TaskDigest, within: TimeSpan, names: Sequence[str]) -> Iterator[tuple[str, TimeSpan]]:
    """Yield the activities of a task one after another, cut at the end of its round.

    Args:
        names: Activities in the order in which they happen.
    """
    start = within.start
    amounts = [(name, getattr(task.seconds, name)) for name in names]
    for name, amount in amounts:
        end = min(within.end, start + (amount.value or 0.0))
        if end > start:
            yield name, TimeSpan(start, end)
        start = end
    if start < within.end and not all(amount.whole for _, amount in amounts):
        yield "unknown", TimeSpan(start, within.end)


def _drawing(run: Digest, spans: Mapping[int, TimeSpan], lanes: Sequence[str], names: Sequence[str]) -> Markup:
    last = max(span.end for span in spans.values())
    unit, size = formatting.unit_of(last, "seconds")
    start_x = 12 + LETTER * max(len("rounds"), *(min(LABEL_LETTERS, len(lane)) for lane in lanes), 0)
    x = Axis(ticks(0.0, last / size, 10), start_x, RIGHT)
    bottom = TOP + LANE * (1 + len(lanes))
    content = [
        _rules(x, bottom, f"{clock_kind(run)} time of the rounds, {unit}"),
        *_lane_names(["rounds", *lanes], start_x),
        *(_round(round_, spans[round_.round], x, size) for round_ in run.rounds if round_.round in spans),
        *_parts(run, spans, {lane: index for index, lane in enumerate(lanes, 1)}, names, (x, size)),
    ]
    return element(
        "svg",
        content,
        viewBox=f"0 0 {WIDTH} {bottom + AXIS}",
        role="img",
        aria_label="timeline of rounds and devices",
        class_="timeline",
    )


def _rules(x: Axis, bottom: float, name: str) -> Markup:
    strokes = "".join(f"M{number(x.at(tick))} {TOP}V{bottom + 4}" for tick in x.ticks)
    texts = [element("text", tick_label(tick), x=x.at(tick), y=bottom + 16, text_anchor="middle") for tick in x.ticks]
    named = element("text", name, x=(x.start + x.end) / 2, y=bottom + 30, text_anchor="middle", class_="name")
    return join([element("path", d=strokes, class_="rule"), *texts, named])


def _lane_names(lanes: Sequence[str], start_x: float) -> list[Markup]:
    return [
        element("text", lane[:LABEL_LETTERS], x=start_x - 6, y=TOP + index * LANE + BAR - 2, text_anchor="end")
        for index, lane in enumerate(lanes)
    ]


def _round(round_: RoundDigest, span: TimeSpan, x: Axis, size: float) -> Markup:
    start, end = x.at(span.start / size), x.at(span.end / size)
    title = (
        f"round {round_.round}, {round_.outcome}: {formatting.format_amount(Amount(value=round_.seconds), 'seconds')}"
    )
    width = max(0.5, end - start - 1)
    rect = element("rect", element("title", title), x=start, y=TOP, width=width, height=BAR, class_=round_.outcome)
    if end - start < NUMBER:
        return rect
    middle = (start + end) / 2
    return join([rect, element("text", str(round_.round), x=middle, y=TOP + BAR - 2, text_anchor="middle")])


def _parts(
    run: Digest,
    spans: Mapping[int, TimeSpan],
    lanes: Mapping[str, int],
    names: Sequence[str],
    across: tuple[Axis, float],
) -> list[Markup]:
    x, size = across
    paths: dict[str, list[str]] = {}
    for task in run.tasks if lanes else []:
        y = TOP + lanes[task.device] * LANE
        for name, span in task_spans(task, spans[task.round], names) if task.round in spans else ():
            start, end = (number(x.at(second / size)) for second in (span.start, span.end))
            paths.setdefault(name, []).append(f"M{start} {y}H{end}v{BAR}H{start}z")
    return [
        element("path", element("title", PART_LABELS.get(name, name)), d="".join(segments), class_=name)
        for name, segments in paths.items()
    ]
