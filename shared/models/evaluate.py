"""Model evaluation: loss and metrics of parameters, without copying them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.models.build import build_blank
from shared.models.chain import LayerChain
from shared.models.leaves import call_with
from shared.models.misfit import describe_misfit, dtype_name
from shared.objectives.classification import CLASSIFICATION
from shared.objectives.fit import require_fit
from shared.objectives.metric_sums import MetricSums
from shared.objectives.training import TrainingObjective
from shared.protocol.messages import Spec
from shared.protocol.objective import CLASSIFICATION_SPEC
from shared.registry import FAULTS
from shared.tensors.tree import Tree

MAX_CLASSES = 100
"""Maximum number of classes for accuracies by class."""

TRIED = 2
"""Examples on which loss and metrics are tried before any training."""
BATCH_SIZE, BATCH_BYTES = 512, 64 << 20
"""Maximum examples of a batch, and maximum bytes of a layer's inputs and outputs, or the size of the parameters if that
is larger."""


@contextmanager
def training_mode(layers: nn.Module, *, train: bool) -> Iterator[None]:
    """Set layers to training or evaluation mode inside the block, and restore them after it."""
    if isinstance(layers, LayerChain):  # its layers may run elsewhere too, in another mode
        modes = [(module, module.training) for module in layers.modules()]
        layers.train(train)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
        return
    if layers.training == train:
        yield
        return
    layers.train(train)
    try:
        yield
    finally:
        layers.train(not train)


@dataclass(frozen=True)
class Score:
    """Result of an evaluation.

    Attributes:
        accuracy: Of a classification; None for other kinds of task.
        by_class: Accuracy on the examples of each class, in the order of the labels; None for a class without examples.
            Empty for more than `MAX_CLASSES` classes.
        metrics: The objective's metrics by name; empty for the default objective, which has only the accuracy.
        sums: Sums of these metrics and of the loss, which add over devices.
        counted: Number of examples whose loss is in the mean; 0 where all are anomalies, which have no loss.
    """

    accuracy: float | None
    loss: float
    by_class: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, list[float]] = field(default_factory=dict)
    counted: int = 0


def build_skeleton(spec: Spec) -> nn.Module:
    """Return a network without storage, in evaluation mode; parameters are passed to every call.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    return build_blank(spec).layers.eval()


def require_matching_examples(
    network: nn.Module, tree: Tree, examples: Examples, source: str = "", objective: TrainingObjective = CLASSIFICATION
) -> None:
    """Reject a network that does not fit the examples, before any training.

    Args:
        network: With or without storage.
        tree: Parameters and buffers; empty for the network's own.
        source: Section of the plan that the examples come from, for messages.

    Raises:
        ConfigError: Their shape does not fit, the outputs do not fit the targets, or loss or metric fails on them.
    """
    place = f"{source}, model" if source else "model"
    shape = output_shape(network, tree, examples.inputs, place)
    require_fit(objective, shape, examples.inputs, examples.labels, place)
    if objective.spec != CLASSIFICATION_SPEC:
        first = examples.subset(torch.arange(min(TRIED, len(examples))))
        scored = score(network, tree or dict(network.state_dict()), first, objective)
        objective.require_values(scored.sums)


@torch.no_grad()
def output_shape(network: nn.Module, tree: Tree, inputs: Tensor, place: str = "model") -> torch.Size:
    """Return the shape of a network's output for one input of this shape and dtype.

    Args:
        network: With or without storage.
        tree: Parameters and buffers; empty for the network's own.
        inputs: Of shape (N, ...); the first one is passed through the network.
        place: Section that describes the network, for messages.

    Raises:
        ConfigError: The network does not accept their shape.
    """
    leaf = next(iter((tree or network.state_dict()).values()), inputs)
    example = inputs[:1].to(leaf.device)
    with training_mode(network, train=False):
        try:
            outputs: object = call_with(network, tree, example)
        except FAULTS as error:
            shape = f"{dtype_name(inputs.dtype)} {tuple(inputs.shape[1:])}"
            problem = describe_misfit(network, lambda: call_with(network, tree, example), error)
            raise ConfigError(
                f"{place}: the network does not take examples of shape {shape} ({problem}); correct its options or code"
            ) from error
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"{place}: its forward returns a {type(outputs).__name__}, not one tensor of shape (N, ...); correct it"
        )
    if not outputs.ndim or len(outputs) != 1:
        raise ConfigError(
            f"{place}: its outputs for 1 example are of shape {tuple(outputs.shape)}, not (1, ...); correct its forward"
        )
    return outputs.shape[1:]


def _layer_bytes(network: nn.Module, tree: Tree, example: Tensor) -> int:
    """Return the maximum bytes of a layer's inputs and outputs together, for an input of shape (1, ...)."""
    sizes = [1]

    def note(_layer: nn.Module, inputs: tuple[object, ...], outputs: object) -> None:
        sizes.append(sum(tensor.nbytes for tensor in (*inputs, outputs) if isinstance(tensor, Tensor)))

    hooks = [layer.register_forward_hook(note) for layer in network.modules()]
    try:
        call_with(network, tree, example)
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


@torch.no_grad()
def score(network: nn.Module, tree: Tree, examples: Examples, objective: TrainingObjective = CLASSIFICATION) -> Score:
    """Evaluate parameters on examples in evaluation mode, in about as much memory as the parameters take.

    The parameters are not copied; a wide layer gets smaller batches. Runs on the device of the parameters.

    Args:
        network: With or without storage.
        examples: Inputs of shape (N, ...), targets of shape (N, ...).

    Raises:
        ConfigError: A loss or metric does not accept the outputs.
    """
    total, hits, classes, place = MetricSums(objective), [], 0, next(iter(tree.values()), examples.inputs).device
    count = len(examples.labels)
    with training_mode(network, train=False):
        most_bytes = max(BATCH_BYTES, sum(leaf.nbytes for leaf in tree.values()))
        batch_size = max(1, min(BATCH_SIZE, most_bytes // _layer_bytes(network, tree, examples.inputs[:1].to(place))))
        for begin in range(0, count, batch_size):
            inputs, labels = (part[begin : begin + batch_size].to(place) for part in (examples.inputs, examples.labels))
            outputs = call_with(network, tree, inputs)
            compared, targets = objective.operands(outputs, labels, inputs)
            total.add_loss(objective.loss_sum(compared, targets).item() if len(targets) else 0.0, len(targets))
            if objective.kind == "classification":
                hits.append((outputs.argmax(1) == labels).cpu())
                classes = outputs.shape[1]
            if objective.spec != CLASSIFICATION_SPEC:
                total.add(*(part.numpy(force=True) for part in (outputs, labels, inputs)))
    if not hits:
        return Score(None, total.loss, (), total.values(), total.lists(), total.counted)
    hit = torch.cat(hits)
    accuracy = int(hit.sum()) / count
    by_class: tuple[float | None, ...] = ()
    if classes <= MAX_CLASSES:
        counts = examples.labels.bincount(minlength=classes).tolist()
        right = examples.labels[hit].bincount(minlength=classes).tolist()
        by_class = tuple(number / of if of else None for number, of in zip(right, counts, strict=True))
    return Score(accuracy, total.loss, by_class, total.values(), total.lists(), total.counted)
