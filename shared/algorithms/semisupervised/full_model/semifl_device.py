"""The device half of SemiFL: what the global model is sure of, labelled once a round, and mixed with all the others.

E. Diao, J. Ding, V. Tarokh. SemiFL, NeurIPS 2022, https://arxiv.org/abs/2106.01432. See `semifl` for the equations. No
label is looked at. A device that has nothing to learn from sends nothing, says so, and does not count in the mean.
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
from shared.algorithms.semisupervised.full_model.network_steps import Objective, Taken, require_examples
from shared.algorithms.semisupervised.full_model.semifl_settings import SemiflSettings, split_epoch
from shared.data.views.pair import make_views
from shared.errors import Diverged
from shared.models.base import Model
from shared.protocol.measurements import SKIPPED
from shared.protocol.messages import Assignment, mix
from shared.tensors import tree
from shared.tensors.tree import State, Tree

KEPT = "kept_examples"
"""Among the metrics of an update: on how many examples its device was sure of the class."""
FIX, MIX = "fix_loss", "mix_loss"
"""Likewise: what the mean loss is the sum of, that of sure examples and that of mixed ones."""


@dataclass(frozen=True)
class Labelled:
    """What the global model takes a device's examples for.

    Attributes:
        labels: The likeliest class of each, int64 of shape (N,).
        kept: Places of those of the fix set, int64 of shape (K,), ascending.
    """

    labels: Tensor
    kept: Tensor


@dataclass(frozen=True)
class MixedBatch:
    """A batch of kept examples, and of as many drawn from all.

    Attributes:
        strong: a_s(x) of the kept ones, of shape (B, ...).
        mixed: lambda a_w(x) + (1 - lambda) a_w(x'), of the same shape.
        labels: y^ of the kept ones, of shape (B,).
        others: y^ of the drawn ones x', of shape (B,).
        share: lambda.
    """

    strong: Tensor
    mixed: Tensor
    labels: Tensor
    others: Tensor
    share: float

    def objective(self, network: Callable[[Tensor], Tensor]) -> Objective:
        """Return the loss of fix and mix together."""
        fixed = functional.cross_entropy(network(self.strong), self.labels)
        outputs = network(self.mixed)
        own = functional.cross_entropy(outputs, self.labels)
        loss = fixed + self.share * own + (1 - self.share) * functional.cross_entropy(outputs, self.others)
        return Objective(loss, len(self.labels), {FIX: fixed.item(), MIX: loss.item() - fixed.item()})


def blend(weak: Tensor, other: Tensor, share: float) -> Tensor:
    """Return the convex combination of two batches of one shape.

    Args:
        weak: Counts `share`.
        share: In [0, 1].
    """
    return share * weak + (1 - share) * other


def mix_views(
    settings: SemiflSettings, inputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], seed: int
) -> MixedBatch:
    """Return the views of a step, and what of them is mixed; a function of the seed.

    Args:
        inputs: Of kept examples, and of drawn ones; of one shape.
        seed: Of views and share.
    """
    weak, strong = make_views(inputs[0], ("weak", "strong"), mix(seed, 0, "views"), mirrors=settings.mirrors)
    (other,) = make_views(inputs[1], ("weak",), mix(seed, 1, "views"), mirrors=settings.mirrors)
    share = random.Random(seed).betavariate(settings.mixing, settings.mixing)  # noqa: S311 - no secret
    return MixedBatch(strong, blend(weak, other, share), *labels, share)


@torch.no_grad()
def label_examples(layers: nn.Module, batches: Batches, size: int, threshold: float) -> Labelled:
    """Return what a network takes all of a device's examples for; it evaluates, by the statistics that came with it.

    Args:
        layers: The network, with the parameters that came.
        size: How many are passed at a time.
        threshold: tau.

    Raises:
        Diverged: An output is NaN or infinite.
    """
    layers.eval()
    likeliest, labels = list[Tensor](), list[Tensor]()
    for places in torch.arange(batches.num_examples).split(size):
        outputs = layers(batches.inputs_at(places))
        if not outputs.isfinite().all():
            raise Diverged(f"the model that came gives outputs that are NaN or infinite: {REMEDY}")
        share, label = outputs.softmax(1).max(1)
        likeliest.append(share)
        labels.append(label)
    return Labelled(torch.cat(labels), (torch.cat(likeliest) >= threshold).nonzero().flatten())


def mixed_batches(
    settings: SemiflSettings, batches: Batches, found: Labelled, assignment: Assignment
) -> Iterator[MixedBatch]:
    """Yield the batches of a device's epochs: of what is kept, with as many draws from all.

    Args:
        found: Their labels; at least one is kept.
    """
    kept = found.kept
    kept = kept.repeat(2) if len(kept) == 1 else kept  # of a single one BatchNorm has no variance; its views differ
    generator = torch.Generator().manual_seed(mix(assignment.seed, 0, "orders"))
    step = 0
    for _ in range(assignment.hyper.local_epochs):
        for order in split_epoch(len(kept), assignment.hyper.batch_size, generator):
            step += 1
            own = kept[order]
            drawn = torch.randint(batches.num_examples, (len(own),), generator=generator)
            inputs = batches.inputs_at(own), batches.inputs_at(drawn)
            yield mix_views(
                settings, inputs, (found.labels[own], found.labels[drawn]), mix(assignment.seed, step, "mixed")
            )


def train_on(settings: SemiflSettings, layers: nn.Module, mixed: Iterator[MixedBatch], assignment: Assignment) -> Taken:
    """Train a network in place on mixed batches.

    Args:
        layers: The network, with the parameters that came.
        mixed: A batch a step.

    Raises:
        Diverged: The loss of a step is not finite.
    """
    layers.train()
    layers.zero_grad()  # of a task that was cut short in the middle of a step
    descent = settings.descent([*layers.named_parameters()], assignment.hyper)
    return descent.take(batch.objective(layers) for batch in mixed)


def local(
    settings: SemiflSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. What is sent is how far the weights moved; running statistics are not.

    Raises:
        TaskFailed: There are no examples.
        Diverged: The model that came, or a step, gives what is no number.
    """
    require_examples(batches)
    layers = model.layers
    layers.load_state_dict(start)
    found = label_examples(layers, batches, assignment.hyper.batch_size, settings.threshold)
    metrics = {KEPT: float(len(found.kept)), SKIPPED: float(not len(found.kept))}
    if not len(found.kept):
        return state, Result({}, 1.0, 0, metrics=metrics)
    taken = train_on(settings, layers, mixed_batches(settings, batches, found, assignment), assignment)
    metrics |= taken.terms
    return state, Result(_moved(layers, start), 1.0, batches.num_examples, taken.loss, metrics=metrics)


def _moved(layers: nn.Module, start: Tree) -> Tree:
    weights = {name: leaf.detach() for name, leaf in layers.named_parameters() if leaf.requires_grad}
    return tree.subtract(weights, start)


def timed_step(
    settings: SemiflSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half where steps are timed: one on every batch, as if all of it were kept; labels cost nothing.

    Args:
        state: What the device kept.
        start: The parameters that came.
        batches: Of any number.
        assignment: Step size and seed.
    """
    model.layers.load_state_dict(start)

    def mixed() -> Iterator[MixedBatch]:
        for step, (inputs, _) in enumerate(batches, start=1):
            labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
            seed = mix(assignment.seed, step, "mixed")
            yield mix_views(settings, (inputs, inputs.flip(0)), (labels, labels), seed)

    train_on(settings, model.layers, mixed(), assignment)
    return state, Result(_moved(model.layers, start), 1.0, batches.num_examples)
