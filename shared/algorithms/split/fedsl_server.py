"""Server half of lightweight FedSL: a step over all devices' features.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; equations
as in `shared.algorithms.split.fedsl`. A single server part that devices move in turns is SplitFed v2 of Thapa et al.,
https://arxiv.org/abs/2004.12088.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split.settings import FedslSettings, first_step, is_finite
from shared.algorithms.split.smashed_data import SmashedBatch, unpack_features
from shared.models.base import Model
from shared.models.chain import parts_of
from shared.models.evaluate import training_mode
from shared.models.running_statistics import measure_batch, statistic_names
from shared.objectives.training import TrainingObjective
from shared.protocol.messages import STATISTICS_BATCHES, Assignment
from shared.tensors.feature_dropout import gather
from shared.tensors.tree import State, Tree

ROWWISE = frozenset(
    (
        *(nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LayerNorm, nn.GroupNorm),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    )
)
"""Layers without randomness that compute each example independently, so that devices may share a batch."""
PASS_EXAMPLES = 512
"""Maximum examples of a shared pass: more take memory and save no time."""


@dataclass(frozen=True)
class Pass:
    """Result of passing some devices' features through the server part.

    Attributes:
        gradients: Sum of the gradients of each device's mean loss, in the order of the weights; equation (5).
    """

    down: dict[str, Tree]
    gradients: tuple[Tensor, ...]
    buffers: Tree

    @property
    def counts(self) -> bool:
        """True if every number is finite."""
        sent = (leaf for tree in self.down.values() for leaf in tree.values())
        return all(map(is_finite, (*sent, *self.gradients)))


@dataclass
class ServerPart:
    """Server part for one step; `weights` share the storage of the state's."""

    chain: nn.Sequential
    network: nn.Sequential
    weights: Tree
    buffers: Tree
    objective: TrainingObjective

    @classmethod
    def from_tree(cls, model: Model, cut: int, tree: Tree) -> ServerPart:
        """Return the layers above a cut, with their leaves from the whole network's tree.

        Args:
            model: The whole network, without storage.
        """
        network = model.above(cut)
        trainable = {name for name, leaf in network.named_parameters() if leaf.requires_grad}
        weights = {name: tree[name].detach().requires_grad_() for name in network.state_dict() if name in trainable}
        buffers = {name: tree[name] for name in network.state_dict() if name not in trainable}
        return cls(model.chain, network, weights, buffers, model.objective)

    def run(self, group: Mapping[str, SmashedBatch]) -> Pass:
        """Pass features forward and back, for all devices of the group at once; equations (4) and (5)."""
        features = torch.cat([batch.features for batch in group.values()]) if len(group) > 1 else _only(group).features
        features = features.detach().requires_grad_()
        labels = torch.cat([batch.labels for batch in group.values()])
        sizes = [len(batch.labels) for batch in group.values()]
        buffers = {name: leaf.clone() for name, leaf in self.buffers.items()}
        with training_mode(self.chain, train=True):
            outputs = functional_call(self.network, {**self.weights, **buffers}, (features,))
        losses = self.objective.part_losses(outputs, labels, sizes)
        upstream, *gradients = torch.autograd.grad(
            torch.stack(losses).sum(), [features, *self.weights.values()], materialize_grads=True
        )
        down = {
            device: {"gradient": part if batch.delta is None else gather(part, batch.delta), "loss": loss.detach()}
            for (device, batch), part, loss in zip(group.items(), upstream.split(sizes), losses, strict=True)
        }
        return Pass(down, tuple(gradients), buffers)

    @torch.no_grad()
    def move(self, gradients: tuple[Tensor, ...], rate: float, decay: float) -> None:
        """Step along gradients, in place; equation (6).

        Args:
            gradients: In the order and shapes of the weights.
        """
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            if decay:
                weight.mul_(1 - rate * decay)
            weight.add_(gradient, alpha=-rate)


def serve(
    settings: FedslSettings, model: Model, state: State, assignments: Mapping[str, Assignment], ups: Mapping[str, Tree]
) -> tuple[State, dict[str, Tree]]:
    """Server half: see `Split.serve`.

    A device with NaN or infinite numbers does not count: its answer is zeros, without a loss.
    """
    assignment = assignments[next(iter(ups))]
    before = state.facts["step"]
    assert isinstance(before, int)
    step = max(before, first_step(assignment)) + 1
    rate, decay = settings.step_size(assignment, step), assignment.hyper.weight_decay
    top = ServerPart.from_tree(model, settings.cut_of(model), state.tree)
    total: tuple[Tensor, ...] = ()
    down: dict[str, Tree] = {}
    counted = 0
    for group in _group_devices(
        settings, top.network, {device: unpack_features(settings, up) for device, up in ups.items()}
    ):
        for result in _run_passes(top, group):
            if not result.counts:
                down |= {
                    device: {"gradient": torch.zeros_like(answer["gradient"])} for device, answer in result.down.items()
                }
                continue
            down |= result.down
            top.buffers = result.buffers
            counted += len(result.down)
            if settings.server == "turns":
                top.move(result.gradients, rate, decay)
            elif total:
                total = tuple(
                    total_gradient.add_(more) for total_gradient, more in zip(total, result.gradients, strict=True)
                )
            else:
                total = result.gradients
    if total:
        top.move(total, rate / counted, decay * counted)
    return State({**state.tree, **top.buffers}, {**state.facts, "step": step}), down


def measure(
    settings: FedslSettings, model: Model, state: State, _assignments: Mapping[str, Assignment], ups: Mapping[str, Tree]
) -> tuple[State, dict[str, Tree]]:
    """Measure the server part's running statistics over one more batch of every device; see `Split.measure`.

    The answers are empty: without a loss no device moves. Non-finite statistics do not count.

    Args:
        settings: Settings in which nothing is dropped.
        model: The whole network, without storage.
        state: The server's; its facts count the batches so far.
    """
    network = model.above(settings.cut_of(model))
    names = statistic_names(network)
    tree, counted = state.tree, state.facts.get(STATISTICS_BATCHES, 0)
    assert isinstance(counted, int)
    for up in ups.values():
        _, after = measure_batch(network, tree, unpack_features(settings, up).features, counted)
        if all(is_finite(after[name]) for name in names):
            tree, counted = after, counted + 1
    return State(tree, {**state.facts, STATISTICS_BATCHES: counted}), {device: {} for device in ups}


def _run_passes(top: ServerPart, group: Mapping[str, SmashedBatch]) -> Iterator[Pass]:
    """Yield the pass of a group; if it is not finite, a pass of each device alone."""
    together = top.run(group)
    if len(group) == 1 or together.counts:
        yield together
        return
    for device, batch in group.items():
        yield top.run({device: batch})


def _group_devices(
    settings: FedslSettings, network: nn.Sequential, batches: Mapping[str, SmashedBatch]
) -> Iterator[dict[str, SmashedBatch]]:
    """Yield groups of devices that can share a pass without changing any result; else devices one by one."""
    shared = settings.server == "mean" and all(type(part) in ROWWISE for layer in network for part in parts_of(layer))
    group: dict[str, SmashedBatch] = {}
    for device, batch in batches.items():
        if group and not (shared and _fits_group(batch, group)):
            yield group
            group = {}
        group[device] = batch
    yield group


def _fits_group(batch: SmashedBatch, group: Mapping[str, SmashedBatch]) -> bool:
    examples = len(batch.labels) + sum(len(other.labels) for other in group.values())
    return examples <= PASS_EXAMPLES and batch.features.shape[1:] == next(iter(group.values())).features.shape[1:]


def _only(group: Mapping[str, SmashedBatch]) -> SmashedBatch:
    (batch,) = group.values()
    return batch
