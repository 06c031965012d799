"""Weight pruning by global magnitude or Taylor importance, with a cubic schedule.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks, equations
(9) and (10). Importance by Taylor expansion is that of Molchanov et al., Importance Estimation for Neural Network
Pruning, CVPR 2019, https://arxiv.org/abs/1906.10771; the cubic schedule that of Zhu and Gupta, To Prune, or Not to
Prune, 2017, https://arxiv.org/abs/1710.01878.

    I_j = |w_j g_j|                             (9), elementwise: the change of the loss as w_j goes to 0
    rho_t = rho_f (1 - (1 - t/T)^3)             (10)
    the floor(rho_t n) least important of n weights become zero, but each output channel keeps one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Channels: TypeAlias = tuple[int, int]
"""Output channels of a layer, and weights of each."""

_STRIDE = 101
"""Sampling interval of weights for an estimate of the threshold."""
_CHUNK = 1 << 18
"""Weights per chunk: intermediate results fit into the processor's cache."""


def sparsity(step: int, total: int, final: float) -> float:
    """Return rho_t, the share of zero weights at step t of T; 0 at step 0, `final` at the last. Equation (10).

    Args:
        total: T, steps of the schedule.
        final: rho_f, the share at the last step.
    """
    return final * (1.0 - (1.0 - step / total) ** 3)


def taylor_importance(weights: Tensor, gradient: Tensor) -> Tensor:
    """Return |w g|, elementwise. Equation (9)."""
    return torch.mul(weights, gradient).abs_()


def magnitude_importance(weights: Tensor, _gradient: Tensor) -> Tensor:
    """Return |w|, the common alternative."""
    return weights.abs()


IMPORTANCE: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "taylor": taylor_importance,
    "magnitude": magnitude_importance,
}


def max_prunable(layers: Sequence[Channels]) -> int:
    """Return the maximum number of zero weights if each output channel keeps one."""
    return sum(channels * (weights - 1) for channels, weights in layers)


def select_mask(importance: Tensor, weights: Tensor, count: int, layers: Sequence[Channels]) -> Tensor:
    """Return the mask without the `count` least important weights, true where a weight stays.

    Of equal importance, those nearest to zero are pruned first, so that zeros stay zero; then those with lower
    positions. The most important weight of each output channel stays, since a layer with only zero weights cannot
    learn.

    Args:
        importance: Of shape (n,), without NaN; overwritten.
        weights: Of shape (n,): layer by layer, output channel by output channel.
        count: Weights to prune, at most `max_prunable(layers)`.
        layers: Channels and weights per channel, in the order of the weights.
    """
    ranks, values = importance.numpy(force=True), weights.numpy(force=True)
    if count <= 0:
        return torch.ones(len(ranks), dtype=torch.bool)
    ranks[_find_best(ranks, values, layers)] = math.inf
    bound = find_smallest(ranks, count)
    mask = ranks > bound
    if surplus := len(ranks) - count - np.count_nonzero(mask):
        ties = np.flatnonzero(ranks == bound)
        mask[ties[np.argsort(np.abs(values[ties]), kind="stable")[-surplus:]]] = True
    return torch.from_numpy(mask)


def _find_best(
    ranks: NDArray[np.float32], values: NDArray[np.float32], layers: Sequence[Channels]
) -> NDArray[np.int64]:
    """Return the position of the most important weight of each output channel; without importance, of the largest."""
    positions, start = [], 0
    for channels, count in layers:
        segment = slice(start, start + channels * count)
        best = ranks[segment].reshape(channels, count).argmax(1)
        dead = ranks[segment].reshape(channels, count)[np.arange(channels), best] == 0
        if dead.any():
            best[dead] = np.abs(values[segment].reshape(channels, count)[dead]).argmax(1)
        positions.append(start + np.arange(channels) * count + best)
        start = segment.stop
    return np.concatenate(positions)


def find_smallest(values: NDArray[np.float32], count: int) -> float:
    """Return the `count`-th smallest of values of shape (n,), 1 <= count <= n.

    A sample gives an interval that probably contains it; only values inside are partitioned. If it does not, all are.
    """
    sample = np.sort(values[::_STRIDE])
    place = len(sample) * count / len(values)
    slack = 2 * math.sqrt(len(sample)) + 2
    low = sample[int(place - slack)] if place > slack else -math.inf
    high = sample[int(place + slack)] if place + slack < len(sample) else math.inf
    below, between = 0, []
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        under = chunk < low
        below += int(np.count_nonzero(under))
        between.append(chunk[(chunk <= high) ^ under])
    middle = np.concatenate(between)
    if not below < count <= below + len(middle):
        middle, below = values, 0
    return float(np.partition(middle, count - below - 1)[count - below - 1])


def apply_mask(values: Tensor, mask: Tensor) -> None:
    """Set masked values to zero, in place; both of shape (n,). numpy's product is seven times as fast as torch's."""
    if not values.is_cpu:
        values.mul_(mask)
        return
    array = values.numpy()
    np.multiply(array, mask.numpy(), out=array)
