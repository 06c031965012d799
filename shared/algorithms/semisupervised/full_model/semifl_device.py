"""Device half of SemiFL: pseudo-labels once a round, and mixed examples.

E. Diao, J. Ding, V. Tarokh. SemiFL, NeurIPS 2022, https://arxiv.org/abs/2106.01432. See `semifl` for the equations. No
label is read. A device without confident examples sends no tensor, reports that, and does not count in the mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.algorithms.base import Batches, Outcome, Result
from shared.algorithms.fedavg import REMEDY
from shared.algorithms.semisupervised.full_model.network_steps import StepLoss, StepSummary, require_examples
from shared.algorithms.semisupervised.full_model.semifl_settings import SemiflSettings, draw_epoch_batches
from shared.data.views.pair import make_views
from shared.errors import Diverged
from shared.models.base import Model
from shared.models.leaves import load_leaves
from shared.protocol.measurements import SKIPPED
from shared.protocol.messages import Assignment, derive_seed
from shared.tensors import tree
from shared.tensors.tree import State, Tree

KEPT = "kept_examples"
"""Metric of an update: number of examples with a confident label."""
FIX, MIX = "fix_loss", "mix_loss"
"""Metrics of an update: terms of the mean loss, from confident and from mixed examples."""


@dataclass(frozen=True)
class PseudoLabelledData:
    """Pseudo-labels of a device's examples.

    Attributes:
        labels: Likeliest class of each, int64 of shape (N,).
        kept: Positions of the fix set, int64 of shape (K,), ascending.
    """

    labels: Tensor
    kept: Tensor


@dataclass(frozen=True)
class MixedBatch:
    """A batch of the fix set, and equally many examples drawn from all.

    Attributes:
        strong: a_s(x) of the fix set, of shape (B, ...).
        mixed: lambda a_w(x) + (1 - lambda) a_w(x'), of the same shape.
        labels: y^ of the fix set, of shape (B,).
        others: y^ of the drawn examples x', of shape (B,).
        share: lambda, in [0, 1].
    """

    strong: Tensor
    mixed: Tensor
    labels: Tensor
    others: Tensor
    share: float

    def objective(self, network: Callable[[Tensor], Tensor]) -> StepLoss:
        """Return the loss of fix and mix together."""
        fixed = functional.cross_entropy(network(self.strong), self.labels)
        outputs = network(self.mixed)
        mixed_loss = functional.cross_entropy(outputs, self.labels)
        loss = fixed + self.share * mixed_loss + (1 - self.share) * functional.cross_entropy(outputs, self.others)
        return StepLoss(loss, len(self.labels), {FIX: fixed.item(), MIX: loss.item() - fixed.item()})


def mix_inputs(weak: Tensor, other: Tensor, share: float) -> Tensor:
    """Return the convex combination of two batches of the same shape.

    Args:
        weak: Batch with weight `share`.
        share: Weight in [0, 1].
    """
    return share * weak + (1 - share) * other


def make_mixed_batch(
    settings: SemiflSettings, inputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], seed: int
) -> MixedBatch:
    """Return the views of a step and their mixture, deterministic in the seed.

    Args:
        inputs: Examples of the fix set and drawn ones, of the same shape.
        labels: Labels of both, each of shape (B,).
    """
    weak, strong = make_views(inputs[0], ("weak", "strong"), derive_seed(seed, 0, "views"), mirrors=settings.mirrors)
    (other,) = make_views(inputs[1], ("weak",), derive_seed(seed, 1, "views"), mirrors=settings.mirrors)
    share = random.Random(seed).betavariate(settings.mixing, settings.mixing)  # noqa: S311 - no secret
    return MixedBatch(strong, mix_inputs(weak, other, share), labels[0], labels[1], share)


@torch.no_grad()
def label_examples(layers: nn.Module, batches: Batches, size: int, threshold: float) -> PseudoLabelledData:
    """Return a network's pseudo-labels for all of a device's examples, in evaluation mode with the received statistics.

    Args:
        layers: The network, with the received parameters.
        threshold: tau, the least probability of a confident label.

    Raises:
        Diverged: An output is NaN or infinite.
    """
    layers.eval()
    likeliest, labels = list[Tensor](), list[Tensor]()
    for places in torch.arange(batches.num_examples).split(size):
        outputs = layers(batches.inputs_at(places))
        if not outputs.isfinite().all():
            raise Diverged(f"the received model gives outputs that are NaN or infinite: {REMEDY}")
        share, label = outputs.softmax(1).max(1)
        likeliest.append(share)
        labels.append(label)
    return PseudoLabelledData(torch.cat(labels), (torch.cat(likeliest) >= threshold).nonzero().flatten())


def iterate_mixed_batches(
    settings: SemiflSettings, batches: Batches, pseudo: PseudoLabelledData, assignment: Assignment
) -> Iterator[MixedBatch]:
    """Yield the batches of a device's epochs: the fix set, with equally many draws from all.

    Args:
        pseudo: Pseudo-labels; the fix set is not empty.
    """
    fix_set = pseudo.kept
    if len(fix_set) == 1:  # BatchNorm has no variance of a single example; two views of it differ
        fix_set = fix_set.repeat(2)
    generator = torch.Generator().manual_seed(derive_seed(assignment.seed, 0, "orders"))
    step = 0
    for _ in range(assignment.hyper.local_epochs):
        for order in draw_epoch_batches(len(fix_set), assignment.hyper.batch_size, generator):
            step += 1
            places = fix_set[order]
            drawn = torch.randint(batches.num_examples, (len(places),), generator=generator)
            inputs = batches.inputs_at(places), batches.inputs_at(drawn)
            yield make_mixed_batch(
                settings,
                inputs,
                (pseudo.labels[places], pseudo.labels[drawn]),
                derive_seed(assignment.seed, step, "mixed"),
            )


def train_network(
    settings: SemiflSettings, layers: nn.Module, mixed: Iterator[MixedBatch], assignment: Assignment
) -> StepSummary:
    """Train a network in place on mixed batches, one per step.

    Args:
        layers: The network, with the received parameters.

    Raises:
        Diverged: The loss of a step is not finite.
    """
    layers.train()
    layers.zero_grad()  # gradients of a task interrupted within a step
    descent = settings.descent([*layers.named_parameters()], assignment.hyper)
    return descent.take(batch.objective(layers) for batch in mixed)


def local(
    settings: SemiflSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. The update is the change of the weights, without running statistics.

    Raises:
        TaskFailed: There are no examples.
        Diverged: An output of the received model or the loss of a step is not finite.
    """
    require_examples(batches)
    layers = model.layers
    load_leaves(layers, start)
    pseudo = label_examples(layers, batches, assignment.hyper.batch_size, settings.threshold)
    metrics = {KEPT: float(len(pseudo.kept)), SKIPPED: float(not len(pseudo.kept))}
    if not len(pseudo.kept):
        return state, Result({}, 1.0, 0, metrics=metrics)
    summary = train_network(settings, layers, iterate_mixed_batches(settings, batches, pseudo, assignment), assignment)
    metrics |= summary.terms
    return state, Result(_weight_changes(layers, start), 1.0, batches.num_examples, summary.loss, metrics=metrics)


def _weight_changes(layers: nn.Module, start: Tree) -> Tree:
    weights = {name: leaf.detach() for name, leaf in layers.named_parameters() if leaf.requires_grad}
    return tree.subtract(weights, start)


def timed_step(
    settings: SemiflSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half for timing: one step on every batch, with all examples in the fix set; labels cost nothing."""
    load_leaves(model.layers, start)

    def step_batches() -> Iterator[MixedBatch]:
        for step, (inputs, _) in enumerate(batches, start=1):
            labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
            seed = derive_seed(assignment.seed, step, "mixed")
            yield make_mixed_batch(settings, (inputs, inputs.flip(0)), (labels, labels), seed)

    train_network(settings, model.layers, step_batches(), assignment)
    return state, Result(_weight_changes(model.layers, start), 1.0, batches.num_examples)
