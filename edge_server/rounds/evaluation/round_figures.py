"""What a round came to: the figures of the updates that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from edge_server.journal.recordable import finite_or_none
from edge_server.journal.records import RoundClosed
from edge_server.rounds.collect_updates import Gather
from shared.models.evaluate import Score
from shared.protocol.messages import Update


def close_record(
    gather: Gather, dropped: Counter[str], scored: Score | None, *, enough: bool, personal: bool = False
) -> RoundClosed:
    """Return what is recorded of a round, but for its seconds.

    Args:
        dropped: What was refused before it reached the round, counted by reason.
        scored: The aggregated model on the server's test data, if it was tried.
        enough: Whether there is an aggregated model.
        personal: Whether each device evaluates parameters of its own.
    """
    came = sorted(gather.accepted.items())
    updates = {device: record.update for device, record in came if device not in gather.failed}
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
        bytes_up={device: record.bytes_up for device, record in came},
        bytes_down={d: update.cost.bytes_down for d, update in updates.items() if update.cost.bytes_down is not None},
    )


def accuracies(updates: dict[str, Update]) -> list[tuple[float, float]]:
    """Return what devices measured on their held-out examples, with the number of these."""
    found = (update.metrics for update in updates.values())
    return [(one["eval_accuracy"], one.get("eval_examples", 1.0)) for one in found if "eval_accuracy" in one]


def mean_accuracy(updates: dict[str, Update], *, personal: bool) -> float | None:
    """Return the mean of what devices measured: of one model weighted by examples, of personal ones each as much."""
    found = accuracies(updates)
    return weighted_mean([(accuracy, 1.0) for accuracy, _ in found] if personal else found)


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the weighted mean, None where nothing weighs anything."""
    weight = sum(w for _, w in pairs)
    return sum(value * w for value, w in pairs) / weight if weight else None
