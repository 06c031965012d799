"""Comparison of a replay with its recorded run, by round and task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, TypeVar

import msgspec

from edge_server.journal.records import AnyRecord, Gossiped, UpdateAccepted, drop_void
from edge_server.report.digest import (
    FLEET_SCOPES,
    Amount,
    Digest,
    RoundDigest,
    Scope,
    TaskDigest,
    common_metric,
    known_fleet_scopes,
    quantile,
)
from edge_server.report.summarise import digest_run

Model: TypeAlias = Literal["same", "different", "unknown"]
Skips: TypeAlias = Counter[tuple[str, str]]
"""Number of values that were not compared, by figure and reason."""
K = TypeVar("K", int, tuple[int, str])
T = TypeVar("T")

ROUND: Mapping[str, Callable[[RoundDigest], float | None]] = {
    "round_s": lambda digest: digest.seconds,
    "loss": lambda digest: digest.loss,
    "test_loss": lambda digest: digest.test_loss,
    "accuracy": lambda digest: digest.accuracy,
    "device_accuracy": lambda digest: digest.device_accuracy,
    "global_accuracy": lambda digest: digest.global_accuracy,
    "fleet_accuracy": lambda digest: digest.fleet_accuracy,
}
SCOPES: tuple[Scope, ...] = ("", "device", *FLEET_SCOPES)
TASK: Mapping[str, Callable[[TaskDigest], float | None]] = {
    "download_s": lambda task: _known_value(task.seconds.download),
    "compute_s": lambda task: _known_value(task.seconds.compute),
    "exchange_s": lambda task: _known_value(task.seconds.exchange),
    "upload_s": lambda task: _known_value(task.seconds.upload),
    "download_joules": lambda task: _known_value(task.joules.download),
    "compute_joules": lambda task: _known_value(task.joules.compute),
    "exchange_joules": lambda task: _known_value(task.joules.exchange),
    "upload_joules": lambda task: _known_value(task.joules.upload),
    "bytes_down": lambda task: _known_value(task.bytes_down),
    "bytes_up": lambda task: _known_value(task.bytes_up),
    "gradient_bytes": lambda task: _known_value(task.gradient_bytes),
    "features_bytes": lambda task: _known_value(task.features_bytes),
}
# Figures of split sessions only.
EXCHANGE = ("exchange_s", "exchange_joules", "gradient_bytes", "features_bytes")
PAYLOAD = "payload_up_bytes"
GOSSIP: Mapping[str, Callable[[Gossiped], float]] = {
    "gossip_s": lambda gossip: gossip.seconds,
    "gossip_bytes_up": lambda gossip: float(sum(gossip.bytes_up.values())),
    "gossip_bytes_down": lambda gossip: float(sum(gossip.bytes_down.values())),
}
"""Figures of a site's mixing with its neighbours after a round."""
FIGURES = (*ROUND, *GOSSIP, *TASK, PAYLOAD)
"""Order in reports: rounds, then tasks. Byte counts include frame headers, except for payloads."""


class GapPart(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a gap."""


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

    Attributes:
        exact: Number of errors that are zero.
        boundless: Number of pairs in which only the recorded value is zero, so that there is no relative error.
        median_signed: Negative if the replay's values are lower.
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
        recorded: Name of the recorded run.
        replayed: Name of the replay.
        rounds: Number of compared rounds.
        model: Whether the final parameters have identical bits.
        why: Reason why `model` is unknown.
        starts: Start parameters sent to devices.
        updates: Payloads sent by devices.
        pairs: Figures known in both runs.
        spreads: One per compared figure.
        skipped: Values that were not compared.
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

    def spread(self, figure: str) -> ErrorSpread | None:
        """Return the error distribution of a figure; None if it was not compared."""
        return next((spread for spread in self.spreads if spread.figure == figure), None)


def compare_runs(
    recorded: Sequence[AnyRecord], replayed: Sequence[AnyRecord], model: Model = "unknown", why: str = ""
) -> Gap:
    """Compare a replay with its recorded run.

    Args:
        recorded: Journal of the run.
        replayed: Journal of the replay.
        model: Whether the final parameters have identical bits.
        why: Reason why that is unknown.

    Raises:
        ConfigError: A journal lacks the start of its run.
    """
    before, after = digest_run(recorded), digest_run(replayed)
    skipped: Skips = Counter()
    pairs = [*_rounds(before, after, skipped), *_tasks(before, after, skipped)]
    pairs += _gossips(recorded, replayed, skipped)
    recorded_updates, replayed_updates = _updates(recorded), _updates(replayed)
    both = sorted(recorded_updates.keys() & replayed_updates.keys())
    sent = [key for key in both if recorded_updates[key].update.params or replayed_updates[key].update.params]
    for key in sent:
        pairs += _pair_figures(PAYLOAD, key, (_size(recorded_updates[key]), _size(replayed_updates[key])), skipped)
    return Gap(
        recorded=before.run,
        replayed=after.run,
        rounds=sum(pair.figure == "round_s" for pair in pairs),
        model=model,
        why=why,
        starts=_count_matches((recorded_updates[key].update.start, replayed_updates[key].update.start) for key in both),
        updates=_count_matches((_digest(recorded_updates[key]), _digest(replayed_updates[key])) for key in sent),
        pairs=pairs,
        spreads=[
            error_spread(name, matching)
            for name in ordered_figures(pairs)
            if (matching := [pair for pair in pairs if pair.figure == name])
        ],
        skipped=[SkippedFigure(what=what, why=why_, count=count) for (what, why_), count in sorted(skipped.items())],
    )


def error_spread(figure: str, pairs: Sequence[Pair]) -> ErrorSpread:
    """Return the error distribution of a figure's pairs."""
    signed = sorted(pair.error for pair in pairs if pair.error is not None)
    sizes = sorted(map(abs, signed))
    at = [quantile(sizes, share) if sizes else 0.0 for share in (0.1, 0.5, 0.9, 1.0)]
    return ErrorSpread(
        figure=figure,
        count=len(pairs),
        exact=sum(pair.error == 0 for pair in pairs),
        boundless=len(pairs) - len(sizes),
        least_tenth=at[0],
        median=at[1],
        most_tenth=at[2],
        most=at[3],
        median_signed=quantile(signed, 0.5) if signed else 0.0,
    )


def _rounds(before: Digest, after: Digest, skipped: Skips) -> Iterator[Pair]:
    recorded_rounds, replayed_rounds = ({row.round: row for row in run.rounds} for run in (before, after))
    figures = _round_figures(before, after)
    for number, recorded, replayed in _match_keys(
        "round", recorded_rounds, replayed_rounds, lambda recorded: recorded.outcome, skipped
    ):
        for figure in figures:
            read = figures[figure]
            yield from _pair_figures(figure, (number, ""), (read(recorded), read(replayed)), skipped)


def _round_figures(before: Digest, after: Digest) -> dict[str, Callable[[RoundDigest], float | None]]:
    """Return the figures of a round by name; the compared metric takes the place of the accuracy."""
    metric, known = common_metric([before, after]), known_fleet_scopes([before, after])
    scopes = [scope for scope in SCOPES if scope not in FLEET_SCOPES or scope in known]
    accuracies = {f"{scope}_accuracy".strip("_") for scope in SCOPES}
    figures = {name: read for name, read in ROUND.items() if name not in accuracies}
    if metric is None:
        return figures
    names = {f"{scope}_{metric.name}".removeprefix("_"): scope for scope in scopes}
    return figures | {name: partial(RoundDigest.metric_value, scope=scope) for name, scope in names.items()}


def ordered_figures(pairs: Iterable[Pair], after: Sequence[str] = ()) -> list[str]:
    """Return the figures in the order of reports: those of `FIGURES`, and the compared metrics after the rounds' own.

    Args:
        after: Further figures that follow.
    """
    others = dict.fromkeys(pair.figure for pair in pairs if pair.figure not in {*FIGURES, *after})
    return [*ROUND, *others, *(name for name in FIGURES if name not in ROUND), *after]


def _tasks(before: Digest, after: Digest, skipped: Skips) -> Iterator[Pair]:
    recorded_tasks, replayed_tasks = ({(row.round, row.device): row for row in run.tasks} for run in (before, after))
    figures = [name for name in TASK if name not in EXCHANGE or before.split or after.split]
    for key, recorded, replayed in _match_keys(
        "task", recorded_tasks, replayed_tasks, lambda recorded: recorded.arrival, skipped
    ):
        for figure in figures:
            yield from _pair_figures(figure, key, (TASK[figure](recorded), TASK[figure](replayed)), skipped)


def _gossips(recorded: Sequence[AnyRecord], replayed: Sequence[AnyRecord], skipped: Skips) -> Iterator[Pair]:
    recorded_gossips, replayed_gossips = (
        {record.round: record for record in those if isinstance(record, Gossiped)} for those in (recorded, replayed)
    )
    for number, before, after in _match_keys("gossip", recorded_gossips, replayed_gossips, _describe_edges, skipped):
        for figure, of in GOSSIP.items():
            yield Pair(figure=figure, round=number, recorded=of(before), replayed=of(after))


def _describe_edges(gossip: Gossiped) -> str:
    return f"with {', '.join(sorted(gossip.on)) or 'nobody'}"


def _match_keys(
    what: str, mine: Mapping[K, T], other: Mapping[K, T], ended: Callable[[T], str], skipped: Skips
) -> Iterator[tuple[K, T, T]]:
    """Yield the items that both runs have with the same outcome; count the others as skipped."""
    for key in sorted(mine.keys() | other.keys()):
        if key not in mine or key not in other:
            skipped[what, f"only {'recorded' if key in mine else 'replayed'}"] += 1
        elif ended(mine[key]) != ended(other[key]):
            skipped[what, f"recorded as {ended(mine[key])}, replayed as {ended(other[key])}"] += 1
        else:
            yield key, mine[key], other[key]


def _pair_figures(
    figure: str, key: tuple[int, str], values: tuple[float | None, float | None], skipped: Skips
) -> Iterable[Pair]:
    """Return the pair of two values; if one is unknown, count it as skipped and return nothing."""
    recorded, replayed = values
    if recorded is not None and replayed is not None:
        return [Pair(figure=figure, round=key[0], device=key[1], recorded=recorded, replayed=replayed)]
    runs = "in neither run" if recorded is replayed else "only recorded" if replayed is None else "only replayed"
    skipped[figure, f"known {runs}"] += 1
    return []


def _updates(records: Sequence[AnyRecord]) -> dict[tuple[int, str], UpdateAccepted]:
    return {
        (record.round, record.device): record for record in drop_void(records) if isinstance(record, UpdateAccepted)
    }


def _size(accepted: UpdateAccepted) -> float | None:
    return float(accepted.update.params.size) if accepted.update.params else None


def _digest(accepted: UpdateAccepted) -> bytes:
    return accepted.update.params.digest if accepted.update.params else b""


def _count_matches(pairs: Iterable[tuple[bytes, bytes]]) -> MatchCount:
    matches = [recorded == replayed for recorded, replayed in pairs if recorded and replayed]
    return MatchCount(same=sum(matches), of=len(matches))


def _known_value(amount: Amount) -> float | None:
    """Return an amount if all its parts are known."""
    return amount.value if amount.whole else None
