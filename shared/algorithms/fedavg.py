"""FedAvg: average the devices' model changes, weighted by examples.

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

from shared.algorithms.base import Algorithm, Batch, Batches, Mixing, Outcome, Result, assign_alike, network_leaves
from shared.errors import Diverged, WireError
from shared.models.base import Model
from shared.models.leaves import load_leaves, read_leaves
from shared.objectives.training import TrainingObjective
from shared.protocol.messages import STEP_FEATURES, Assignment, Hyper
from shared.tensors import tree
from shared.tensors.mixed_precision import MixedPrecision
from shared.tensors.training_step import take_step
from shared.tensors.tree import CPU, Mean, State, Tree

Correction: TypeAlias = Callable[[nn.Module, Tree], None]
"""(module, parameters at the start of the round): changes the module's gradients in place after backward.

Elementwise: a replay may pass the parameters of several devices stacked along an additional first axis.
"""

ALL_STEP_OPTIONS = frozenset(STEP_FEATURES)
"""Options of a training step that `descend_batches` supports."""
RECEIVED = (
    "the received model, this device's examples or the plan's loss gives no number; look for non-finite examples, "
    "check task.loss and, after round 1, the updates that the server's log and report name in the round before"
)

REMEDY = "lower hyper.learning_rate, look for non-finite examples of this device, or check task.loss"


def local_sgd(
    model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment, correct: Correction | None = None
) -> Outcome:
    """Device half: SGD from `start`; the result is the change of parameters and buffers."""
    layers, hyper = model.layers, assignment.hyper
    load_leaves(layers, start)
    layers.train()
    layers.zero_grad()  # gradients of a task interrupted within a step
    change = partial(correct, layers, start) if correct else None
    loss = descend_batches(layers, list(layers.named_parameters()), batches, hyper, model.objective, correct=change)
    change_tree = tree.subtract(read_leaves(layers), start)
    return state, Result(change_tree, float(batches.num_examples), batches.num_examples, loss)


@dataclass(frozen=True)
class LocalSgd:
    """`local_sgd` in a form that a replay recognises: it can train several devices in one pass."""

    correct: Correction | None = None

    def __call__(self, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Train one device."""
        return local_sgd(model, state, start, batches, assignment, self.correct)


def train_copies(model: Model, start: Tree, batches: Batches, hyper: Hyper) -> tuple[Tree, float | None]:
    """Train copies of all parameters and buffers by SGD; return them, and the mean loss as in `descend_batches`.

    Args:
        model: Trains the copies; its tensors are overwritten.
        start: Initial parameters and buffers; not changed.
    """
    layers = model.layers
    load_leaves(layers, start)
    layers.train()
    layers.zero_grad()  # gradients of a task interrupted within a step
    loss = descend_batches(layers, list(layers.named_parameters()), batches, hyper, model.objective)
    return {key: leaf.clone() for key, leaf in read_leaves(layers).items()}, loss


def descend_batches(  # noqa: PLR0913 - everything that a local training is made of
    network: Callable[[Tensor], Tensor],
    weights: Sequence[tuple[str, Tensor]],
    batches: Iterable[Batch],
    hyper: Hyper,
    objective: TrainingObjective,
    *,
    correct: Callable[[], None] | None = None,
    momenta: Tree | None = None,
) -> float | None:
    """Train the weights of a network in training mode; return the mean loss during training, None without a step.

    Args:
        network: From inputs of shape (B, ...) to outputs of shape (B, ...).
        weights: By name, changed in place.
        correct: Changes the gradients in place, after each backward.
        momenta: Initial momentum, or Adam's moments, changed in place; None for zero.

    Raises:
        Diverged: The loss of a step is not finite.
    """
    momenta, examples, loss_sum = Tree() if momenta is None else momenta, 0, 0.0
    precision = MixedPrecision.of(hyper.step, weights[0][1].device if weights else CPU)
    for step, (inputs, labels) in enumerate(batches, start=1):
        with precision.forward:
            loss = objective.loss(network(inputs), labels)
        if precision.backward(loss, weights):
            if correct:
                correct()
            take_step(weights, momenta, hyper)
        examples += len(labels)
        loss_sum += require_finite_loss(loss.item(), step) * len(labels)
    return loss_sum / examples if examples else None


def require_finite_loss(loss: float, step: int) -> float:
    """Return the loss of a training step.

    Raises:
        Diverged: It is NaN or infinite.
    """
    if not math.isfinite(loss):
        if step == 1:
            raise Diverged(f"the loss of step 1, before any training, is {loss}: {RECEIVED}")
        raise Diverged(f"training has diverged, the loss of step {step} is {loss}: {REMEDY}")
    return loss


def require_finite(change: Tree) -> None:
    """Reject a diverged model before it is stored: no later download would replace all of it.

    Raises:
        Diverged: A number is NaN or infinite; the device's stored model stays.
    """
    try:
        tree.check_like(change, change)
    except WireError as error:
        raise Diverged(
            f"training has diverged, {error} after the last step, the update is discarded: {REMEDY}"
        ) from error


def absorb(mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Server half, once per update: add its change with its weight."""
    return tree.accumulate(mean, result.tree, result.weight, result.coverage)


def aggregate(state: State, mean: Mean) -> State:
    """Server half, once per round: add the mean change; coordinates without an update stay."""
    return State(tree.add(state.tree, tree.finish_mean(mean)), state.facts)


def mix(state: State, mean: Tree) -> State:
    """Return the state with the mean of several sites' networks; leaves beside the network stay the site's own."""
    return State({**state.tree, **mean}, state.facts)


def fedavg() -> Algorithm:
    """Build the algorithm; its server state is the model's tree."""
    return Algorithm(
        init=lambda model, _seed: State({key: leaf.clone() for key, leaf in model.tree().items()}),
        assign=assign_alike,
        broadcast=lambda state, _device, _assignment: network_leaves(state.tree),
        local=LocalSgd(),
        absorb=absorb,
        aggregate=aggregate,
        sends_changes=True,
        trains_parts=True,
        step_options=ALL_STEP_OPTIONS,
        mixing=Mixing(lambda state: network_leaves(state.tree), mix),
    )
