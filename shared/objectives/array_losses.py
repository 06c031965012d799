"""Built-in losses on numpy arrays, for boards without torch; equal to `losses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shared.objectives.base import DEFAULT_LOSSES
from shared.objectives.metrics import SMOOTH, Array
from shared.protocol.objective import ObjectiveSpec


def loss_sum(spec: ObjectiveSpec, outputs: Array, targets: Array) -> float | None:
    """Return the sum of the losses over examples; None for a loss of the user, which needs torch.

    Args:
        outputs: Of shape (N, ...).
        targets: Of shape (N, ...).
    """
    name = spec.loss or DEFAULT_LOSSES[spec.kind]
    outputs = outputs.astype(np.float64)
    if name == "cross_entropy":
        losses = _cross_entropy(outputs, targets, spec.class_weights, spec.label_smoothing)
    elif name == "dice":
        losses = _dice(outputs, targets)
    elif elementwise := _elementwise_losses().get(name):
        losses = elementwise(outputs.reshape(targets.shape), targets.astype(np.float64), **spec.loss_options)
    else:
        return None
    return float(losses.reshape(len(targets), -1).mean(1).sum())


def _log_shares(outputs: Array) -> Array:
    shifted = outputs - outputs.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _cross_entropy(outputs: Array, targets: Array, weights: tuple[float, ...], smoothing: float) -> Array:
    logs = _log_shares(outputs)
    weight = np.array(weights or (1.0,) * outputs.shape[1])
    chosen = -np.take_along_axis(logs, targets[:, None], 1)[:, 0] * weight[targets]
    if not smoothing:
        return np.asarray(chosen)
    every = -(logs * weight.reshape(1, -1, *(1,) * (outputs.ndim - 2))).mean(axis=1)
    return np.asarray((1 - smoothing) * chosen + smoothing * every)


def _dice(outputs: Array, targets: Array) -> Array:
    classes = outputs.shape[1]
    shares = np.exp(_log_shares(outputs)).reshape(len(outputs), classes, -1)
    masks = np.eye(classes)[targets.reshape(len(targets), -1)].transpose(0, 2, 1)
    both = (shares * masks).sum(2)
    return np.asarray(1 - ((2 * both + SMOOTH) / (shares.sum(2) + masks.sum(2) + SMOOTH)).mean(1))


def _binary(outputs: Array, targets: Array) -> Array:
    return np.asarray(np.maximum(outputs, 0) - outputs * targets + np.log1p(np.exp(-np.abs(outputs))))


def _huber(outputs: Array, targets: Array, delta: float = 1.0) -> Array:
    error = np.abs(targets - outputs)
    return np.asarray(np.where(error < delta, error**2 / 2, delta * (error - delta / 2)))


def _quantile(outputs: Array, targets: Array, q: float = 0.5) -> Array:
    return np.asarray(np.maximum(q * (targets - outputs), (q - 1) * (targets - outputs)))


def _elementwise_losses() -> Mapping[str, Callable[..., Array]]:
    return {
        "binary_cross_entropy": _binary,
        "huber": _huber,
        "mae": lambda outputs, targets: np.abs(targets - outputs),
        "mse": lambda outputs, targets: (targets - outputs) ** 2,
        "quantile": _quantile,
    }
