"""The server half of lightweight FedSL: one step of the server part over the features of all devices.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; equations
as in `shared.algorithms.split.fedsl`. One server part that devices move in turns is SplitFed v2 of Thapa et al.,
https://arxiv.org/abs/2004.12088.

What a device sends at a step of a split session, checked and unpacked by the server.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; smashed
data, features at the cut with labels, are those of Gupta and Raskar's split learning, https://arxiv.org/abs/1810.06060.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.split.cut_shapes import count_outputs, features_at_cut
from shared.algorithms.split.settings import FedslSettings, first_step, is_finite
from shared.errors import WireError
from shared.models.base import Model
from shared.models.evaluate import in_mode
from shared.models.running_statistics import measure_batch, statistics_of
from shared.protocol.messages import STATISTICS_BATCHES, Assignment
from shared.tensors import bits
from shared.tensors.feature_dropout import gather, spread
from shared.tensors.tree import State, Tree, check_like

MOST_NUMBERS = 1 << 28
"""Of a batch at the cut, dropped ones included: 1 GiB of them."""
MOST_AXES = 8

ROWWISE = frozenset(
    (
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LayerNorm, nn.GroupNorm),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    )
)
"""Layers that take each example for itself and draw nothing, so that devices may share a batch."""

PASS_EXAMPLES = 512
"""Examples of a pass that devices share: more take memory and gain no time."""


@dataclass(frozen=True)
class Smashed:
    """A device's batch at the cut.

    Attributes:
        features: Of shape (B, ...), with zeros for what was dropped.
        labels: int64 of shape (B,).
        delta: Which columns or channels are there, boolean; None for all.
    """

    features: Tensor
    labels: Tensor
    delta: Tensor | None


def check_features(settings: FedslSettings, model: Model, state: State, assignment: Assignment, up: Tree) -> float:
    """Refuse what no server part could take: see `Split.check_features`.

    A part of convolutions takes pictures of any size, and a few bytes can say that huge ones were dropped: where
    `model.example` is known, features are as many as one like it has.

    Raises:
        WireError: A tensor is missing, unknown, or of another dtype or shape than the others say; there are more
            examples than a batch has, a label is of no class, a number is NaN or infinite.
    """
    sparse = bool(settings.drop) and settings.granularity != "element"
    if set(up) != {"features", "labels", *(("keep", "shape") if sparse else ())}:
        raise WireError(f"tensors {', '.join(map(repr, sorted(up)))}", reason="unknown-tensor")
    features, labels = up["features"], up["labels"]
    if labels.dtype not in {torch.uint8, torch.int64} or features.dtype != torch.float32:
        raise WireError(f"features of {features.dtype}, labels of {labels.dtype}", reason="dtype")
    if not 1 <= labels.numel() <= assignment.largest_batch or labels.ndim != 1 or features.ndim < 2:  # noqa: PLR2004
        raise WireError(f"labels of shape {tuple(labels.shape)} for batches of {assignment.largest_batch}")
    if len(features) != len(labels):
        raise WireError(f"{len(features)} features with {len(labels)} labels", reason="shape")
    norm = check_like({"features": features}, {"features": features})
    shape, cut = _sparse_shape(settings, up) if sparse else tuple(features.shape), settings.cut_of(model)
    if model.example and shape[1:] != (own := features_at_cut(model, cut, state.tree)):
        raise WireError(
            f"an example has features of shape {shape[1:]}, one of {model.example} has {own}", reason="shape"
        )
    classes = count_outputs(model, cut, state.tree, shape)
    if labels.min() < 0 or labels.max() >= classes:
        raise WireError(f"a label is not in 0 to {classes - 1}", reason="label")
    return norm


def _sparse_shape(settings: FedslSettings, up: Tree) -> tuple[int, ...]:
    """Return the shape that features have with what was dropped."""
    rows, keep, extents = up["features"], up["keep"], up["shape"]
    if keep.dtype != torch.uint8 or extents.dtype != torch.int32 or keep.ndim != 1 or extents.ndim != 1:
        raise WireError(f"keep of {keep.dtype}, shape of {extents.dtype}", reason="dtype")
    if not 1 <= len(extents) < MOST_AXES or extents.min() < 1:
        raise WireError(f"features of {len(extents)} axes", reason="shape")
    shape = (len(rows), *extents.tolist())
    if math.prod(shape) > MOST_NUMBERS:
        raise WireError(f"features of shape {shape} are too many", reason="shape")
    delta = _delta(settings, up, shape)
    if rows.shape != (shape[0], int(delta.sum()) * (math.prod(shape[1:]) // len(delta))):
        raise WireError(f"features of shape {tuple(rows.shape)}, where {int(delta.sum())} are kept", reason="shape")
    return shape


def _delta(settings: FedslSettings, up: Tree, shape: tuple[int, ...]) -> Tensor:
    count = shape[1] if settings.granularity == "channel" else math.prod(shape[1:])
    return torch.from_numpy(bits.unpack(up["keep"].numpy(force=True), count, 1)).bool().to(up["keep"].device)


def unpack_features(settings: FedslSettings, up: Tree) -> Smashed:
    """Return a batch that was admitted."""
    features, labels = up["features"], up["labels"].long()
    if "keep" not in up:
        return Smashed(features, labels, None)
    shape = (len(features), *up["shape"].tolist())
    delta = _delta(settings, up, shape)
    return Smashed(spread(features, delta, shape), labels, delta)


@dataclass(frozen=True)
class Pass:
    """What came of a pass of some devices' features through the server part.

    Attributes:
        down: By device, what it is sent.
        gradients: Of the weights, in their order: the sum of those of each device's own mean loss, equation (5).
        buffers: As they are after it.
    """

    down: dict[str, Tree]
    gradients: tuple[Tensor, ...]
    buffers: Tree

    @property
    def counts(self) -> bool:
        """Whether every number of it can be used."""
        sent = (leaf for tree in self.down.values() for leaf in tree.values())
        return all(map(is_finite, (*sent, *self.gradients)))


@dataclass
class Top:
    """The server part for one step; `weights` share the storage of the state's."""

    whole: nn.Module
    network: nn.Sequential
    weights: Tree
    buffers: Tree

    @classmethod
    def from_tree(cls, model: Model, cut: int, tree: Tree) -> Top:
        """Return the layers above a cut, with their leaves of the whole network's tree.

        Args:
            model: The whole network, without storage.
            cut: Where it is cut.
            tree: The whole network's leaves.
        """
        network = model.above(cut)
        trainable = {name for name, leaf in network.named_parameters() if leaf.requires_grad}
        weights = {name: tree[name].detach().requires_grad_() for name in network.state_dict() if name in trainable}
        return cls(
            model.layers, network, weights, {name: tree[name] for name in network.state_dict() if name not in trainable}
        )

    def run(self, group: Mapping[str, Smashed]) -> Pass:
        """Pass features forward and back; equations (4) and (5), for all devices of the group at once."""
        features = torch.cat([one.features for one in group.values()]) if len(group) > 1 else _only(group).features
        features = features.detach().requires_grad_()
        labels = torch.cat([one.labels for one in group.values()])
        sizes = [len(one.labels) for one in group.values()]
        buffers = {name: leaf.clone() for name, leaf in self.buffers.items()}
        with in_mode(self.whole, train=True):
            outputs = functional_call(self.network, {**self.weights, **buffers}, (features,))
        losses = [own.mean() for own in functional.cross_entropy(outputs, labels, reduction="none").split(sizes)]
        upstream, *gradients = torch.autograd.grad(
            torch.stack(losses).sum(), [features, *self.weights.values()], materialize_grads=True
        )
        down = {
            device: {"gradient": own if one.delta is None else gather(own, one.delta), "loss": loss.detach()}
            for (device, one), own, loss in zip(group.items(), upstream.split(sizes), losses, strict=True)
        }
        return Pass(down, tuple(gradients), buffers)

    @torch.no_grad()
    def move(self, gradients: tuple[Tensor, ...], rate: float, decay: float) -> None:
        """Step along gradients, in place; equation (6).

        Args:
            gradients: One a weight, of its shape.
        """
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            if decay:
                weight.mul_(1 - rate * decay)
            weight.add_(gradient, alpha=-rate)


def serve(
    settings: FedslSettings, model: Model, state: State, assignments: Mapping[str, Assignment], ups: Mapping[str, Tree]
) -> tuple[State, dict[str, Tree]]:
    """Server half: see `Split.serve`.

    A device whose numbers are NaN or infinite does not count: it is answered with zeros, and without a loss.
    """
    told = assignments[next(iter(ups))]
    before = state.facts["step"]
    assert isinstance(before, int)
    step = max(before, first_step(told)) + 1
    rate, decay = settings.step_size(told, step), told.hyper.weight_decay
    top = Top.from_tree(model, settings.cut_of(model), state.tree)
    total: tuple[Tensor, ...] = ()
    down: dict[str, Tree] = {}
    counted = 0
    for group in _groups(settings, top.network, {device: unpack_features(settings, up) for device, up in ups.items()}):
        for one in _passes(top, group):
            if not one.counts:
                down |= {device: {"gradient": torch.zeros_like(own["gradient"])} for device, own in one.down.items()}
                continue
            down |= one.down
            top.buffers = one.buffers
            counted += len(one.down)
            if settings.server == "turns":
                top.move(one.gradients, rate, decay)
            elif total:
                total = tuple(held.add_(more) for held, more in zip(total, one.gradients, strict=True))
            else:
                total = one.gradients
    if total:
        top.move(total, rate / counted, decay * counted)
    return State({**state.tree, **top.buffers}, {**state.facts, "step": step}), down


def measure(
    settings: FedslSettings, model: Model, state: State, _told: Mapping[str, Assignment], ups: Mapping[str, Tree]
) -> tuple[State, dict[str, Tree]]:
    """Measure the server part's running statistics over one batch more of every device; see `Split.measure`.

    The answers are empty: they have no loss, and so no device moves. What is not finite does not count.

    Args:
        settings: The method's, in which nothing is dropped.
        model: The whole network, without storage.
        state: The server's; its facts count the batches so far.
        _told: What the devices were told.
        ups: What came up, by device.
    """
    network = model.above(settings.cut_of(model))
    names = statistics_of(network)
    tree, counted = state.tree, state.facts.get(STATISTICS_BATCHES, 0)
    assert isinstance(counted, int)
    for up in ups.values():
        _, after = measure_batch(network, tree, unpack_features(settings, up).features, counted)
        if all(is_finite(after[name]) for name in names):
            tree, counted = after, counted + 1
    return State(tree, {**state.facts, STATISTICS_BATCHES: counted}), {device: {} for device in ups}


def _passes(top: Top, group: Mapping[str, Smashed]) -> Iterator[Pass]:
    """Yield the pass of a group; of each device for itself where one of them spoils what they share."""
    together = top.run(group)
    if len(group) == 1 or together.counts:
        yield together
        return
    for device, one in group.items():
        yield top.run({device: one})


def _groups(settings: FedslSettings, network: nn.Module, sent: Mapping[str, Smashed]) -> Iterator[dict[str, Smashed]]:
    """Yield devices that can share a pass without any difference, in order; else one after the other."""
    shared = settings.server == "mean" and all(type(layer) in ROWWISE for layer in network.modules())
    group: dict[str, Smashed] = {}
    for device, one in sent.items():
        if group and not (shared and _fits(one, group)):
            yield group
            group = {}
        group[device] = one
    yield group


def _fits(one: Smashed, group: Mapping[str, Smashed]) -> bool:
    examples = len(one.labels) + sum(len(other.labels) for other in group.values())
    return examples <= PASS_EXAMPLES and one.features.shape[1:] == next(iter(group.values())).features.shape[1:]


def _only(group: Mapping[str, Smashed]) -> Smashed:
    (one,) = group.values()
    return one
