"""Report section: timeline of rounds with each device's download, compute, upload and wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from edge_server.record.amounts import Amount
from edge_server.report import formatting
from edge_server.report.axes import Axis, ticks
from edge_server.report.digest import Digest, TaskDigest
from edge_server.report.html import clean, render
from edge_server.report.sections.time_energy import PART_LABELS, activities

WIDTH, RIGHT, TOP = 1200, 1190.0, 4
LANE, BAR = 18, 12
LABEL_LETTERS, LETTER = 24, 6.4
MOST_LANES, MOST_TASKS = 60, 2_000


class TimeSpan(NamedTuple):
    """Seconds of a run, from `start` to `end`."""

    start: float
    end: float


def timeline(run: Digest) -> Markup:
    """Return the timeline of rounds and of each device's activities."""
    spans = round_spans(run)
    last = max((span.end for span in spans.values()), default=0.0)
    if last <= 0:
        return Markup("<p>No round has ended.</p>")
    lanes, names = [device.device for device in run.devices], [*activities(run), "waiting"]
    note = f"{len(lanes)} devices in {len(run.rounds)} rounds are too many to show each; only rounds are drawn."
    if len(lanes) > MOST_LANES or len(run.tasks) > MOST_TASKS:
        lanes = []
    unit, size = formatting.unit_of(last, "seconds")
    start_x = 12 + LETTER * max(len("rounds"), *(min(LABEL_LETTERS, len(lane)) for lane in lanes), 0)
    x = Axis(ticks(0.0, last / size, 10), start_x, RIGHT)
    heights, paths = {lane: TOP + index * LANE for index, lane in enumerate(lanes, 1)}, dict[str, str]()
    for task in run.tasks if lanes else []:
        for name, span in task_spans(task, spans[task.round], names) if task.round in spans else ():
            start, end = (clean(x.at(second / size)) for second in span)
            paths[name] = f"{paths.get(name, '')}M{start} {heights[task.device]}H{end}v{BAR}H{start}z"
    drawn = [round_ for round_ in run.rounds if round_.round in spans]
    return render(
        "timeline.html",
        x=x,
        width=WIDTH,
        top=TOP,
        bottom=TOP + LANE * (1 + len(lanes)),
        lane_height=LANE,
        bar_height=BAR,
        labels=PART_LABELS,
        note=note,
        across=f"{run.clock} time of the rounds, {unit}",
        lanes=["rounds", *(lane[:LABEL_LETTERS] for lane in lanes)],
        classes=[*((part, PART_LABELS.get(part, part)) for part in names), ("unknown", "not attributed")],
        rounds=[
            (round_, x.at(spans[round_.round].start / size), x.at(spans[round_.round].end / size)) for round_ in drawn
        ],
        seconds={round_.round: formatting.format_amount(Amount(value=round_.seconds), "seconds") for round_ in drawn},
        paths=paths,
    )


def round_spans(run: Digest) -> dict[int, TimeSpan]:
    """Return the time span of each round; rounds follow each other without gaps."""
    return {
        round_.round: TimeSpan(round_.until.seconds.value - round_.seconds, round_.until.seconds.value)
        for round_ in run.rounds
        if round_.until.seconds.value is not None
    }


def task_spans(task: TaskDigest, within: TimeSpan, names: Sequence[str]) -> Iterator[tuple[str, TimeSpan]]:
    """Yield the activities of a task in the order of `names`, cut at the end of its round."""
    start, amounts = within.start, [(name, getattr(task.seconds, name)) for name in names]
    for name, amount in amounts:
        end = min(within.end, start + (amount.value or 0.0))
        if end > start:
            yield name, TimeSpan(start, end)
        start = end
    if start < within.end and not all(amount.whole for _, amount in amounts):
        yield "unknown", TimeSpan(start, within.end)
