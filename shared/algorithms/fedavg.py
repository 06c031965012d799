"""FedAvg: devices train the whole model, the server moves by the weighted mean of their changes.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017. https://arxiv.org/abs/1602.05629

    w <- w + sum_k (n_k / n) * (w_k - w)        w_k: after E epochs of SGD on device k's n_k examples, from w
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from shared.algorithms.base import Algorithm, Batch, Batches, Mixing, Outcome, Result, assign_alike
from shared.errors import Diverged
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper
from shared.tensors import tree
from shared.tensors.sgd import descend
from shared.tensors.tree import Mean, State, Tree

Correction: TypeAlias = Callable[[nn.Module, Tree], None]
"""Change the gradients of a module in place, after backward; given the parameters the round started from.

Number by number: a replay may hand it several devices' parameters in stacks, with an axis in front that these lack.
"""

RECEIVED = (
    "the model that came is the cause, not this device's training, unless its examples are not finite; see whose "
    "updates the server's log and report name in the round before"
)

REMEDY = "lower hyper.learning_rate, or look for examples of this device that are not finite"


def local_sgd(
    model: Model,
    state: State,
    start: Tree,
    batches: Batches,
    assignment: Assignment,
    correct: Correction | None = None,
) -> Outcome:
    """Device half: SGD from `start`; the result is how far parameters and buffers moved.

    Args:
        state: What the device kept.
        start: The parameters that came, by name.
        batches: Its mini-batches: inputs of shape (N, ...), labels of shape (N,).
        correct: Changes gradients before each step.
    """
    layers, hyper = model.layers, assignment.hyper
    layers.load_state_dict(start)
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    change = partial(correct, layers, start) if correct else None
    loss = descend_batches(layers, list(layers.named_parameters()), batches, hyper, change)
    moved = tree.subtract(model.tree(), start)
    return state, Result(moved, float(batches.num_examples), batches.num_examples, loss)


@dataclass(frozen=True)
class LocalSgd:
    """`local_sgd` as a device half that a replay recognises: several devices of it can train in one pass.

    Attributes:
        correct: See `local_sgd`.
    """

    correct: Correction | None = None

    def __call__(self, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Train one device."""
        return local_sgd(model, state, start, batches, assignment, self.correct)


def train_copies(layers: nn.Module, start: Tree, batches: Batches, hyper: Hyper) -> tuple[Tree, float | None]:
    """Do SGD on copies of all parameters and buffers; return these, and the mean loss as in `descend_batches`.

    Args:
        layers: The network; of its tensors only names and shapes are read.
        start: Parameters and buffers to begin with.
        batches: The task's examples, in order.
        hyper: Rate, momentum and decay.
    """
    layers.load_state_dict(start)
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    loss = descend_batches(layers, list(layers.named_parameters()), batches, hyper)
    return {key: leaf.clone() for key, leaf in layers.state_dict().items()}, loss


def descend_batches(
    network: Callable[[Tensor], Tensor],
    weights: Sequence[tuple[str, Tensor]],
    batches: Iterable[Batch],
    hyper: Hyper,
    correct: Callable[[], None] | None = None,
    momenta: Tree | None = None,
) -> float | None:
    """Do SGD on the weights of a network in training mode; return its mean loss while it learned, None without a step.

    Args:
        network: From inputs of shape (B, ...) to outputs of shape (B, classes).
        weights: By name, changed in place.
        hyper: Learning rate, momentum, weight decay.
        correct: Changes the gradients in place, after each backward.
        momenta: Of each weight by name, to begin with, changed in place; None for none yet.

    Raises:
        Diverged: The loss of a step is not finite.
    """
    momenta, seen, loss_sum = Tree() if momenta is None else momenta, 0, 0.0
    for step, (inputs, labels) in enumerate(batches, start=1):
        loss = functional.cross_entropy(network(inputs), labels)
        loss.backward()
        if correct:
            correct()
        descend(weights, momenta, hyper)
        seen += len(labels)
        loss_sum += require_finite_loss(loss.item(), step) * len(labels)
    return loss_sum / seen if seen else None


def require_finite_loss(loss: float, step: int) -> float:
    """Return the loss of a training step.

    Raises:
        Diverged: It is NaN or infinite.
    """
    if not math.isfinite(loss):
        if step == 1:
            raise Diverged(f"the loss before any training is {loss}: {RECEIVED}")
        raise Diverged(f"training has diverged, the loss of step {step} is {loss}: {REMEDY}")
    return loss


def absorb(mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Server half, once an update: add its change with its weight."""
    return tree.accumulate(mean, result.tree, result.weight, result.coverage)


def aggregate(state: State, mean: Mean) -> State:
    """Server half, once a round: move by the mean change; coordinates nobody held stay."""
    return State(tree.add(state.tree, tree.finish_mean(mean)), state.facts)


def fedavg() -> Algorithm:
    """Build the algorithm; its server state is the model's own tree."""
    return Algorithm(
        init=lambda model, _seed: State({key: leaf.clone() for key, leaf in model.tree().items()}),
        assign=assign_alike,
        broadcast=lambda state, _device, _assignment: state.tree,
        local=LocalSgd(),
        absorb=absorb,
        aggregate=aggregate,
        sends_changes=True,
        mixing=Mixing(lambda state: state.tree, lambda state, mean: State(mean, state.facts)),
    )
