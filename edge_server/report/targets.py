"""Target accuracies: the time, energy and traffic that runs needed to reach them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edge_server.report.digest import Amount, Digest, RoundDigest
from shared.tensors.counts import floor_share

STEPS_BELOW_BEST = (0.0, 0.05, 0.1)
"""Distances of the default targets below the best accuracy that every run reached."""


def round_reaching(run: Digest, target: float) -> RoundDigest | None:
    """Return the first round whose model reached an accuracy, or None."""
    return next((round_ for round_ in run.rounds if round_.accuracy is not None and round_.accuracy >= target), None)


def best_accuracy(run: Digest) -> float | None:
    """Return the highest accuracy of a run's model, or None if it was never evaluated."""
    return max((round_.accuracy for round_ in run.rounds if round_.accuracy is not None), default=None)


def last_evaluated(run: Digest) -> RoundDigest | None:
    """Return the last round whose model was evaluated, or None."""
    return next((round_ for round_ in reversed(run.rounds) if round_.accuracy is not None), None)


def default_targets(runs: Sequence[Digest]) -> list[float]:
    """Return default targets: the highest whole percent that every run reached, and lower ones."""
    best_accuracies = [best for run in runs if (best := best_accuracy(run)) is not None]
    if not best_accuracies:
        return []
    common = floor_share(100, min(best_accuracies)) / 100
    return [round(common - lower, 2) for lower in STEPS_BELOW_BEST if common - lower > 0]


class CostToTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a run had used when its model first reached an accuracy.

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


def costs_to_targets(runs: Sequence[Digest], accuracies: Sequence[float]) -> list[CostToTarget]:
    """Return the cost of each run to each accuracy; no accuracies stand for the default `default_targets`."""
    return [_cost_to_target(run, target) for target in accuracies or default_targets(runs) for run in runs]


def _cost_to_target(run: Digest, target: float) -> CostToTarget:
    round_ = round_reaching(run, target)
    if round_ is None:
        return CostToTarget(run=run.run, target=target)
    until = round_.until
    return CostToTarget(
        run=run.run, target=target, round=round_.round, seconds=until.seconds, joules=until.joules, bytes=until.bytes
    )
