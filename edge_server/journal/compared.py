"""Compared metric in a run's records, and the best round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    RoundClosed,
    RoundOpened,
    RunOpened,
    first,
    select,
    valid_records,
)

DEVICE_PREFIX = "eval_"
"""Prefix of metrics of held-out examples among those of a device's update."""
MODEL_SEED = "model_seed"
"""Assigned value of all methods with personal models; `shared.algorithms.personal_model` defines it and loads torch."""


def compared_metric(records: Sequence[AnyRecord]) -> ComparedMetric:
    """Return the metric by which the models of a run are compared."""
    opening = first(records, RunOpened)
    return (opening.compared or ACCURACY) if opening else ACCURACY


def is_personal(records: Sequence[AnyRecord]) -> bool:
    """Return True if the devices of a run use personal models.

    Journals that lack the field show it by evaluations, and by the seed from which devices draw their first models.
    """
    opening = first(records, RunOpened)
    if opening and opening.personal:
        return True
    tasks = next((record.assignments for record in select(records, RoundOpened) if record.assignments), {})
    has_seed = any(MODEL_SEED in assignment.values for assignment in tasks.values())
    return has_seed or any(evaluation.personal for evaluation in select(records, Evaluated))


def server_value(closed: RoundClosed, metric: ComparedMetric) -> float | None:
    """Return the metric of a round's model on the server's test data."""
    return metric.value_of(closed.metrics, accuracy=closed.accuracy, loss=closed.test_loss)


def devices_value(record: RoundClosed | Evaluated, metric: ComparedMetric) -> float | None:
    """Return the metric on the devices' held-out examples, of a round or of an evaluation by all devices."""
    if isinstance(record, Evaluated):
        return metric.value_of(record.metrics, accuracy=record.accuracy)
    return metric.value_of(record.device_metrics, accuracy=record.device_accuracy)


def devices_values(records: Sequence[AnyRecord]) -> dict[int, float]:
    """Return the metric of the common model after each round on the devices' held-out examples.

    Of all devices where they evaluated it; else of those of the next round, which begins with it.
    """
    metric = compared_metric(records)
    closed = {end.round - 1: devices_value(end, metric) for end in valid_records(records, RoundClosed)}
    evaluations = valid_records(records, Evaluated)
    evaluated = {end.round: devices_value(end, metric) for end in evaluations if end.round is not None}
    return {number: value for number, value in (closed | evaluated).items() if value is not None}


def device_value(metrics: Mapping[str, float], metric: ComparedMetric) -> float | None:
    """Return the metric of one device among the metrics of its update."""
    return metrics.get(f"{DEVICE_PREFIX}{metric.name}")


def measured_rounds(records: Sequence[AnyRecord]) -> list[tuple[float, int]]:
    """Return (compared metric on the server's test data, round) of each valid round that was evaluated."""
    metric = compared_metric(records)
    measured = ((server_value(end, metric), end.round) for end in valid_records(records, RoundClosed))
    return [(value, number) for value, number in measured if value is not None]


def best_round(measured: Iterable[tuple[float, int]], metric: ComparedMetric) -> tuple[float, int] | None:
    """Return the (value, round) of the best model, the latest of equal ones; None if no round was evaluated."""
    return max(measured, key=lambda entry: (metric.rank(entry[0]), entry[1]), default=None)
