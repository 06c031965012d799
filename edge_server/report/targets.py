"""Time, energy and traffic that runs need to reach target values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.record.amounts import Amount
from edge_server.report.digest import Digest, RoundDigest, common_metric
from shared.tensors.counts import floor_share

STEPS_BELOW_BEST = (0.0, 0.05, 0.1)
"""Distances of the default targets below the best value that every run reached: of an accuracy in shares, of another
metric relative to that value."""
DIGITS = 3
"""Significant digits of the default targets of other metrics."""


def round_reaching(run: Digest, target: float) -> RoundDigest | None:
    """Return the first round whose model reached an accuracy or other compared metric, or None."""
    rounds = ((round_, round_.metric_value()) for round_ in run.rounds)
    return next((round_ for round_, value in rounds if value is not None and run.metric.reaches(value, target)), None)


def best_value(run: Digest) -> float | None:
    """Return the best accuracy, or other compared metric, of a run's model, or None if it was never evaluated."""
    values = (value for round_ in run.rounds if (value := round_.metric_value()) is not None)
    return max(values, key=run.metric.rank, default=None)


def last_evaluated(run: Digest) -> RoundDigest | None:
    """Return the last round whose model was evaluated, or None."""
    return next((round_ for round_ in reversed(run.rounds) if round_.metric_value() is not None), None)


def default_targets(runs: Sequence[Digest]) -> list[float]:
    """Return default targets: the best value that every run reached, rounded, and worse ones.

    Accuracies are whole percents. There are none for runs that are compared by different metrics.
    """
    best_values = [best for run in runs if (best := best_value(run)) is not None]
    metric = common_metric(runs)
    if not best_values or metric is None:
        return []
    common = min(best_values, key=metric.rank)
    if metric == ACCURACY:
        common = floor_share(100, common) / 100
        return [round(common - lower, 2) for lower in STEPS_BELOW_BEST if common - lower > 0]
    return list(dict.fromkeys(_round_to_worse(common, lower, metric) for lower in STEPS_BELOW_BEST))


def _round_to_worse(value: float, step: float, metric: ComparedMetric) -> float:
    """Return a value that is worse by a relative step, rounded towards worse ones."""
    worse = metric.rank(value) - step * abs(value)
    if not worse:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(abs(worse)))
    return metric.rank(round(math.floor(worse * 10.0**digits) / 10.0**digits, max(digits, 0)))


class CostToTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a run had used when its model first reached a value of the compared metric.

    Attributes:
        round: First round that reached it; None if none did, and then the amounts are empty.
        bytes: Frames, up and down.
    """

    run: str
    target: float
    round: int | None = None
    seconds: Amount = Amount()
    joules: Amount = Amount()
    bytes: Amount = Amount()


def costs_to_targets(runs: Sequence[Digest], targets: Sequence[float]) -> list[CostToTarget]:
    """Return the cost of each run to each target; no targets stand for those of `default_targets`."""
    costs = []
    for target in targets or default_targets(runs):
        for run in runs:
            fields: dict[str, Any] = {}
            if round_ := round_reaching(run, target):
                fields = {name: getattr(round_.until, name) for name in ("seconds", "joules", "bytes")}
                fields["round"] = round_.round
            costs.append(CostToTarget(run=run.run, target=target, **fields))
    return costs
