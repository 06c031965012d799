"""Model evaluation: accuracy and loss of parameters, without copying them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.models.build import build_blank
from shared.models.chain import LayerChain
from shared.models.leaves import call_with
from shared.protocol.messages import Spec
from shared.tensors.placement import device_of
from shared.tensors.tree import Tree

MAX_CLASSES = 100
"""Maximum number of classes for accuracies by class."""

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
    """Accuracy and mean cross-entropy.

    Attributes:
        by_class: Accuracy on the examples of each class, in the order of the labels; None for a class without examples.
            Empty for more than `MAX_CLASSES` classes.
    """

    accuracy: float
    loss: float
    by_class: tuple[float | None, ...] = ()


def build_skeleton(spec: Spec) -> nn.Module:
    """Return a network without storage, in evaluation mode; parameters are passed to every call.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    return build_blank(spec).layers.eval()


def require_matching_examples(network: nn.Module, tree: Tree, examples: Examples, source: str = "") -> None:
    """Reject a network that does not fit the examples, before any training.

    Args:
        network: With or without storage.
        tree: Parameters and buffers; empty for the network's own.
        source: Section of the plan that the examples come from, for messages.

    Raises:
        ConfigError: Their shape does not fit, or they have more classes than the network has outputs.
    """
    place = f"{source}, model" if source else "model"
    require_label_range(examples.labels, count_outputs(network, tree, examples.inputs, place), place)


@torch.no_grad()
def count_outputs(network: nn.Module, tree: Tree, inputs: Tensor, place: str = "model") -> int:
    """Return the number of a network's outputs, one for each class, for inputs of this shape and dtype.

    Args:
        network: With or without storage.
        tree: Parameters and buffers; empty for the network's own.
        inputs: Of shape (N, ...); the first one is passed through the network.
        place: Section that describes the network, for messages.

    Raises:
        ConfigError: The network does not accept their shape.
    """
    leaf = next(iter((tree or network.state_dict()).values()), inputs)
    try:
        with training_mode(network, train=False):
            outputs: int = call_with(network, tree, inputs[:1].to(leaf.device)).shape[1]
            return outputs
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shape, problem = tuple(inputs.shape[1:]), str(error).partition("\n")[0]
        raise ConfigError(
            f"{place}: it does not take examples of shape {shape} ({problem}); correct its options"
        ) from error


def require_label_range(labels: Tensor, outputs: int, place: str = "model") -> None:
    """Reject labels beyond a network's outputs.

    Args:
        labels: Of shape (N,), N at least 1.
        place: Section that describes the network, for messages.

    Raises:
        ConfigError: A label is out of range.
    """
    if (most := int(labels.max())) >= outputs:
        raise ConfigError(f"{place}: {outputs} outputs for labels up to {most}; set its option `classes` to {most + 1}")


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
def score(network: nn.Module, tree: Tree, examples: Examples) -> Score:
    """Evaluate parameters on examples in evaluation mode, in about as much memory as the parameters take.

    The parameters are not copied; a wide layer gets smaller batches. Runs on the device of the parameters.

    Args:
        network: With or without storage.
        examples: Inputs of shape (N, ...), labels of shape (N,).
    """
    loss_sum, hits, classes, place = 0.0, [], 0, device_of(tree.values())
    with training_mode(network, train=False):
        most_bytes = max(BATCH_BYTES, sum(leaf.nbytes for leaf in tree.values()))
        batch_size = max(1, min(BATCH_SIZE, most_bytes // _layer_bytes(network, tree, examples.inputs[:1].to(place))))
        for begin in range(0, len(examples), batch_size):
            inputs, labels = (part[begin : begin + batch_size].to(place) for part in (examples.inputs, examples.labels))
            logits = call_with(network, tree, inputs)
            loss_sum += functional.cross_entropy(logits, labels, reduction="sum").item()
            hits.append((logits.argmax(1) == labels).cpu())
            classes = logits.shape[1]
    hit = torch.cat(hits)
    return Score(
        int(hit.sum()) / len(examples), loss_sum / len(examples), _score_classes(examples.labels, hit, classes)
    )


def _score_classes(labels: Tensor, hit: Tensor, classes: int) -> tuple[float | None, ...]:
    if classes > MAX_CLASSES:
        return ()
    counts = labels.bincount(minlength=classes).tolist()
    right = labels[hit].bincount(minlength=classes).tolist()
    return tuple(hits / count if count else None for hits, count in zip(right, counts, strict=True))
