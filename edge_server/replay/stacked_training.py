"""Batched training of several devices with stacked networks.

One step of a cohort is one pass. Every device keeps its own parameters, batch order, momentum and loss, so the results
differ from separate training only by the order in which floats are summed. Only algorithms whose local training is
`LocalSgd` can be trained this way.

The number of devices per pass follows from shapes alone, never from a clock: two replays must write the same journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from edge_server.plan.plan import Plan
from edge_server.replay.stacked_networks import load_stacks, repeat_parameters, stack_networks
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Batch, Batches, Result
from shared.algorithms.fedavg import Correction, LocalSgd
from shared.models.evaluate import build_skeleton
from shared.objectives.loss_table import LOSSES
from shared.objectives.training import TrainingObjective, build_training_objective
from shared.protocol.messages import Hyper, StepOptions
from shared.registry import build
from shared.tensors.training_step import FIRST, SECOND, STEPS, take_step
from shared.tensors.tree import Tree

ROOM_BYTES = 16 << 20


# Minimum number of parts of a cohort, so that several processes have work.
PARTS = 4


# Measured by tests/benchmarks/together.py on two cores of an AMD EPYC (1 MiB of second-level cache, 32 MiB of
# shared third-level cache), one thread, torch 2.13: a stack that exceeds ROOM_BYTES gains nothing or loses.
#
# Speed relative to separate training, channels last, ten devices, batch 8 / 32: perceptron of 10,000 weights 3.1 / 3.1,
# of 100,000 weights 1.8 / 1.4; convolutions on 8 x 8 pixels 4.2 / 3.0; LeNet 2.6 / 1.8; convolutions of 60,000 weights
# 2.5 / 1.4. Where fewer than eight devices fit, one step keeps the processor busy by itself, and complete replays gain
# nothing: 0.9 to 1.1 for the last network in batches of 32.
FEWEST, MOST = 8, 32


FLOAT_BYTES, COPIES = 4, 4
CLASSIFICATION = build_training_objective()


def correction_of(algorithm: Algorithm) -> tuple[bool, Correction | None]:
    """Return True and the gradient correction of an algorithm that trains locally with `LocalSgd`."""
    half = algorithm.local
    return (True, half.correct) if isinstance(half, LocalSgd) else (False, None)


def devices_per_pass(layers: nn.Module, example: torch.Size, batch_size: int) -> int:
    """Return the number of devices to train in one pass; 1 if stacking is impossible or does not pay.

    It is the number that fits in the cache with everything a step touches: parameters, gradients, momenta, changes and
    activations. Below `FEWEST`, a single network keeps the processor busy.

    Args:
        layers: Network; only its shapes are used.
        example: Shape of one input.
    """
    if stack_networks(layers, example) is None:
        return 1
    weights = sum(leaf.numel() for leaf in layers.parameters())
    fitting = ROOM_BYTES // (FLOAT_BYTES * (COPIES * weights + batch_size * _activations(layers, example)))
    return min(MOST, fitting) if fitting >= FEWEST else 1


def can_stack(step: StepOptions) -> bool:
    """Return true if a step of stacked devices is each device's own: not if gradients have a common norm or scale."""
    return not step.features - {"optimizer"}


def divide_cohort(plan: Plan, cohort: int, example: torch.Size) -> int:
    """Return the number of devices of a cohort to train in one pass, leaving work for other processes.

    It does not depend on the number of processes, so that a replay's record does not either.

    Args:
        cohort: Number of devices per round.
        example: Shape of one example.

    Raises:
        ConfigError: The plan's algorithm or model cannot be built.
    """
    is_sgd = correction_of(build(ALGORITHMS, plan.algorithm, "algorithm"))[0]
    if plan.adaptation or not is_sgd or not can_stack(plan.hyper.step):
        return 1
    return min(devices_per_pass(build_skeleton(plan.model), example, plan.hyper.batch_size), math.ceil(cohort / PARTS))


def _activations(layers: nn.Module, example: torch.Size) -> int:
    """Return the number of activations of one example over all layers, without computing them."""
    counts = [math.prod(example)]

    def count(_layer: nn.Module, _inputs: object, outputs: object) -> None:
        counts.append(outputs.numel() if isinstance(outputs, Tensor) else 0)

    hooks = [layer.register_forward_hook(count) for layer in layers.modules() if next(layer.children(), None) is None]
    shapes = {name: torch.empty_like(leaf, device="meta") for name, leaf in layers.named_parameters()}
    inputs = next(iter(shapes.values())).new_empty((1, *example))
    functional_call(layers, shapes, (inputs,))
    for hook in hooks:
        hook.remove()
    return sum(counts)


def train(
    network: nn.Module,
    start: Tree,
    batches: Sequence[Batches],
    hyper: Hyper,
    correct: Correction | None = None,
    objective: TrainingObjective = CLASSIFICATION,
) -> list[Result]:
    """Train several devices like `local_sgd`, in one pass per step; return their results in the same order.

    Args:
        start: Parameters that all devices start from.
        batches: Batches of each device; a device with more examples must not have fewer steps.
        correct: Changes gradients in place, as in `local_sgd`.
    """
    order = sorted(range(len(batches)), key=lambda index: -batches[index].num_examples)
    stacks, active = repeat_parameters(network, start, len(order)), 0
    momenta = _begin_memory(stacks, hyper)
    losses, counts = torch.zeros(len(order), dtype=torch.float64), torch.zeros(len(order), dtype=torch.int64)
    for step in _steps([batches[index] for index in order]):
        inputs, targets = _side_by_side(step)
        sizes = [len(labels) for _, labels in step]
        if len(step) != active:
            load_stacks(network, stacks, active := len(step))
        means = _mean_losses(objective, network(inputs), targets, sizes)
        means.backward(torch.ones_like(means))
        if correct:
            correct(network, start)
        take_step(list(network.named_parameters()), _of_first(momenta, len(step)), hyper)
        examples = torch.tensor(sizes)
        losses[: len(step)] += means.detach() * examples
        counts[: len(step)] += examples
    changes = {name: stack.sub_(start[name]) for name, stack in stacks.items()}
    results = {
        index: Result(
            {name: stack[place] for name, stack in changes.items()},
            float(batches[index].num_examples),
            batches[index].num_examples,
            losses[place].item() / count if (count := int(counts[place])) else None,
        )
        for place, index in enumerate(order)
    }
    return [results[index] for index in range(len(batches))]


def _mean_losses(objective: TrainingObjective, outputs: Tensor, targets: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return each device's mean loss, shape (K,).

    Args:
        outputs: Of shape (K, B, ...).
        targets: Of shape (K, B, ...).
        sizes: Number of each device's examples; the others of its B are padding.
    """
    if objective.spec.loss and objective.spec.loss not in LOSSES:  # one of the user may be a mean over its batch alone
        parts = zip(outputs, targets, sizes, strict=True)
        return torch.stack([objective.loss(output[:size], target[:size]) for output, target, size in parts])
    most = targets.shape[1]
    if objective.kind == "classification" and min(sizes) == most:  # as B places of K examples: no copy, one operation
        return objective.each(outputs.mT, targets)
    losses = objective.each(outputs.flatten(0, 1), targets.flatten(0, 1)).view(-1, most)
    if min(sizes) == most:
        return losses.mean(1)
    counts = torch.tensor(sizes)
    return torch.where(torch.arange(most) < counts[:, None], losses, 0.0).sum(1) / counts


def _begin_memory(stacks: Tree, hyper: Hyper) -> Tree:
    """Return the momentum or moments of all devices before their first step."""
    if hyper.step.optimizer == "sgd":
        return {name: torch.zeros_like(stack) for name, stack in stacks.items()} if hyper.momentum else {}
    moments = {prefix + name: torch.zeros_like(stack) for prefix in (FIRST, SECOND) for name, stack in stacks.items()}
    return moments | {STEPS + name: torch.zeros(()) for name in stacks}


def _of_first(memory: Tree, count: int) -> Tree:
    """Return views of the first devices' part; devices that train have taken equally many steps."""
    return {name: leaf if name.startswith(STEPS) else leaf[:count] for name, leaf in memory.items()}


def _steps(batches: Sequence[Batches]) -> Iterator[list[Batch]]:
    """Yield each step's batches, of the devices that still train; these are always the first ones."""
    iterators = [iter(each) for each in batches]
    while step := [batch for each in iterators if (batch := next(each, None)) is not None]:
        yield step
        del iterators[len(step) :]


def _side_by_side(step: Sequence[Batch]) -> Batch:
    """Return inputs and targets of shape (K, B, ...), with small batches padded by their last example."""
    most = max(len(labels) for _, labels in step)
    padded = [
        each if len(each[1]) == most else tuple(part[torch.arange(most).clamp_max(len(part) - 1)] for part in each)
        for each in step
    ]
    return torch.stack([inputs for inputs, _ in padded]), torch.stack([targets for _, targets in padded])
