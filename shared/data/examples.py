"""Labelled examples in memory as tensors, their split for evaluation, and their order in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.data.augment import Augment
from shared.data.sources.arrays import Arrays, count_held_out, no_labels
from shared.protocol.messages import split_epoch


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
    def of(cls, arrays: Arrays) -> Examples:
        """Return examples in the memory of some arrays."""
        inputs, labels = torch.from_numpy(arrays.inputs), torch.from_numpy(arrays.labels)
        return cls(inputs, labels, arrays.clients, classes=arrays.classes)

    def augmented(self, augment: Augment) -> Examples:
        """Return the same examples, changed so whenever they are trained on."""
        return replace(self, augment=augment)

    def without_labels(self) -> Examples:
        """Return the same inputs, of which nobody says a class any more."""
        return replace(self, labels=torch.from_numpy(no_labels(len(self))), classes=())

    def subset(self, index: Tensor) -> Examples:
        """Return the examples at `index`, int64 of shape (M,), in that order."""
        clients = None if self.clients is None else tuple(self.clients[i] for i in index.tolist())
        return replace(self, inputs=self.inputs.index_select(0, index), labels=self.labels[index], clients=clients)


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
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    if not count:
        return examples, examples.subset(order[:0])  # without a copy of them all
    return examples.subset(order[count:].sort().values), examples.subset(order[:count].sort().values)


def batches(
    examples: Examples, *, batch_size: int, epochs: int, seed: int, merges_single: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each epoch's examples in a new order, all orders given by one seed; an epoch's last batch may be smaller.

    Where examples are augmented, the seed gives that too; the order is the same with and without it.

    Args:
        examples: What to train on.
        batch_size: B, at least 1.
        epochs: Passes over the examples.
        seed: The same seed gives the same batches.
        merges_single: Whether a last batch of one example joins the one before it, see `Assignment.merges_single`.

    Yields:
        Inputs of shape (B, ...) and labels of shape (B,).

    Raises:
        ValueError: The batch size is below 1; raised at the first batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, not {batch_size}")
    generator, changing = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    whole, last = split_epoch(len(examples), batch_size, merges_single=merges_single)
    sizes = [batch_size] * whole + [last] * (last > 0)
    for _ in range(epochs):
        for index in torch.randperm(len(examples), generator=generator).split(sizes):
            inputs = examples.inputs.index_select(0, index)  # four times as fast as inputs[index]
            yield examples.augment(inputs, changing) if examples.augment else inputs, examples.labels[index]
