"""Feature dropout at the cut; dropped columns need not travel.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks, equation
(3); the scheme is that of Oh et al., SplitFC, https://arxiv.org/abs/2307.10805. For a batch of B examples, each of D
features, one delta_i of Bernoulli(1 - p) is drawn for column i:

    a~_i = delta_i / (1 - p) a_i                E a~_i = a_i,  Var a~_i = p / (1 - p) a_i^2
    dF/da_i = delta_i / (1 - p) dF/da~_i        the gradient of a dropped column is not needed

A unit shares a delta: a `column`, a whole feature map (`channel`), or one number of one example (`element`: listing
those would take as much as sending them, so nothing is omitted, and dropped ones travel as zeros).

`DrawnDropout` is an ordinary dropout layer within a network.
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
        shape: Shape of the batch, (B, ...).
        p: Probability that a unit is dropped, in [0, 1).
    """
    size = {"column": (math.prod(shape[1:]),), "channel": (shape[1],), "element": shape}[granularity]
    return torch.rand(size, generator=generator) >= p


def drop(features: Tensor, delta: Tensor, p: float) -> Tensor:
    """Return the features to send, by equation (3), without dropped columns or channels: shape (B, D').

    Args:
        features: Of shape (B, ...).
        delta: True for retained units, from `draw_delta`.
        p: Probability that a unit is dropped.
    """
    sent = features * delta if delta.shape == features.shape else gather(features, delta)
    return sent.div_(1 - p)


def undrop(gradient: Tensor, delta: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Return dF/da of shape (B, ...) from the received dF/da~: the chain rule of `drop`.

    Args:
        gradient: dF/da~, of shape (B, D') as sent.
        delta: True for retained units.
        p: Probability that a unit is dropped.
        shape: Shape of the features, (B, ...).
    """
    dense = gradient * delta if delta.shape == shape else spread(gradient, delta, shape)
    return dense.div_(1 - p)


def gather(features: Tensor, delta: Tensor) -> Tensor:
    """Return the retained columns or channels of features (B, ...), of shape (B, D')."""
    rows = features.reshape(len(features), len(delta), -1)
    return rows.index_select(1, delta.nonzero().flatten()).flatten(1)


def spread(rows: Tensor, delta: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return features of shape (B, ...), zero where dropped: the inverse of `gather`.

    Args:
        rows: Retained units, of shape (B, D').
        delta: True for retained units.
        shape: Shape of the features, (B, ...).
    """
    features = rows.new_zeros((shape[0], len(delta), math.prod(shape[1:]) // len(delta)))
    index = delta.nonzero().flatten()
    features.index_copy_(1, index, rows.reshape(shape[0], len(index), features.shape[2]))
    return features.view(shape)


class DrawnDropout(nn.Dropout):
    """Dropout of single features that draws on the CPU, so that all devices of a mixed fleet drop the same ones."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs with dropped features set to zero."""
        if not self.training or inputs.is_cpu or inputs.is_meta:
            return super().forward(inputs)
        drawn = functional.dropout(torch.ones(inputs.shape, dtype=inputs.dtype), self.p)
        return inputs * drawn.to(inputs.device)
