"""Loss functions by name; each returns one value per example.

A builder takes the loss's options and returns (outputs, targets) -> losses of shape (N,). Losses over several numbers
per example (outputs of a regression, pixels) are means over these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from shared.objectives.metrics import SMOOTH

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> losses of shape (N,); one of the user may return their mean instead."""


def _by_example(losses: Tensor) -> Tensor:
    """Return means over all axes but the first."""
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _like(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and float targets of one shape; outputs of shape (N, 1) match targets of shape (N,)."""
    if outputs.shape != targets.shape and outputs.numel() == targets.numel():
        outputs = outputs.reshape(targets.shape)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape[1:])} per example, targets of shape {tuple(targets.shape[1:])}"
        )
    return outputs, targets.to(outputs.dtype)


def cross_entropy(weights: tuple[float, ...] = (), smoothing: float = 0.0) -> LossFunction:
    """Build cross-entropy of logits (N, classes, ...) and class numbers (N, ...).

    The mean over examples is not divided by the mean weight, unlike torch's: so it adds over devices.
    """

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = torch.tensor(weights, device=outputs.device, dtype=outputs.dtype) if weights else None
        losses = functional.cross_entropy(outputs, targets, weight, reduction="none", label_smoothing=smoothing)
        return _by_example(losses)

    return loss


def binary_cross_entropy() -> LossFunction:
    """Build cross-entropy of logits and labels 0 or 1 of the same shape."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_example(functional.binary_cross_entropy_with_logits(*_like(outputs, targets), reduction="none"))

    return loss


def mse() -> LossFunction:
    """Build the squared error."""
    return lambda outputs, targets: _by_example(functional.mse_loss(*_like(outputs, targets), reduction="none"))


def mae() -> LossFunction:
    """Build the absolute error."""
    return lambda outputs, targets: _by_example(functional.l1_loss(*_like(outputs, targets), reduction="none"))


def huber(delta: float = 1.0) -> LossFunction:
    """Build Huber's loss: half the squared error below `delta`, linear above.

    Raises:
        ValueError: `delta` is not above 0.
    """
    if not delta > 0:
        raise ValueError(f"delta is {delta}; give a number above 0")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return _by_example(functional.huber_loss(*_like(outputs, targets), reduction="none", delta=delta))

    return loss


def quantile(q: float = 0.5) -> LossFunction:
    """Build the quantile (pinball) loss max(q e, (q - 1) e) of the error e = target - output.

    Raises:
        ValueError: `q` is not between 0 and 1.
    """
    if not 0 < q < 1:
        raise ValueError(f"q is {q}; give a number between 0 and 1")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        outputs, targets = _like(outputs, targets)
        error = targets - outputs
        return _by_example(torch.maximum(q * error, (q - 1) * error))

    return loss


def dice() -> LossFunction:
    """Build 1 - Dice coefficient, mean over classes: of logits (N, classes, H, W) and class numbers (N, H, W)."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        shares = outputs.softmax(1).flatten(2)
        masks = functional.one_hot(targets.flatten(1), outputs.shape[1]).transpose(1, 2).to(shares.dtype)
        both = (shares * masks).sum(2)
        coefficient = (2 * both + SMOOTH) / (shares.sum(2) + masks.sum(2) + SMOOTH)
        return 1 - coefficient.mean(1)

    return loss
