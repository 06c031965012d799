"""Dropout of features at the cut, by columns, so that what is dropped need not travel.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks, equation
(3); the scheme is that of Oh et al., SplitFC, https://arxiv.org/abs/2307.10805. For a batch of B examples, each of D
features, one delta_i of Bernoulli(1 - p) is drawn for column i:

    a~_i = delta_i / (1 - p) a_i                E a~_i = a_i,  Var a~_i = p / (1 - p) a_i^2
    dF/da_i = delta_i / (1 - p) dF/da~_i        the gradient of a dropped column is of no use to anybody

A unit is what shares a delta: a `column`, a whole feature map (`channel`), or one number of one example (`element`:
of these as many would have to be named as there are, so nothing is left out, and dropped ones travel as zeros).

`DrawnDropout` is torch's own layer within a network, of which nothing travels.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

Granularity: TypeAlias = Literal["column", "channel", "element"]


def draw_delta(shape: tuple[int, ...], p: float, granularity: Granularity, generator: Generator) -> Tensor:
    """Draw delta for a batch of features, true with probability 1 - p.

    Of shape (D,) for columns, (C,) for the channels of (B, C, ...), and (B, ...) for elements.

    Args:
        shape: Of the batch: (B, ...).
        p: Probability that a unit is dropped, in [0, 1).
        granularity: What a unit is.
        generator: What is drawn from.
    """
    size = {"column": (math.prod(shape[1:]),), "channel": (shape[1],), "element": shape}[granularity]
    return torch.rand(size, generator=generator) >= p


def drop(features: Tensor, delta: Tensor, p: float) -> Tensor:
    """Return what travels of features (B, ...): equation (3), dropped columns or channels left out, shape (B, D').

    Args:
        features: Of shape (B, ...).
        delta: Which units are kept, as `draw_delta` gives it.
        p: Probability that a unit is dropped.
    """
    travelling = features * delta if delta.shape == features.shape else gather(features, delta)
    return travelling.div_(1 - p)


def undrop(gradient: Tensor, delta: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Return dF/da of shape (B, ...) from dF/da~ as it travels: the chain rule of `drop`.

    Args:
        gradient: dF/da~, of shape (B, D') as features travel.
        delta: Which units were kept.
        p: Probability that a unit is dropped.
        shape: Of the features: (B, ...).
    """
    dense = gradient * delta if delta.shape == shape else spread(gradient, delta, shape)
    return dense.div_(1 - p)


def gather(features: Tensor, delta: Tensor) -> Tensor:
    """Return the kept columns or channels of features (B, ...) side by side, of shape (B, D')."""
    rows = features.reshape(len(features), len(delta), -1)
    return rows.index_select(1, delta.nonzero().flatten()).flatten(1)


def spread(rows: Tensor, delta: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return features of shape (B, ...) with the kept units in their places and zeros elsewhere: `gather` undone.

    Args:
        rows: Kept units side by side, of shape (B, D').
        delta: Which units these are.
        shape: Of the features: (B, ...).
    """
    features = rows.new_zeros((shape[0], len(delta), math.prod(shape[1:]) // len(delta)))
    index = delta.nonzero().flatten()
    features.index_copy_(1, index, rows.reshape(shape[0], len(index), features.shape[2]))
    return features.view(shape)


class DrawnDropout(nn.Dropout):
    """Dropout of single features that draws on the CPU, wherever it computes: in a mixed fleet all leave out alike."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what is left of inputs, of their shape; the rest is zero."""
        if not self.training or inputs.is_cpu or inputs.is_meta:
            return super().forward(inputs)
        drawn = functional.dropout(torch.ones(inputs.shape, dtype=inputs.dtype), self.p)
        return inputs * drawn.to(inputs.device)
