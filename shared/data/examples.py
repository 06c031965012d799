"""Labelled examples in memory, their split for evaluation, and their order in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.data.augment import Augment
from shared.data.spec import Data

BRIGHTEST = 255
"""The largest value of a byte, scaled to 1."""
NO_LABEL = -1
"""Stands for the label of an example that has none; no loss takes it."""
FLOAT_BYTES = 4
"""Of a number of the inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs with their classes.

    Attributes:
        inputs: float32 of shape (N, ...); pictures are (N, channels, height, width) in [0, 1].
        labels: int64 of shape (N,), from 0; `NO_LABEL` of all where the data set has none.
        clients: Who produced each example, N names; None where the data set does not say.
        augment: What is done to inputs whenever they are trained on; None for nothing.
        classes: Names of the classes in the order of their numbers; none where the labels were numbers all along.
    """

    inputs: Tensor
    labels: Tensor
    clients: tuple[str, ...] | None = None
    augment: Augment | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what does not belong together.

        Raises:
            ValueError: A type is not the one promised, or the counts differ.
        """
        if self.inputs.dtype != torch.float32 or self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise ValueError(f"want float32 inputs and int64 labels (N,), got {self.inputs.dtype}, {self.labels.dtype}")
        counts = {len(self.inputs), len(self.labels), len(self.labels if self.clients is None else self.clients)}
        if len(counts) > 1:
            raise ValueError(f"inputs, labels and clients differ in number: {sorted(counts)}")

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def unlabelled(cls, inputs: Tensor, clients: tuple[str, ...] | None = None) -> Examples:
        """Return examples of which nobody says a class."""
        return cls(inputs, torch.full((len(inputs),), NO_LABEL), clients)

    def without_labels(self) -> Examples:
        """Return the same inputs, of which nobody says a class any more."""
        return replace(self, labels=torch.full_like(self.labels, NO_LABEL), classes=())

    def subset(self, index: Tensor) -> Examples:
        """Return the examples at `index`, int64 of shape (M,), in that order."""
        clients = None if self.clients is None else tuple(self.clients[i] for i in index.tolist())
        return replace(self, inputs=self.inputs.index_select(0, index), labels=self.labels[index], clients=clients)


def as_inputs(array: NDArray[Any]) -> Tensor:
    """Return numbers of shape (N, ...) as float32: bytes are brightness and become [0, 1], others stay as they are."""
    if array.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(array)).to(torch.float32).div_(BRIGHTEST)
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which `load` refuses
        return torch.from_numpy(array.astype(np.float32, order="C"))


def shuffled_order(count: int, seed: int) -> Tensor:
    """Return 0 .. count - 1, int64 of shape (count,), in the order that the seed gives."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def split_holdout(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Return the examples to train on and those to evaluate on.

    A share above zero holds out at least one example and leaves at least one; of a single example, that one is left.

    Args:
        examples: What the device has.
        share: Of the examples to hold out, in [0, 1).
        seed: The same seed holds out the same examples.

    Raises:
        ValueError: The share is out of range.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), not {share}")
    count = count_held_out(len(examples), share)
    order = shuffled_order(len(examples), seed)
    if not count:
        return examples, examples.subset(order[:0])  # without a copy of them all
    return examples.subset(order[count:].sort().values), examples.subset(order[:count].sort().values)


def count_held_out(count: int, share: float) -> int:
    """Return how many of `count` examples `split_holdout` holds out."""
    return min(max(1, round(count * share)), max(0, count - 1)) if share else 0


def count_trained_on(count: int, data: Data) -> int:
    """Return how many of a device's `count` examples are neither held out nor kept for validation."""
    rest = count - count_held_out(count, data.holdout)
    return rest - count_held_out(rest, data.validation)


def batches(examples: Examples, *, batch_size: int, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each epoch's examples in a new order, all orders given by one seed; an epoch's last batch may be smaller.

    Where examples are augmented, the seed gives that too; the order is the same with and without it.

    Args:
        examples: What to train on.
        batch_size: B, at least 1.
        epochs: Passes over the examples.
        seed: The same seed gives the same batches.

    Yields:
        Inputs of shape (B, ...) and labels of shape (B,).

    Raises:
        ValueError: The batch size is below 1; raised at the first batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, not {batch_size}")
    generator, changing = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    for _ in range(epochs):
        for index in torch.randperm(len(examples), generator=generator).split(batch_size):
            inputs = examples.inputs.index_select(0, index)  # four times as fast as inputs[index]
            yield examples.augment(inputs, changing) if examples.augment else inputs, examples.labels[index]
