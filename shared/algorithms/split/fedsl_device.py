"""Device half of lightweight FedSL: features up, gradient down, prune, quantize, step.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; equations
as in `fedsl`. The dropping of features comes from SplitFC: https://arxiv.org/abs/2307.10805.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Generator, Tensor

from shared.algorithms.base import Batches, Result, Session
from shared.algorithms.split.client_part import Bottom, Mask, _count_zeros
from shared.algorithms.split.settings import FLOAT_BITS, FedslSettings, first_step, is_finite
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.models.running_statistics import measure_batch, statistic_names
from shared.protocol.messages import STATISTICS_BATCHES, Assignment, Missed, derive_seed
from shared.tensors import bits
from shared.tensors.feature_dropout import draw_delta, drop, undrop
from shared.tensors.quantizer import dequantize, quantize
from shared.tensors.tree import State, Tree

BYTE = 255
"""Largest label that fits into a byte."""


@dataclass
class SessionTally:
    """Totals of a session."""

    loss: float = 0.0
    examples: int = 0
    missed: int = 0
    refused: int = 0

    def add(self, loss: float, examples: int) -> None:
        """Count a batch."""
        self.loss += loss * examples
        self.examples += examples


def local(
    settings: FedslSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Session:
    """Device half: see `Algorithm.local`. A batch that does not count leaves no trace, not even in BatchNorm.

    Not a generator itself: its frame would retain the download, a file's pages, for the whole session.

    Raises:
        TaskFailed: There are no examples, or, in the session, the client part has diverged.
        WireError: In the session, the server sent a gradient of another shape.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")
    session = _measure if assignment.measures_statistics else _train
    return session(settings, model, state, start, batches, assignment)


def _train(
    settings: FedslSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Session:
    """Train step by step."""
    bottom = Bottom(model, settings.cut_of(model), start, recompute=settings.recompute)
    del start  # frees a file's pages
    mask = Mask(settings, state, bottom, assignment) if settings.sparsity and bottom.count else None
    generator, tally, due = Generator(), SessionTally(), 1
    for step, (inputs, labels) in enumerate(islice(batches, assignment.steps), 1):
        if step < due:
            continue
        generator.manual_seed(derive_seed(assignment.seed, step, "step"))  # so that a missed step changes no later draw
        features, buffers = bottom.forward(inputs)
        delta = None
        if settings.drop:
            delta = draw_delta(tuple(features.shape), settings.drop, settings.granularity, generator)
            delta = delta.to(features.device)
        up = _make_upload(settings, features.detach(), delta, labels)
        down = yield up
        due = step + (down.steps if isinstance(down, Missed) else 1)
        if isinstance(down, Missed):
            tally.missed += min(due, assignment.steps + 1) - step
            del features  # frees its graph before the next batch needs the memory
            continue
        if "loss" in down:
            bottom.backward(features, _feature_gradient(settings, down, up, delta, tuple(features.shape)))
        del features
        if "loss" not in down or not is_finite(bottom.gradient):
            tally.refused += 1
            continue
        bottom.keep(buffers)
        tally.add(down["loss"].item(), len(labels))
        now = first_step(assignment) + step
        if mask:
            mask.apply(bottom, now)
        _step_quantized(
            settings, bottom, mask, settings.step_size(assignment, now), assignment.hyper.weight_decay, generator
        )
    return _make_result(settings, state, bottom, mask, tally, batches.num_examples)


def _measure(
    settings: FedslSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Session:
    """Send all features of some batches, and measure the running statistics below the cut."""
    network, due, counted, missed = model.below(settings.cut_of(model)), 1, 0, 0
    for step, (inputs, labels) in enumerate(islice(batches, assignment.steps), 1):
        if step < due:
            continue
        features, after = measure_batch(network, start, inputs, counted)
        down = yield _make_upload(settings, features, None, labels)
        due = step + (down.steps if isinstance(down, Missed) else 1)
        if isinstance(down, Missed):
            missed += min(due, assignment.steps + 1) - step
        else:
            start, counted = after, counted + 1
    return state, Result(
        tree={name: start[name] for name in statistic_names(network)},
        weight=1.0,
        num_examples=batches.num_examples,
        metrics={STATISTICS_BATCHES: float(counted), "missed_steps": float(missed)},
    )


def _make_upload(settings: FedslSettings, features: Tensor, delta: Tensor | None, labels: Tensor) -> Tree:
    """Return the upload of a batch, without the dropped columns or channels."""
    if not is_finite(features):
        raise TaskFailed("the client part has diverged: features are NaN or infinite; lower the learning rate")
    upload = {"features": features, "labels": _pack_labels(labels)}
    if delta is None:
        return upload
    upload["features"] = drop(features, delta, settings.drop)
    if settings.granularity != "element":
        upload["keep"] = torch.from_numpy(bits.pack(delta.numpy(force=True), 1))
        upload["shape"] = torch.tensor(features.shape[1:], dtype=torch.int32)
    return upload


def _pack_labels(labels: Tensor) -> Tensor:
    """Return class numbers in the smallest type that holds them; other targets as they are."""
    if labels.is_floating_point():
        return labels
    return labels.to(torch.uint8 if labels.max() <= BYTE else torch.int64)


def _feature_gradient(
    settings: FedslSettings, down: Tree, up: Tree, delta: Tensor | None, shape: tuple[int, ...]
) -> Tensor:
    gradient = down["gradient"]
    if gradient.shape != up["features"].shape:
        raise WireError(f"gradient of shape {tuple(gradient.shape)}, not {tuple(up['features'].shape)}", reason="shape")
    return gradient if delta is None else undrop(gradient, delta, settings.drop, shape)


def _step_quantized(
    settings: FedslSettings, bottom: Bottom, mask: Mask | None, rate: float, decay: float, generator: Generator
) -> None:
    """Step along the quantized gradient; equations (11) to (13). Weight decay is not quantized."""
    if settings.bits < FLOAT_BITS:
        gradient = bottom.gradient.numpy(force=True)  # shares storage on the CPU, else a copy
        active = mask.active.numpy(force=True) if mask else slice(None)
        codes, low, high = quantize(torch.from_numpy(gradient[active]), settings.bits, generator)
        gradient[active] = dequantize(codes, settings.bits, low, high).numpy()
        if not bottom.gradient.is_cpu:
            bottom.gradient.copy_(torch.from_numpy(gradient))
    if decay:
        bottom.vector.mul_(1 - rate * decay)
    bottom.vector.add_(bottom.gradient, alpha=-rate)


def _make_result(
    settings: FedslSettings, state: State, bottom: Bottom, mask: Mask | None, tally: SessionTally, num_examples: int
) -> tuple[State, Result]:
    metrics = {"missed_steps": float(tally.missed), "refused_batches": float(tally.refused)}
    coverage: Tree = {}
    if mask:
        state = State({"mask": mask.pack_bits(bottom.count)})
        weights = bottom.vector[: bottom.count]
        metrics |= {"sparsity": _count_zeros(weights) / bottom.count, "pruned_norm_ratio": mask.norm_ratio}
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
