"""Figures of a closed round: loss, accuracy and traffic of its counted updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from edge_server.journal.recordable import finite_or_none
from edge_server.journal.records import RoundClosed
from edge_server.rounds.collect_updates import Gather
from shared.models.evaluate import Score
from shared.protocol.messages import Update


def build_round_record(
    gather: Gather, dropped: Counter[str], scored: Score | None, *, enough: bool, personal: bool = False
) -> RoundClosed:
    """Return the record of a closed round, without its duration.

    Args:
        dropped: Counts of messages refused before they reached the round, by reason.
        scored: Score of the aggregated model on the server's test data, if evaluated.
        enough: Whether there is an aggregated model.
        personal: Whether each device evaluates its own parameters.
    """
    accepted = sorted(gather.accepted.items())
    updates = {device: record.update for device, record in accepted if device not in gather.failed}
    losses = [(update.loss, update.num_examples) for update in updates.values() if update.loss is not None]
    return RoundClosed(
        round=gather.number,
        outcome="aggregated" if enough else "missed",
        arrived=tuple(updates),
        failed=dict(sorted(gather.failed.items())),
        refused=dict(sorted((gather.refused + dropped).items())),
        loss=finite_or_none(weighted_mean(losses)),
        accuracy=scored.accuracy if scored else None,
        test_loss=finite_or_none(scored.loss if scored else None),
        class_accuracy=(scored and scored.by_class) or msgspec.UNSET,
        device_accuracy=mean_accuracy(updates, personal=personal),
        seconds=0.0,
        bytes_up={device: record.bytes_up for device, record in accepted},
        bytes_down={d: update.cost.bytes_down for d, update in updates.items() if update.cost.bytes_down is not None},
    )


def list_accuracies(updates: dict[str, Update]) -> list[tuple[float, float]]:
    """Return (accuracy, number of examples) of each device's held-out examples."""
    measured = [update.metrics for update in updates.values() if "eval_accuracy" in update.metrics]
    return [(metrics["eval_accuracy"], metrics.get("eval_examples", 1.0)) for metrics in measured]


def mean_accuracy(updates: dict[str, Update], *, personal: bool) -> float | None:
    """Return the mean accuracy: weighted by examples for a common model, unweighted for personal ones."""
    pairs = list_accuracies(updates)
    return weighted_mean([(accuracy, 1.0) for accuracy, _ in pairs] if personal else pairs)


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the weighted mean; None if all weights are zero."""
    weight = sum(w for _, w in pairs)
    return sum(value * w for value, w in pairs) / weight if weight else None
