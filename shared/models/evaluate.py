"""Accuracy and loss of parameters on examples, without a second copy; training and evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.data.examples import Examples
from shared.errors import ConfigError
from shared.models.build import blank
from shared.protocol.messages import Spec
from shared.tensors.placement import device_of
from shared.tensors.tree import Tree

MAX_CLASSES = 100
"""Classes up to which each is scored on its own."""

BATCH_SIZE, BATCH_BYTES = 512, 64 << 20
"""Most examples that are evaluated at a time, and most bytes of what a layer takes and gives for them, if the
parameters do not take more."""


@contextmanager
def in_mode(layers: nn.Module, *, train: bool) -> Iterator[None]:
    """Have layers train or evaluate inside the block, and as before after it."""
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
    """Share of right answers, and mean cross-entropy.

    Attributes:
        by_class: Share of right answers among the examples of each class, in the order of the labels; None of a class
            without examples. Empty for more than `MAX_CLASSES` classes.
    """

    accuracy: float
    loss: float
    by_class: tuple[float | None, ...] = ()


def build_skeleton(spec: Spec) -> nn.Module:
    """Return a network without storage: only its shape; parameters are handed to every call.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    return blank(spec).layers.eval()


def require_fit(network: nn.Module, tree: Tree, examples: Examples, source: str = "") -> None:
    """Refuse a network that cannot answer for these examples, before anybody trains.

    Args:
        network: Of any storage, or none.
        tree: Its parameters and buffers; empty for those it has.
        examples: Inputs of shape (N, ...), labels of shape (N,).
        source: A plan's section that they come from, where that is to be said.

    Raises:
        ConfigError: Their shape is not what it takes, or they have more classes than it has outputs.
    """
    place = f"{source}, model" if source else "model"
    require_labels(examples.labels, count_outputs(network, tree, examples.inputs, place), place)


@torch.no_grad()
def count_outputs(network: nn.Module, tree: Tree, inputs: Tensor, place: str = "model") -> int:
    """Return how many outputs a network has for inputs of this shape and dtype: one number for each class.

    Args:
        network: Of any storage, or none.
        tree: Its parameters and buffers; empty for those it has.
        inputs: Of shape (N, ...); the first is tried.
        place: Where the network is described, for messages.

    Raises:
        ConfigError: Their shape is not what it takes.
    """
    leaf = next(iter((tree or network.state_dict()).values()), inputs)
    try:
        with in_mode(network, train=False):
            outputs: int = functional_call(network, tree, (inputs[:1].to(leaf.device),)).shape[1]
            return outputs
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        shape, problem = tuple(inputs.shape[1:]), str(error).partition("\n")[0]
        raise ConfigError(
            f"{place}: it does not take examples of shape {shape} ({problem}); correct its options"
        ) from error


def require_labels(labels: Tensor, outputs: int, place: str = "model") -> None:
    """Refuse labels beyond a network's outputs.

    Args:
        labels: Of shape (N,), N at least 1.
        outputs: How many it has.
        place: Where the network is described, for messages.

    Raises:
        ConfigError: One is.
    """
    if (most := int(labels.max())) >= outputs:
        raise ConfigError(f"{place}: {outputs} outputs for labels up to {most}; set its option `classes` to {most + 1}")


def _layer_bytes(network: nn.Module, tree: Tree, example: Tensor) -> int:
    """Return the most bytes that any layer takes and gives for an input of shape (1, ...)."""
    found = [1]

    def note(_layer: nn.Module, given: tuple[object, ...], gives: object) -> None:
        found.append(sum(one.nbytes for one in (*given, gives) if isinstance(one, Tensor)))

    hooks = [layer.register_forward_hook(note) for layer in network.modules()]
    try:
        functional_call(network, tree, (example,))
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


@torch.no_grad()
def score(network: nn.Module, tree: Tree, examples: Examples) -> Score:
    """Evaluate parameters on examples, by their running statistics, in memory of about the parameters' size.

    No copy of the parameters is made; a wide layer has fewer examples at a time. It runs where the parameters are.

    Args:
        network: Of any storage, or none.
        tree: Its parameters and buffers.
        examples: Inputs of shape (N, ...), labels of shape (N,).
    """
    loss_sum, hits, classes, place = 0.0, [], 0, device_of(tree.values())
    with in_mode(network, train=False):
        most_bytes = max(BATCH_BYTES, sum(leaf.nbytes for leaf in tree.values()))
        batch_size = max(1, min(BATCH_SIZE, most_bytes // _layer_bytes(network, tree, examples.inputs[:1].to(place))))
        for begin in range(0, len(examples), batch_size):
            inputs, labels = (part[begin : begin + batch_size].to(place) for part in (examples.inputs, examples.labels))
            logits = functional_call(network, tree, (inputs,))
            loss_sum += functional.cross_entropy(logits, labels, reduction="sum").item()
            hits.append((logits.argmax(1) == labels).cpu())
            classes = logits.shape[1]
    hit = torch.cat(hits)
    return Score(
        int(hit.sum()) / len(examples), loss_sum / len(examples), _score_classes(examples.labels, hit, classes)
    )


def _score_classes(labels: Tensor, hit: Tensor, classes: int) -> tuple[float | None, ...]:
    """Return the share of right answers by class; of many classes, nothing."""
    if classes > MAX_CLASSES:
        return ()
    counts = labels.bincount(minlength=classes).tolist()
    right = labels[hit].bincount(minlength=classes).tolist()
    return tuple(one / count if count else None for one, count in zip(right, counts, strict=True))
