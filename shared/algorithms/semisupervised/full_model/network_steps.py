"""Training of a whole network by SGD: parameters, loss, steps and tasks.

SemiFL (https://arxiv.org/abs/2106.01432), FedMatch (https://arxiv.org/abs/2006.12097) and FedSwitch
(https://arxiv.org/abs/2301.10114) differ in the loss of a step and in the leaves that it moves; the steps of devices
and server are otherwise the same.
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
from shared.protocol.messages import Assignment, Hyper, derive_seed
from shared.tensors.training_step import descend
from shared.tensors.tree import State, Tree

FORWARD = 1 / 3
"""Share of the forward pass in the operations of a training step."""


@dataclass(frozen=True)
class TrainingCopy:
    """Private copy of a network's parameters for training.

    Attributes:
        buffers: All others, such as running statistics, which a forward pass in training mode changes in place.
    """

    weights: Tree
    buffers: Tree

    @classmethod
    def copy_from(cls, model: Model, tree: Mapping[str, Tensor]) -> TrainingCopy:
        """Return copies of a network's leaves in a tree; others are omitted."""
        trainable = {name for name, leaf in model.layers.named_parameters() if leaf.requires_grad}
        names = model.tree().keys()
        return cls(
            {name: tree[name].detach().clone().requires_grad_() for name in names if name in trainable},
            {name: tree[name].detach().clone() for name in names if name not in trainable},
        )

    @property
    def all(self) -> Tree:
        """Weights and buffers."""
        return {**self.weights, **self.buffers}

    def detach_leaves(self) -> Tree:
        """Return all leaves without gradients; they share their storage."""
        return {name: leaf.detach() for name, leaf in self.all.items()}


@dataclass(frozen=True)
class StepLoss:
    """Loss of a step.

    Attributes:
        loss: Of shape (), with its gradient.
        examples: Number of examples in the loss.
        terms: Terms of the loss, by name.
        sure: Number of examples with a confident label.
    """

    loss: Tensor
    examples: int
    terms: Mapping[str, float] = field(default_factory=dict)
    sure: int = 0


@dataclass(frozen=True)
class StepSummary:
    """Summary of several steps.

    Attributes:
        examples: Examples seen, each as often as it was seen.
        sure: Examples among these with a confident label.
        loss: Mean per example; None without a step.
        terms: Mean per example of each term.
    """

    steps: int
    examples: int
    sure: int
    loss: float | None
    terms: dict[str, float]


def _do_nothing() -> None:
    """Do nothing after a step."""


@dataclass(frozen=True)
class Descent:
    """SGD of one round, with a momentum that starts at zero.

    Attributes:
        weights: Trained in place, by name.
        clip: Largest norm of a step's gradient.
    """

    weights: Sequence[tuple[str, Tensor]]
    hyper: Hyper
    nesterov: bool
    clip: float = math.inf

    def take(
        self,
        objectives: Iterable[StepLoss],
        *,
        require: Callable[[float, int], float] = require_finite_loss,
        after: Callable[[], None] = _do_nothing,
    ) -> StepSummary:
        """Take a step down each objective; each is requested after the previous step.

        Args:
            require: (loss, step) -> the loss; raises an error that fits the caller where it is not finite.

        Raises:
            Diverged: By the default `require`: the loss of a step is not finite.
        """
        momenta, leaves = Tree(), [leaf for _, leaf in self.weights]
        steps, examples, sure, losses = 0, 0, 0, list[float]()
        terms: dict[str, list[float]] = {}
        for steps, objective in enumerate(objectives, 1):
            losses.append(require(objective.loss.item(), steps) * objective.examples)
            torch.autograd.backward(objective.loss, inputs=leaves)
            descend(self.weights, momenta, self.hyper, nesterov=self.nesterov, clip=self.clip)
            after()
            examples, sure = examples + objective.examples, sure + objective.sure
            for name, term in objective.terms.items():
                terms.setdefault(name, []).append(term * objective.examples)
        means = {name: math.fsum(each) / examples for name, each in terms.items()}
        return StepSummary(steps, examples, sure, math.fsum(losses) / examples if examples else None, means)


def require_examples(batches: Batches) -> None:
    """Reject a task without examples.

    Raises:
        TaskFailed: There are no examples.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")


def unlabelled_views(
    settings: LabelledSettings, batches: Batches, assignment: Assignment, *strengths: Strength
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield each batch of a device's examples, and views of it; labels are not read."""
    for step, (inputs, _) in enumerate(batches, 1):
        yield (
            inputs,
            make_views(inputs, strengths, derive_seed(assignment.seed, step, "views"), mirrors=settings.mirrors),
        )


def assign_training(
    settings: LabelledSettings,
    state: State,
    cohort: Cohort,
    allocation: Allocation,
    number: int,
    *,
    epochs: int | None = None,
) -> dict[str, Assignment]:
    """Assign every device the round's step size, and the method's number of epochs."""
    hyper = settings.hyper_of(cohort.hyper, number, cohort.rounds)
    if epochs is not None:
        hyper = msgspec.structs.replace(hyper, local_epochs=epochs)
    tasks = assign_alike(state, cohort, allocation, number)
    return {device: msgspec.structs.replace(task, hyper=hyper) for device, task in tasks.items()}
