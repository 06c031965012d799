"""Figures of a closed round: loss, metrics, traffic and precision of its counted updates."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from edge_server.journal.compared import DEVICE_PREFIX
from edge_server.journal.compared_metric import ComparedMetric
from edge_server.journal.records import AnyRecord, Noted, RoundClosed, select
from edge_server.plan.plan import Plan
from edge_server.rounds.collect_updates import Gather
from shared.models.evaluate import Score
from shared.objectives.base import Objective
from shared.objectives.metric_sums import merge_sums
from shared.protocol.messages import Update
from shared.protocol.objective import CLASSIFICATION_SPEC, LOSS
from shared.protocol.plausible import finite_or_none
from shared.tensors.mixed_precision import PRECISION_BITS

log = logging.getLogger(__name__)

PRECISION_REASON = "precision"
FULL_BITS = 32


def build_round_record(
    gather: Gather,
    dropped: Counter[str],
    scored: Score | None,
    objective: Objective,
    *,
    enough: bool,
    personal: bool = False,
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
        metrics=dict(scored.metrics) if scored and scored.metrics else msgspec.UNSET,
        device_metrics=merge_device_metrics(objective, updates, personal=personal),
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


def record_metric(objective: Objective) -> ComparedMetric | msgspec.UnsetType:
    """Return the compared metric as a run's record names it; unset for a classification without a table `[task]`."""
    if objective.spec == CLASSIFICATION_SPEC:
        return msgspec.UNSET
    return ComparedMetric(name=objective.metric, direction=objective.direction)


def merge_device_metrics(
    objective: Objective, updates: Mapping[str, Update], *, personal: bool
) -> dict[str, float] | msgspec.UnsetType:
    """Return the metrics, and the loss, on the held-out examples of all devices; unset without any.

    Of a common model they are those of all examples together, by the sums that devices send; of personal models the
    means over the devices that have a value.
    """
    if objective.spec == CLASSIFICATION_SPEC:
        return msgspec.UNSET
    if not personal:
        return merge_sums(objective, (update.sums for update in updates.values())) or msgspec.UNSET
    metrics = dict[str, float]()
    for name in (*objective.metrics, LOSS):
        values = (update.metrics.get(f"{DEVICE_PREFIX}{name}") for update in updates.values())
        if known_values := [value for value in values if value is not None]:
            metrics[name] = math.fsum(known_values) / len(known_values)
    return metrics or msgspec.UNSET


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the weighted mean; None if all weights are zero."""
    weight = sum(w for _, w in pairs)
    return sum(value * w for value, w in pairs) / weight if weight else None


def noted_devices(records: Sequence[AnyRecord]) -> set[str]:
    """Return the devices of which a note says that they train in 32 bits although the plan asks for 16."""
    return {record.device for record in select(records, Noted) if record.reason == PRECISION_REASON}


def note_full_precision(plan: Plan, gather: Gather, noted: set[str]) -> list[Noted]:
    """Return and log a note for each device whose update was trained in 32 bits; none where the plan asks for these.

    Args:
        noted: Devices that have a note; those of this round are added.
    """
    precision, notes = plan.hyper.step.precision, []
    for device, record in sorted(gather.accepted.items()):
        if record.update.metrics.get(PRECISION_BITS) == FULL_BITS and device not in noted:
            noted.add(device)
            what = f"{device} ({record.update.trained_on}) does not compute in {precision} and trains in float32"
            log.warning("%s", what)
            notes.append(Noted(what=what, reason=PRECISION_REASON, device=device))
    return notes
