"""What both halves of SemiFL agree on: its settings, the batches of an epoch, and a step along a clipped gradient.

E. Diao, J. Ding, V. Tarokh. SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training,
NeurIPS 2022, https://arxiv.org/abs/2106.01432; the defaults are those of their code, which `semifl` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared.algorithms.semisupervised.settings import falling_rate, require_known_words
from shared.protocol.messages import Hyper
from shared.tensors.sgd import descend
from shared.tensors.tree import Tree

TINY = 1e-6
"""Keeps the division by a norm from being one by zero, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True)
class SemiflSettings:
    """The method's settings, by their names in a plan; symbols are the paper's.

    Attributes:
        epochs: E, a device's passes over the examples that it keeps.
        server_epochs: The server's passes over its labelled examples, before each round.
        warmup_epochs: More of them before the first round, so that its pseudo-labels are of some use.
        server_batch: Examples of a step of the server's; 0 for as many as a device takes.
        threshold: tau; a device keeps an example where the likeliest class is at least as likely.
        mixing: a of Beta(a, a), from which the shares of mixed examples are drawn.
        server_momentum: Of the server's step along the mean change of devices.
        clip: The largest norm of a step's gradient; what is longer is shortened to it.
        mirrors: Whether a view of a picture may be mirrored.
        schedule: Of the step size, over the rounds of the run.
        least_rate: Where the cosine ends.
        nesterov: Whether momentum within a round is Nesterov's.
    """

    epochs: int = 5
    server_epochs: int = 5
    warmup_epochs: int = 0
    server_batch: int = 0
    threshold: float = 0.95
    mixing: float = 0.75
    server_momentum: float = 0.5
    clip: float = 1.0
    mirrors: bool = True
    schedule: Literal["cosine", "constant"] = "cosine"
    least_rate: float = 0.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no such method.

        Raises:
            ValueError: A setting is out of range, or unknown.
        """
        if min(self.epochs, self.server_epochs) < 1 or min(self.warmup_epochs, self.server_batch) < 0:
            raise ValueError("epochs and server_epochs must be >= 1, warmup_epochs and server_batch >= 0")
        if not 0 < self.threshold < 1 or not 0 <= self.server_momentum < 1:
            raise ValueError("threshold must be in (0, 1), server_momentum in [0, 1)")
        if not 0 < self.mixing < math.inf or not self.clip > 0:
            raise ValueError("mixing must be above 0 and finite, clip above 0; inf clips nothing")
        if not 0 <= self.least_rate < math.inf:
            raise ValueError("least_rate must be >= 0 and finite")
        require_known_words(self)

    def hyper_of(self, hyper: Hyper, number: int, rounds: int) -> Hyper:
        """Return the hyperparameters of a round: the plan's, with the step size of the schedule.

        Args:
            hyper: The plan's.
            number: The round, from 1.
            rounds: Of the whole run.
        """
        return falling_rate(hyper, number, rounds, math.inf if self.schedule == "constant" else self.least_rate)


def split_epoch(count: int, size: int, generator: torch.Generator) -> Sequence[Tensor]:
    """Return the places 0 to count - 1 in a new order, in as few batches as there must be, and these about equal.

    How many examples a device keeps nobody plans, and a last batch of one has no variance for BatchNorm.

    Args:
        count: Examples, at least one.
        size: Of the largest batch.
        generator: Draws the order.
    """
    return torch.randperm(count, generator=generator).tensor_split(-(-count // size))


def clip_gradients(weights: Sequence[tuple[str, Tensor]], most: float) -> None:
    """Shorten the gradient of all weights together, in place, to a norm of `most` at the most."""
    gradients = [weight.grad for _, weight in weights if weight.grad is not None]
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients]))
        share = (most / (norm + TINY)).clamp_max(1.0)
        for one in gradients:
            one.mul_(share)


@dataclass
class ClippedSgd:
    """SGD of one round: its momentum begins with it and ends with it.

    Attributes:
        settings: The method's.
        weights: By name, changed in place.
        hyper: Step size, momentum and decay.
    """

    settings: SemiflSettings
    weights: Sequence[tuple[str, Tensor]]
    hyper: Hyper

    def __post_init__(self) -> None:
        """Begin without momentum."""
        self._momenta: Tree = {}

    def step(self, loss: Tensor) -> None:
        """Take a step down a loss."""
        loss.backward()
        clip_gradients(self.weights, self.settings.clip)
        descend(self.weights, self._momenta, self.hyper, nesterov=self.settings.nesterov)
