"""Metrics as sums that add over batches and devices.

Computed with numpy, so that boards without torch evaluate by the same code. A metric is a pair of functions: (outputs,
targets) -> vector of sums, and (sums) -> value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.protocol.objective import Kind

Array: TypeAlias = NDArray[Any]
Sums: TypeAlias = NDArray[np.float64]

SMOOTH = 1.0
"""Added to numerator and denominator of a Dice coefficient, so that an empty mask has a gradient."""
BINS, WIDEST_SCORE = 1024, 16.0
"""Bins of the score histograms of `auroc`, from -WIDEST_SCORE to WIDEST_SCORE; scores within a bin count as equal."""

_LABELS: frozenset[Kind] = frozenset({"classification", "multilabel", "segmentation", "custom"})
_NUMBERS: frozenset[Kind] = frozenset({"regression", "forecast", "anomaly", "custom"})
_SCORES: frozenset[Kind] = frozenset({"classification", "multilabel", "anomaly", "custom"})


@dataclass(frozen=True)
class Metric:
    """A metric of outputs and targets.

    Attributes:
        sums: (outputs of shape (N, ...), targets of shape (N, ...)) -> float64 vector that adds over examples.
        value: (sums) -> value; NaN where the examples do not define it, such as AUROC of one class.
        direction: Whether larger or smaller values are better.
        kinds: Kinds of task for which it makes sense; empty: any.
    """

    sums: Callable[[Array, Array], Sums]
    value: Callable[[Sums], float]
    direction: Literal["max", "min"] = "max"
    kinds: frozenset[Kind] = frozenset()


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else math.nan


def _classes(outputs: Array) -> tuple[int, Array]:
    """Return the number of classes, and the class that each example or pixel is assigned, flat."""
    return outputs.shape[1], outputs.argmax(1).reshape(-1)


def _hits_sums(outputs: Array, targets: Array) -> Sums:
    several = np.issubdtype(targets.dtype, np.floating)  # labels per example: a logit above 0 means yes
    hits = (outputs > 0) == (targets > 0) if several else outputs.argmax(1) == targets
    return np.array([hits.sum(), hits.size], dtype=np.float64)


def _counts_sums(outputs: Array, targets: Array) -> Sums:
    """Return counts of true positives, predicted and actual members of each class, as one vector."""
    if np.issubdtype(targets.dtype, np.floating):
        chosen, actual = (outputs > 0).astype(np.float64), (targets > 0).astype(np.float64)
        return np.concatenate([(chosen * actual).sum(0), chosen.sum(0), actual.sum(0)])
    classes, assigned = _classes(outputs)
    actual = targets.reshape(-1)
    hits = np.bincount(actual[assigned == actual], minlength=classes)[:classes]
    parts = (hits, np.bincount(assigned, minlength=classes), np.bincount(actual, minlength=classes)[:classes])
    return np.concatenate(parts).astype(np.float64)


def _mean_where(values: Array, holds: Array) -> float:
    return float(values[holds].mean()) if holds.any() else math.nan


def _balanced_accuracy(sums: Sums) -> float:
    hits, _, actual = sums.reshape(3, -1)
    return _mean_where(hits / np.maximum(actual, 1), actual > 0)


def _macro_f1(sums: Sums) -> float:
    hits, chosen, actual = sums.reshape(3, -1)
    return _mean_where(2 * hits / np.maximum(chosen + actual, 1), chosen + actual > 0)


def _iou(sums: Sums) -> float:
    hits, chosen, actual = sums.reshape(3, -1)
    union = chosen + actual - hits
    return _mean_where(hits / np.maximum(union, 1), union > 0)


def _score_bins(scores: Array) -> Array:
    """Return the bin of each score, the same on every device."""
    shares = (np.clip(scores.astype(np.float64), -WIDEST_SCORE, WIDEST_SCORE) + WIDEST_SCORE) / (2 * WIDEST_SCORE)
    return np.minimum((shares * BINS).astype(np.int64), BINS - 1)


def _auroc_sums(outputs: Array, targets: Array) -> Sums:
    """Return histograms of the scores of negative and positive examples."""
    if outputs.ndim > 1 and outputs.shape[1] == 2 and targets.ndim == 1:  # noqa: PLR2004 - logits of two classes
        scores = outputs[:, 1] - outputs[:, 0]
    else:
        scores = outputs
    scores, positive = scores.reshape(-1), targets.reshape(-1) > 0
    bins = _score_bins(scores)
    parts = [np.bincount(bins[mask], minlength=BINS) for mask in (~positive, positive)]
    return np.concatenate(parts).astype(np.float64)


def _auroc(sums: Sums) -> float:
    """Return the probability that a positive example scores above a negative one; ties within a bin count half."""
    negative, positive = sums.reshape(2, -1)
    below = np.concatenate([[0.0], np.cumsum(negative)[:-1]])
    return _ratio(float((positive * (below + negative / 2)).sum()), float(negative.sum() * positive.sum()))


def _errors(outputs: Array, targets: Array) -> Array:
    return (targets.astype(np.float64) - outputs.reshape(targets.shape).astype(np.float64)).reshape(-1)


def _mae_sums(outputs: Array, targets: Array) -> Sums:
    errors = _errors(outputs, targets)
    return np.array([np.abs(errors).sum(), errors.size])


def _squares_sums(outputs: Array, targets: Array) -> Sums:
    errors = _errors(outputs, targets)
    return np.array([(errors**2).sum(), errors.size])


def _r2_sums(outputs: Array, targets: Array) -> Sums:
    """Return per output: squared errors, count, mean of the targets and squared deviations from it, as plain sums."""
    wide = targets.astype(np.float64).reshape(len(targets), -1)
    errors = wide - outputs.reshape(wide.shape).astype(np.float64)
    count = np.full(wide.shape[1], float(len(wide)))
    return np.concatenate([(errors**2).sum(0), count, wide.sum(0), (wide**2).sum(0)])


def _r2(sums: Sums) -> float:
    """Return the mean over outputs of 1 - squared error / squared deviation of the targets from their mean."""
    errors, count, total, squares = sums.reshape(4, -1)
    deviations = squares - total**2 / np.maximum(count, 1)
    return _mean_where(1 - errors / np.where(deviations > 0, deviations, 1), deviations > 0)


def quantile_loss(q: float = 0.5) -> Metric:
    """Build the mean quantile (pinball) loss of level q."""

    def sums(outputs: Array, targets: Array) -> Sums:
        errors = _errors(outputs, targets)
        return np.array([np.maximum(q * errors, (q - 1) * errors).sum(), errors.size])

    return Metric(sums, _mean, "min", _NUMBERS)


def _mean(sums: Sums) -> float:
    return _ratio(float(sums[0]), float(sums[1]))


def builders() -> dict[str, Callable[..., Any]]:
    """Return the builders of the built-in metrics by name."""
    return {
        "accuracy": lambda: Metric(_hits_sums, _mean, "max", _LABELS),
        "auroc": lambda: Metric(_auroc_sums, _auroc, "max", _SCORES),
        "balanced_accuracy": lambda: Metric(_counts_sums, _balanced_accuracy, "max", _LABELS),
        "iou": lambda: Metric(_counts_sums, _iou, "max", _LABELS),
        "macro_f1": lambda: Metric(_counts_sums, _macro_f1, "max", _LABELS),
        "mae": lambda: Metric(_mae_sums, _mean, "min", _NUMBERS),
        "quantile_loss": quantile_loss,
        "r2": lambda: Metric(_r2_sums, _r2, "max", _NUMBERS),
        "rmse": lambda: Metric(_squares_sums, lambda sums: math.sqrt(_mean(sums)), "min", _NUMBERS),
    }
