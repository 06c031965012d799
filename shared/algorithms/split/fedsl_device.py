"""The device half of lightweight FedSL: features up, gradient down, prune, quantize, step.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; equations
as in `shared.algorithms.split.fedsl`. SplitFC, from which the dropping of features comes: https://arxiv.org/abs/2307.10805.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Generator, Tensor

from shared.algorithms.base import Batches, Result, Session, mix
from shared.algorithms.split.bottom import Bottom
from shared.algorithms.split.settings import FLOAT_BITS, Settings, first_step, is_finite, total_steps
from shared.codecs import bits
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.protocol.steps import Missed
from shared.tensors.feature_dropout import draw, drop, undrop
from shared.tensors.pruning import IMPORTANCE, kept, most, prune, sparsity
from shared.tensors.quantizer import dequantize, levels
from shared.tensors.tree import State, Tree

BYTE = 255
"""The largest label that has room in one."""


class Mask:
    """Which numbers of a device's client part are active; it lives for one session.

    Attributes:
        active: Boolean of shape (N,), as `Bottom.vector`; what cannot be pruned always is.
        norm_ratio: The greatest |w - w~|^2 / |w|^2 of a pruning, which the paper's assumption 5 bounds by rho_t.
    """

    def __init__(self, settings: Settings, state: State, bottom: Bottom, assignment: Assignment) -> None:
        self._settings, self._rounds = settings, total_steps(assignment) // settings.steps_per_round
        self._zeros: int | None = None
        self.norm_ratio = 0.0
        self.active = torch.ones(len(bottom.vector), dtype=torch.bool)
        if (packed := state.tree.get("mask")) is not None:
            self.active[: bottom.count] = torch.from_numpy(bits.unpack(packed.numpy(), bottom.count, 1)).bool()
        elif first_step(assignment):  # the state was lost, or the device is new: what all others have pruned stays so
            self.active[: bottom.count] = bottom.vector[: bottom.count] != 0

    def packed(self, count: int) -> Tensor:
        """Return the mask of the n weights that can be pruned, as a bitmap of ceil(n / 8) bytes."""
        return torch.from_numpy(bits.pack(self.active[:count].numpy(), 1))

    def apply(self, bottom: Bottom, step: int) -> None:
        """Mask weights and gradient at a step of the run, after a new ranking if the schedule asks for more zeros."""
        weights, gradient = bottom.vector[: bottom.count], bottom.gradient[: bottom.count]
        active, fresh = self.active[: bottom.count], self._zeros is None
        zeros = _zeros(weights) if self._zeros is None else self._zeros
        now = sparsity(-(-step // self._settings.steps_per_round), self._rounds, self._settings.sparsity)
        wanted = min(math.floor(now * bottom.count), most(bottom.layers))
        if zeros < wanted:
            importance = IMPORTANCE[self._settings.importance](weights, gradient)
            active.copy_(kept(importance, weights, wanted, bottom.layers))
        if zeros < wanted or fresh:
            before = torch.dot(weights, weights).item()
            prune(weights, active)
            self._zeros = _zeros(weights)
            if before:
                self.norm_ratio = max(self.norm_ratio, 1 - torch.dot(weights, weights).item() / before)
        prune(gradient, active)


def _zeros(weights: Tensor) -> int:
    return len(weights) - int(torch.count_nonzero(weights))


@dataclass
class Tally:
    """What a session adds up."""

    loss: float = 0.0
    examples: int = 0
    missed: int = 0
    refused: int = 0

    def add(self, loss: float, examples: int) -> None:
        """Count a batch."""
        self.loss += loss * examples
        self.examples += examples


def local(
    settings: Settings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Session:
    """Device half: see `Algorithm.local`. A batch that does not count leaves no trace, BatchNorm's included.

    Raises:
        TaskFailed: There are no examples, or the client part has diverged.
        WireError: The server sent a gradient of other features.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")
    bottom = Bottom(model, settings.cut_of(model), start, recompute=settings.recompute)
    del start  # a file's pages, which need not stay in memory
    mask = Mask(settings, state, bottom, assignment) if settings.sparsity and bottom.count else None
    generator, tally, due = Generator(), Tally(), 1
    for step, (inputs, labels) in enumerate(islice(batches, assignment.steps), 1):
        if step < due:
            continue
        generator.manual_seed(mix(assignment.seed, step, "step"))  # so that a missed step changes no later draw
        features, buffers = bottom.forward(inputs)
        delta = draw(tuple(features.shape), settings.drop, settings.granularity, generator) if settings.drop else None
        up = _up(settings, features.detach(), delta, labels)
        down = yield up
        due = step + (down.steps if isinstance(down, Missed) else 1)
        if isinstance(down, Missed):
            tally.missed += min(due, assignment.steps + 1) - step
            del features  # and what its way back would need, before the next batch needs the room
            continue
        if "loss" in down:
            bottom.backward(features, _upstream(settings, down, up, delta, tuple(features.shape)))
        del features
        if "loss" not in down or not is_finite(bottom.gradient):
            tally.refused += 1
            continue
        bottom.keep(buffers)
        tally.add(down["loss"].item(), len(labels))
        now = first_step(assignment) + step
        if mask:
            mask.apply(bottom, now)
        _move(settings, bottom, mask, settings.step_size(assignment, now), assignment.hyper.weight_decay, generator)
    return _outcome(settings, state, bottom, mask, tally, batches.num_examples)


def _up(settings: Settings, features: Tensor, delta: Tensor | None, labels: Tensor) -> Tree:
    """Return what the server needs of a batch; without the columns or channels that are dropped."""
    if not is_finite(features):
        raise TaskFailed("the client part has diverged: features are NaN or infinite; lower the learning rate")
    up = {"features": features, "labels": labels.to(torch.uint8 if labels.max() <= BYTE else torch.int64)}
    if delta is None:
        return up
    up["features"] = drop(features, delta, settings.drop)
    if settings.granularity != "element":
        up["keep"] = torch.from_numpy(bits.pack(delta.numpy(), 1))
        up["shape"] = torch.tensor(features.shape[1:], dtype=torch.int32)
    return up


def _upstream(settings: Settings, down: Tree, up: Tree, delta: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return dF/dA of shape (B, ...)."""
    gradient = down["gradient"]
    if gradient.shape != up["features"].shape:
        raise WireError(f"gradient of shape {tuple(gradient.shape)}, not {tuple(up['features'].shape)}", reason="shape")
    return gradient if delta is None else undrop(gradient, delta, settings.drop, shape)


def _move(
    settings: Settings, bottom: Bottom, mask: Mask | None, rate: float, decay: float, generator: Generator
) -> None:
    """Step along the quantized gradient; equations (11) to (13). Decay pulls at weights, it is not quantized."""
    if settings.bits < FLOAT_BITS:
        gradient = bottom.gradient.numpy()
        active = mask.active.numpy() if mask else slice(None)
        codes, low, high = levels(torch.from_numpy(gradient[active]), settings.bits, generator)
        gradient[active] = dequantize(codes, settings.bits, low, high).numpy()
    if decay:
        bottom.vector.mul_(1 - rate * decay)
    bottom.vector.add_(bottom.gradient, alpha=-rate)


def _outcome(
    settings: Settings, state: State, bottom: Bottom, mask: Mask | None, tally: Tally, num_examples: int
) -> tuple[State, Result]:
    metrics = {"missed_steps": float(tally.missed), "refused_batches": float(tally.refused)}
    coverage: Tree = {}
    if mask:
        state = State({"mask": mask.packed(bottom.count)})
        weights = bottom.vector[: bottom.count]
        metrics |= {"sparsity": _zeros(weights) / bottom.count, "pruned_norm_ratio": mask.norm_ratio}
        if settings.average == "holders":
            coverage = bottom.coverage(mask.active[: bottom.count])
    return state, Result(
        tree=bottom.tree(),
        weight=float(num_examples) if settings.weighted else 1.0,
        num_examples=num_examples,
        loss=tally.loss / tally.examples if tally.examples else None,
        coverage=coverage,
        metrics=metrics,
    )
