"""What runs took to reach an accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edge_server.report.digest import Amount, Digest, RoundDigest
from shared.tensors.counts import floor_share

LOWER = (0.0, 0.05, 0.1)
"""How far below the best accuracy that every run reached the targets lie that nobody has named."""


def round_reaching(run: Digest, target: float) -> RoundDigest | None:
    """Return the first round after which the model was at least so accurate, None where it never was."""
    return next((one for one in run.rounds if one.accuracy is not None and one.accuracy >= target), None)


def best_accuracy(run: Digest) -> float | None:
    """Return the highest accuracy of a run's model, None where it was never evaluated."""
    return max((one.accuracy for one in run.rounds if one.accuracy is not None), default=None)


def last_evaluated(run: Digest) -> RoundDigest | None:
    """Return the last round after which the model was evaluated."""
    return next((one for one in reversed(run.rounds) if one.accuracy is not None), None)


def targets(runs: Sequence[Digest]) -> list[float]:
    """Return whole percents that every run reached: the highest of them, and lower ones."""
    found = [one for run in runs if (one := best_accuracy(run)) is not None]
    if not found:
        return []
    common = floor_share(100, min(found)) / 100
    return [round(common - lower, 2) for lower in LOWER if common - lower > 0]


class CostToTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a run had taken when its model was first so accurate.

    Attributes:
        round: The first round after which it was; None where it never was, and then nothing else is known.
        bytes: Of frames, up and down.
    """

    run: str
    target: float
    round: int | None = None
    seconds: Amount = Amount()
    joules: Amount = Amount()
    bytes: Amount = Amount()


def comparison(runs: Sequence[Digest], wanted: Sequence[float]) -> list[CostToTarget]:
    """Return what each run took to each accuracy; none wanted for the usual `targets`."""
    return [_taken(run, target) for target in wanted or targets(runs) for run in runs]


def _taken(run: Digest, target: float) -> CostToTarget:
    one = round_reaching(run, target)
    if one is None:
        return CostToTarget(run=run.run, target=target)
    until = one.until
    return CostToTarget(
        run=run.run, target=target, round=one.round, seconds=until.seconds, joules=until.joules, bytes=until.bytes
    )
