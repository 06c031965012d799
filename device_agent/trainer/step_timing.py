"""Measure the cost of a local training step on this device.

The figures are those of P2 in HCEF (mu_n, alpha_n) and of pruned personalization (C_k, f_k). The trained parameters are
discarded.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.measure_statistics import sum_inputs
from device_agent.trainer.task import TrainingTask, session_needed
from device_agent.trainer.task_files import build_update, read_state
from shared.algorithms.base import Batch, Batches
from shared.errors import TaskFailed
from shared.protocol.measurements import StepCost
from shared.protocol.messages import Update
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Tree

WARM_STEPS = 1
"""Warm-up steps: the first step allocates memory and chooses convolution algorithms."""

TRIES, ENOUGH, MAX_STEPS = 4, 0.8, 100_000
"""Blocks are enlarged until they take most of their share of the requested seconds."""
BLOCKS, PAIR = 5, 2
"""The median over blocks ignores disturbed ones. Block length is checked with a pair, by its shorter one: a single
disturbed block would make all of them too short."""


@dataclass(frozen=True)
class Steps:
    """The first `count` batches of a training, repeating its examples as needed."""

    batches: Batches
    count: int

    @property
    def num_examples(self) -> int:
        """Number of examples in one epoch."""
        return self.batches.num_examples

    @property
    def validation(self) -> Batch:
        """Validation batch of the whole training."""
        return self.batches.validation

    def inputs_at(self, places: Tensor) -> Tensor:
        """Return inputs of the whole training by index."""
        return self.batches.inputs_at(places)

    def __iter__(self) -> Iterator[Batch]:
        endless = itertools.chain.from_iterable(itertools.repeat(self.batches))
        return itertools.islice(endless, self.count)


def measure_step(task: TrainingTask) -> Update:
    """Measure the cost of a training step, and sum the inputs if the assignment asks for it."""
    job = task.job
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        start = task.read_fitting_parameters()
    with seed_torch(job.task.assignment.seed):
        step = _time_algorithm(task, start)
    return build_update(job, usage, sum_inputs(task), step=step, trained_on=task.trained_on)


def _time_algorithm(task: TrainingTask, start: Tree) -> StepCost:
    algorithm, model, assignment = task.algorithm, task.model, task.job.task.assignment
    state, _ = read_state(Path(task.job.state), task.workspace.device)
    batches = task.batches(epochs=1)  # repeated as often as needed
    batch_size = min(assignment.hyper.batch_size, len(batches.examples))
    local = algorithm.resources.timed_step or algorithm.local

    def train(subset: Batches) -> None:
        if not isinstance(local(model, state, start, subset, assignment), tuple):
            raise session_needed(task.job.task)

    return time_steps(
        train,
        batches,
        task.measure,
        seconds=task.job.task.measure_s,
        weights=sum(leaf.numel() for leaf in model.layers.parameters()),
        flops=task.workspace.flops(
            task.job.task.model, batches.examples.inputs.shape[1:], batch_size, task.job.task.adaptation
        ),
    )


def time_steps(
    train: Callable[[Batches], object],
    batches: Batches,
    meter: Callable[[], AbstractContextManager[BlockCost]],
    *,
    seconds: float,
    weights: int,
    flops: int,
) -> StepCost:
    """Time real training steps for about `seconds`.

    Args:
        train: Runs the algorithm's local training on the given batches, from the task's parameters.
        seconds: Approximate duration; a slow power sensor needs a few seconds.

    Raises:
        TaskFailed: The device has no examples.
    """
    if not batches.num_examples:
        raise TaskFailed("cannot measure a training step: this device has no examples")
    train(Steps(batches, WARM_STEPS))
    count, blocks = 1, _time_blocks(train, batches, meter, 1, PAIR)
    for _ in range(TRIES):
        took_s = min(block.compute_s or 0.0 for block in blocks)
        if not 0 < took_s < ENOUGH * seconds / BLOCKS or count == MAX_STEPS:
            break
        count = min(math.ceil(count * seconds / BLOCKS / took_s), MAX_STEPS)
        blocks = _time_blocks(train, batches, meter, count, PAIR)
    blocks += _time_blocks(train, batches, meter, count, BLOCKS - PAIR)
    seconds_each = statistics.median(block.compute_s or 0.0 for block in blocks) / count
    watts = _ratio([(block.joules, block.compute_s) for block in blocks])
    return StepCost(
        steps=count * BLOCKS,
        seconds=seconds_each,
        joules=None if watts is None else watts * seconds_each,
        idle_w=blocks[0].idle_w,
        cycles=_median([block.cycles for block in blocks], count),
        hertz=_median([block.mean_hertz for block in blocks], 1),
        weights=weights,
        flops=flops,
        provenance=blocks[0].provenance,
    )


@contextmanager
def forward_backward(layers: nn.Module, inputs: Tensor) -> Iterator[Callable[[], None]]:
    """Yield a function that passes a batch forward and backward; restore network and random state afterwards."""
    parameters = [leaf for leaf in layers.parameters() if leaf.requires_grad]
    buffers = [(leaf, leaf.clone()) for leaf in layers.buffers()]

    def step() -> None:
        outputs = layers(inputs)
        torch.autograd.grad(outputs.float().sum(), parameters, allow_unused=True)

    modes = [(module, module.training) for module in layers.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            layers.train()
            yield step
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for leaf, before in buffers:
                leaf.copy_(before)


def _time_blocks(
    train: Callable[[Batches], object],
    batches: Batches,
    meter: Callable[[], AbstractContextManager[BlockCost]],
    count: int,
    times: int,
) -> list[BlockCost]:
    blocks = []
    for _ in range(times):
        with meter() as usage:
            train(Steps(batches, count))
        blocks.append(usage)
    return blocks


def _ratio(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """Return the mean watts of all blocks; None unless all of them were measured."""
    joules, seconds = [pair[0] for pair in pairs], [pair[1] or 0.0 for pair in pairs]
    if any(value is None for value in joules) or not sum(seconds):
        return None
    return sum(value or 0.0 for value in joules) / sum(seconds)


def _median(figures: list[float | None], count: int) -> float | None:
    values = [value for value in figures if value is not None]
    return statistics.median(values) / count if values else None
