"""The server's supervised steps on a whole network: the same labelled batches and views as SemiSFL's own.

Y. Xu et al. SemiSFL, https://arxiv.org/abs/2307.15870, compare with methods whose devices train the whole network, at
as many supervised steps of as many examples; so that a difference is not one of batches, these are drawn alike. The
loss is the method's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shared.algorithms.base import Batch, Cohort
from shared.algorithms.semisupervised.semisfl_server import labelled_batches, require_classes
from shared.algorithms.semisupervised.settings import SemisflSettings
from shared.errors import ConfigError
from shared.models.base import Model
from shared.tensors.tree import Tree


def labelled_views(
    settings: SemisflSettings, model: Model, labelled: Batch, cohort: Cohort, number: int, *, first: bool
) -> Iterator[Batch]:
    """Yield a view of a batch of labelled examples and their labels, for each supervised step of a round.

    Args:
        settings: How many steps, of how many examples, and which views.
        model: The whole network, without storage.
        labelled: The server's own examples.
        cohort: Hyperparameters and seed.
        number: The round.
        first: Whether it is the first that trains, which takes the steps of warm-up too.

    Raises:
        ConfigError: A class has no example, or there is a class that the network does not know.
    """
    require_classes(model, labelled)
    steps = settings.supervised_steps + (settings.warmup_steps if first else 0)
    for (view,), labels in itertools.islice(labelled_batches(settings, labelled, cohort, number), steps):
        yield view, labels


def require_finite_step(loss: float, step: int) -> None:
    """Refuse the loss of a supervised step.

    Raises:
        ConfigError: It is NaN or infinite.
    """
    if not math.isfinite(loss):
        raise ConfigError(f"server_data: training has diverged, the loss of step {step} is {loss}: lower learning_rate")


@dataclass(frozen=True)
class Leaves:
    """A network's parameters as a training moves them, none of them anybody else's.

    Attributes:
        weights: Those that have a gradient.
        buffers: All others, such as running statistics, which a forward pass in training mode changes in place.
    """

    weights: Tree
    buffers: Tree

    @classmethod
    def copied(cls, model: Model, tree: Mapping[str, Tensor]) -> Leaves:
        """Return copies of a network's leaves in a tree; others are left out."""
        trainable = {name for name, leaf in model.layers.named_parameters() if leaf.requires_grad}
        names = model.layers.state_dict().keys()
        return cls(
            {name: tree[name].detach().clone().requires_grad_() for name in names if name in trainable},
            {name: tree[name].detach().clone() for name in names if name not in trainable},
        )

    @property
    def all(self) -> Tree:
        """Weights and buffers."""
        return {**self.weights, **self.buffers}

    def detached(self) -> Tree:
        """Return all of them without gradients; they share their storage."""
        return {name: leaf.detach() for name, leaf in self.all.items()}
