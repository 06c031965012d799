"""Comparison of a replay with its recorded run: a join by round and task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from edge_server.journal.records import AnyRecord, Gossiped, UpdateAccepted
from edge_server.record.amounts import Amount, quantile
from edge_server.record.index import RunRecord
from edge_server.report.digest import (
    FLEET_SCOPES,
    SPLIT_TRAFFIC,
    TRAFFIC_LABELS,
    Digest,
    Scope,
    TaskDigest,
    common_metric,
    known_fleet_scopes,
)
from edge_server.report.summarise import PARTS, digest_run

Model: TypeAlias = Literal["same", "different", "unknown"]
Skips: TypeAlias = Counter[tuple[str, str]]
"""Number of values that were not compared, by figure and reason."""

SCOPES: tuple[Scope, ...] = ("", "device", *FLEET_SCOPES)
ROUND = ("round_s", "loss", "test_loss", *(f"{scope}_accuracy".strip("_") for scope in SCOPES))
PATHS: Mapping[str, str] = {
    **{f"{part}_s": f"seconds.{part}" for part in PARTS},
    **{f"{part}_joules": f"joules.{part}" for part in PARTS},
    **{name: name for name in TRAFFIC_LABELS if name != "statistics_bytes"},
}
"""Place of each figure in a task."""
TASK = tuple(PATHS)
EXCHANGE = ("exchange_s", "exchange_joules", *SPLIT_TRAFFIC)
"""Figures of split sessions only."""
PAYLOAD = "payload_up_bytes"
GOSSIP = ("gossip_s", "gossip_bytes_up", "gossip_bytes_down")
"""Figures of a site's mixing with its neighbours after a round."""
FIGURES = (*ROUND, *GOSSIP, *TASK, PAYLOAD)
"""Order in reports: rounds, then tasks. Byte counts include frame headers, except for payloads."""


class Entry(NamedTuple):
    """Outcome and figures of a round, a task or a gossip; an unknown figure is None."""

    outcome: str
    figures: Mapping[str, float | None]


Entries: TypeAlias = Mapping[tuple[int, str], Entry]
"""Entries by round and device; the device is empty for those of a round."""


class GapPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a gap."""

    def spread(self, figure: str) -> ErrorSpread | None:
        """Return the error distribution of a figure; None if it was not compared."""
        spreads: list[ErrorSpread] = getattr(self, "spreads", [])
        return next((spread for spread in spreads if spread.figure == figure), None)


class Pair(GapPart, frozen=True, kw_only=True):
    """Recorded and replayed value of a figure; `device` is empty for figures of a round."""

    figure: str
    round: int
    device: str = ""
    recorded: float
    replayed: float

    @property
    def error(self) -> float | None:
        """Return (replayed - recorded) / recorded; None if only the recorded value is zero."""
        if self.recorded == self.replayed:
            return 0.0
        return (self.replayed - self.recorded) / self.recorded if self.recorded else None


class ErrorSpread(GapPart, frozen=True, kw_only=True):
    """Distribution of the relative errors of one figure; quantiles are of absolute values.

    `exact` counts the errors that are zero, `boundless` the pairs in which only the recorded value is zero, which have
    no relative error.
    """

    figure: str
    count: int
    exact: int
    boundless: int
    least_tenth: float
    median: float
    most_tenth: float
    most: float
    median_signed: float


class SkippedFigure(GapPart, frozen=True, kw_only=True):
    """Values that could not be compared, with the reason and their number."""

    what: str
    why: str
    count: int


class MatchCount(GapPart, frozen=True, kw_only=True):
    """Number of compared payloads and of those with identical bits."""

    same: int
    of: int


class Gap(GapPart, frozen=True, kw_only=True):
    """Difference between a recorded run and its replay.

    Attributes:
        rounds: Number of compared rounds.
        model: Whether the final parameters have identical bits; `why`: the reason if that is unknown.
        starts, updates: Start parameters sent to devices, payloads sent by them.
        pairs: Figures known in both runs.
    """

    recorded: str
    replayed: str
    rounds: int
    model: Model = "unknown"
    why: str = ""
    starts: MatchCount
    updates: MatchCount
    pairs: list[Pair]
    spreads: list[ErrorSpread]
    skipped: list[SkippedFigure]


def compare_runs(
    recorded: Sequence[AnyRecord], replayed: Sequence[AnyRecord], model: Model = "unknown", why: str = ""
) -> Gap:
    """Compare a replay with its recorded run; `model` and `why` are those of the gap.

    Raises:
        ConfigError: A journal lacks the start of its run.
    """
    runs = RunRecord(recorded), RunRecord(replayed)
    digests = digest_run(recorded), digest_run(replayed)
    skipped: Skips = Counter()
    updates = [{key: timed.record for key, timed in run.updates.items()} for run in runs]
    both = sorted(updates[0].keys() & updates[1].keys())
    sent = [key for key in both if any(of_run[key].update.params for of_run in updates)]
    gossips = [{(number, ""): _gossip_entry(gossip) for number, gossip in run.gossips.items()} for run in runs]
    pairs = [
        *join_entries("round", _round_entries(digests), skipped),
        *join_entries("task", _task_entries(digests), skipped),
        *join_entries("gossip", gossips, skipped),
        *join_entries("update", [{key: _payload_entry(of_run[key]) for key in sent} for of_run in updates], skipped),
    ]
    starts = ((updates[0][key].update.start, updates[1][key].update.start) for key in both)
    sent_params = ((updates[0][key].update.params, updates[1][key].update.params) for key in sent)
    payloads = ((first.digest, second.digest) for first, second in sent_params if first and second)
    return Gap(
        recorded=digests[0].run,
        replayed=digests[1].run,
        rounds=sum(pair.figure == "round_s" for pair in pairs),
        model=model,
        why=why,
        starts=_count_matches(starts),
        updates=_count_matches(payloads),
        pairs=pairs,
        spreads=error_spreads(pairs, ordered_figures(pairs)),
        skipped=[SkippedFigure(what=what, why=why_, count=count) for (what, why_), count in sorted(skipped.items())],
    )


def error_spreads(pairs: Sequence[Pair], figures: Iterable[str]) -> list[ErrorSpread]:
    """Return the error distribution of each figure that has pairs."""
    by_figure: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_figure.setdefault(pair.figure, []).append(pair)
    return [error_spread(name, by_figure[name]) for name in figures if name in by_figure]


def error_spread(figure: str, pairs: Sequence[Pair]) -> ErrorSpread:
    """Return the error distribution of a figure's pairs."""
    signed = sorted(pair.error for pair in pairs if pair.error is not None)
    sizes = sorted(map(abs, signed))
    least_tenth, median, most_tenth, most = (quantile(sizes, at) if sizes else 0.0 for at in (0.1, 0.5, 0.9, 1.0))
    return ErrorSpread(
        figure=figure,
        count=len(pairs),
        exact=sum(pair.error == 0 for pair in pairs),
        boundless=len(pairs) - len(sizes),
        least_tenth=least_tenth,
        median=median,
        most_tenth=most_tenth,
        most=most,
        median_signed=quantile(signed, 0.5) if signed else 0.0,
    )


def join_entries(what: str, runs: Iterable[Entries], skipped: Skips) -> Iterator[Pair]:
    """Yield the pairs of figures of entries that both runs have with the same outcome; count all others as skipped."""
    recorded, replayed = runs
    for key in sorted(recorded.keys() | replayed.keys()):
        if key not in recorded or key not in replayed:
            skipped[what, f"only {'recorded' if key in recorded else 'replayed'}"] += 1
            continue
        before, after = recorded[key], replayed[key]
        if before.outcome != after.outcome:
            skipped[what, f"recorded as {before.outcome}, replayed as {after.outcome}"] += 1
            continue
        for figure, value in before.figures.items():
            other = after.figures[figure]
            if value is not None and other is not None:
                yield Pair(figure=figure, round=key[0], device=key[1], recorded=value, replayed=other)
            else:
                place = "in neither run" if value is other else "only recorded" if other is None else "only replayed"
                skipped[figure, f"known {place}"] += 1


def _round_entries(runs: tuple[Digest, Digest]) -> list[Entries]:
    """Return the figures of rounds; the compared metric takes the place of the accuracy."""
    metric, fleet = common_metric(runs), known_fleet_scopes(runs)
    scopes = [scope for scope in SCOPES if scope not in FLEET_SCOPES or scope in fleet] if metric else []
    names = {f"{scope}_{metric.name}".removeprefix("_"): scope for scope in scopes} if metric else {}
    return [
        {
            (row.round, ""): Entry(
                row.outcome,
                {"round_s": row.seconds, "loss": row.loss, "test_loss": row.test_loss}
                | {name: row.metric_value(scope) for name, scope in names.items()},
            )
            for row in run.rounds
        }
        for run in runs
    ]


def _task_entries(runs: tuple[Digest, Digest]) -> list[Entries]:
    is_split = any(run.split for run in runs)
    paths = {name: path for name, path in PATHS.items() if is_split or name not in EXCHANGE}

    def entry(task: TaskDigest) -> Entry:
        amounts: dict[str, Amount] = {name: attrgetter(path)(task) for name, path in paths.items()}
        figures = {name: amount.value if amount.whole else None for name, amount in amounts.items()}
        return Entry(task.arrival, figures)

    return [{(task.round, task.device): entry(task) for task in run.tasks} for run in runs]


def _gossip_entry(gossip: Gossiped) -> Entry:
    values = gossip.seconds, float(sum(gossip.bytes_up.values())), float(sum(gossip.bytes_down.values()))
    return Entry(f"with {', '.join(sorted(gossip.on)) or 'nobody'}", dict(zip(GOSSIP, values, strict=True)))


def _payload_entry(accepted: UpdateAccepted) -> Entry:
    params = accepted.update.params
    return Entry("", {PAYLOAD: float(params.size) if params else None})


def ordered_figures(pairs: Iterable[Pair], after: Sequence[str] = ()) -> list[str]:
    """Return the figures in the order of reports: those of rounds, compared metrics, the others, and `after`."""
    others = dict.fromkeys(pair.figure for pair in pairs if pair.figure not in {*FIGURES, *after})
    return [*ROUND, *others, *(name for name in FIGURES if name not in ROUND), *after]


def _count_matches(pairs: Iterable[tuple[bytes, bytes]]) -> MatchCount:
    matches = [recorded == replayed for recorded, replayed in pairs if recorded and replayed]
    return MatchCount(same=sum(matches), of=len(matches))
