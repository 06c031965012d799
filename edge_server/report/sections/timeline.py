"""Rounds on a line of seconds, and below them what each device did: downloaded, computed, uploaded, waited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edge_server.report import formatting
from edge_server.report.charts import LABELS, Axis, legend, ticks
from edge_server.report.charts import label as tick_label
from edge_server.report.digest import Amount, Digest, RoundDigest, TaskDigest
from edge_server.report.html import Markup, element, joined, number
from edge_server.report.sections.spent import SAID, parts
from edge_server.report.tables import clock

WIDTH, RIGHT, TOP = 1200, 1190, 4
LANE, BAR = 18, 12
LETTER = 6.4
AXIS = 34
NUMBER = 20
"""Width in the drawing from which a round has its number."""
MOST_LANES, MOST_TASKS = 60, 2_000


@dataclass(frozen=True)
class Span:
    """From one second of the run to another."""

    start: float
    end: float


def timeline(run: Digest) -> Markup:
    """Return when each round and each device's parts of it were."""
    spans = round_spans(run)
    if not spans or max(span.end for span in spans.values()) <= 0:
        return element("p", "No round has ended.")
    lanes = [one.device for one in run.devices]
    few = len(lanes) <= MOST_LANES and len(run.tasks) <= MOST_TASKS
    said = f"{len(lanes)} devices in {len(run.rounds)} rounds are too many to show one by one: rounds alone are here."
    names = [*parts(run), "waiting"]
    keys = [(part, SAID.get(part, part)) for part in names] + [("unknown", "not told apart")]
    svg = _drawing(run, spans, lanes if few else [], names)
    return joined(
        legend(*keys) if few else element("p", said, class_="note"), element("div", svg, class_="wide", tabindex="0")
    )


def round_spans(run: Digest) -> dict[int, Span]:
    """Return when each round was, in seconds of the run's rounds: one begins where the one before it ended."""
    return {
        one.round: Span(one.until.seconds.value - one.seconds, one.until.seconds.value)
        for one in run.rounds
        if one.until.seconds.value is not None
    }


def task_spans(task: TaskDigest, within: Span, names: Sequence[str]) -> Iterator[tuple[str, Span]]:
    """Yield the parts of a task one after another, as long as its round lasts.

    Args:
        names: Parts in the order in which they happen.
    """
    start = within.start
    amounts = [(name, getattr(task.seconds, name)) for name in names]
    for name, amount in amounts:
        end = min(within.end, start + (amount.value or 0.0))
        if end > start:
            yield name, Span(start, end)
        start = end
    if start < within.end and not all(amount.whole for _, amount in amounts):
        yield "unknown", Span(start, within.end)


def _drawing(run: Digest, spans: Mapping[int, Span], lanes: Sequence[str], names: Sequence[str]) -> Markup:
    last = max(span.end for span in spans.values())
    unit, size = formatting.unit_of(last, "seconds")
    left = 12 + LETTER * max(len("rounds"), *(min(LABELS, len(lane)) for lane in lanes), 0)
    x = Axis(ticks(0.0, last / size, 10), left, RIGHT)
    bottom = TOP + LANE * (1 + len(lanes))
    content = [
        _rules(x, bottom, f"{clock(run)} time of the rounds, {unit}"),
        *_names(["rounds", *lanes], left),
        *(_round(one, spans[one.round], x, size) for one in run.rounds if one.round in spans),
        *_parts(run, spans, {lane: place for place, lane in enumerate(lanes, 1)}, names, (x, size)),
    ]
    return element(
        "svg",
        *content,
        viewBox=f"0 0 {WIDTH} {bottom + AXIS}",
        role="img",
        aria_label="timeline of rounds and devices",
        class_="timeline",
    )


def _rules(x: Axis, bottom: float, name: str) -> Markup:
    strokes = "".join(f"M{number(x.at(tick))} {TOP}V{bottom + 4}" for tick in x.ticks)
    texts = [element("text", tick_label(tick), x=x.at(tick), y=bottom + 16, text_anchor="middle") for tick in x.ticks]
    named = element("text", name, x=(x.start + x.end) / 2, y=bottom + 30, text_anchor="middle", class_="name")
    return joined(element("path", d=strokes, class_="rule"), *texts, named)


def _names(lanes: Sequence[str], left: float) -> list[Markup]:
    return [
        element("text", lane[:LABELS], x=left - 6, y=TOP + place * LANE + BAR - 2, text_anchor="end")
        for place, lane in enumerate(lanes)
    ]


def _round(one: RoundDigest, span: Span, x: Axis, size: float) -> Markup:
    """Return a round as a bar, with its number where there is room."""
    start, end = x.at(span.start / size), x.at(span.end / size)
    words = f"round {one.round}, {one.outcome}: {formatting.amount(Amount(value=one.seconds), 'seconds')}"
    width = max(0.5, end - start - 1)
    rect = element("rect", element("title", words), x=start, y=TOP, width=width, height=BAR, class_=one.outcome)
    if end - start < NUMBER:
        return rect
    middle = (start + end) / 2
    return joined(rect, element("text", str(one.round), x=middle, y=TOP + BAR - 2, text_anchor="middle"))


def _parts(
    run: Digest, spans: Mapping[int, Span], lanes: Mapping[str, int], names: Sequence[str], across: tuple[Axis, float]
) -> list[Markup]:
    """Return one path a part, over all devices and rounds."""
    x, size = across
    paths: dict[str, list[str]] = {}
    for task in run.tasks if lanes else []:
        y = TOP + lanes[task.device] * LANE
        for name, span in task_spans(task, spans[task.round], names) if task.round in spans else ():
            start, end = (number(x.at(second / size)) for second in (span.start, span.end))
            paths.setdefault(name, []).append(f"M{start} {y}H{end}v{BAR}H{start}z")
    return [
        element("path", element("title", SAID.get(name, name)), d="".join(found), class_=name)
        for name, found in paths.items()
    ]
