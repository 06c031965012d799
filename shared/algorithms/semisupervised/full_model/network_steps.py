"""Steps of a method whose devices train the whole network: an objective, a way down it, and what both came to.

SemiFL (https://arxiv.org/abs/2106.01432), FedMatch (https://arxiv.org/abs/2006.12097) and FedSwitch
(https://arxiv.org/abs/2301.10114) differ in the loss of a step and in what moves along it; a device's steps, and the
server's, are otherwise the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from shared.algorithms.base import Allocation, Batches, Cohort, assign_alike
from shared.algorithms.fedavg import require_finite_loss
from shared.algorithms.semisupervised.settings import LabelledSettings
from shared.data.views.pair import Strength, make_views
from shared.errors import TaskFailed
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, mix
from shared.tensors.sgd import descend
from shared.tensors.tree import State, Tree

FORWARD = 1 / 3
"""Of a training step's operations, its forward pass's."""


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


@dataclass(frozen=True)
class Objective:
    """What a step goes down.

    Attributes:
        loss: Of shape (), with its gradient.
        examples: Of how many it is.
        terms: What it is the sum of, by name.
        sure: Of how many examples the label is sure.
    """

    loss: Tensor
    examples: int
    terms: Mapping[str, float] = field(default_factory=dict)
    sure: int = 0


@dataclass(frozen=True)
class Taken:
    """What steps came to.

    Attributes:
        steps: How many there were.
        examples: That they saw, each as often as it was seen.
        sure: Of these, those whose label was sure.
        loss: Mean of an example's; None without a step.
        terms: Likewise, of what it is the sum of.
    """

    steps: int
    examples: int
    sure: int
    loss: float | None
    terms: dict[str, float]


def _goes_on() -> None:
    """Do nothing between two steps."""


@dataclass(frozen=True)
class Descent:
    """SGD of one round; its momentum begins and ends with it.

    Attributes:
        weights: What moves, by name, in place.
        hyper: Step size, momentum and decay.
        nesterov: Whether momentum is Nesterov's.
        clip: Largest norm of a step's gradient.
    """

    weights: Sequence[tuple[str, Tensor]]
    hyper: Hyper
    nesterov: bool
    clip: float = math.inf

    def take(
        self,
        objectives: Iterable[Objective],
        *,
        require: Callable[[float, int], float] = require_finite_loss,
        after: Callable[[], None] = _goes_on,
    ) -> Taken:
        """Take a step down each objective, which is asked for when the one before is taken.

        Args:
            objectives: Of one step each.
            require: (loss, step) -> the loss; refuses what is none, in words for whoever trains.
            after: What follows each step.

        Raises:
            Diverged: By `require`, unless another is given: the loss of a step is not finite.
        """
        momenta, leaves = Tree(), [leaf for _, leaf in self.weights]
        steps, examples, sure, losses = 0, 0, 0, list[float]()
        terms: dict[str, list[float]] = {}
        for steps, one in enumerate(objectives, 1):
            losses.append(require(one.loss.item(), steps) * one.examples)
            torch.autograd.backward(one.loss, inputs=leaves)
            descend(self.weights, momenta, self.hyper, nesterov=self.nesterov, clip=self.clip)
            after()
            examples, sure = examples + one.examples, sure + one.sure
            for name, term in one.terms.items():
                terms.setdefault(name, []).append(term * one.examples)
        means = {name: math.fsum(each) / examples for name, each in terms.items()}
        return Taken(steps, examples, sure, math.fsum(losses) / examples if examples else None, means)


def require_examples(batches: Batches) -> None:
    """Refuse a task that nothing can be learned in.

    Raises:
        TaskFailed: There are no examples.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")


def unlabelled_views(
    settings: LabelledSettings, batches: Batches, assignment: Assignment, *strengths: Strength
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield each batch of a device's examples as it is, and views of it; labels, if it had any, are not looked at.

    Args:
        settings: Whether views may be mirrored.
    """
    for step, (inputs, _) in enumerate(batches, 1):
        yield inputs, make_views(inputs, strengths, mix(assignment.seed, step, "views"), mirrors=settings.mirrors)


def assign(
    settings: LabelledSettings,
    state: State,
    cohort: Cohort,
    allocation: Allocation,
    number: int,
    *,
    epochs: int | None = None,
) -> dict[str, Assignment]:
    """Tell every device the round's step size, and a number of epochs that is the method's own."""
    hyper = settings.hyper_of(cohort.hyper, number, cohort.rounds)
    if epochs is not None:
        hyper = msgspec.structs.replace(hyper, local_epochs=epochs)
    told = assign_alike(state, cohort, allocation, number)
    return {device: msgspec.structs.replace(one, hyper=hyper) for device, one in told.items()}
