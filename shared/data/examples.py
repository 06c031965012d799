"""Examples with targets as tensors, their hold-out split, and seeded batches for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.data.augment import Augment
from shared.data.sources.arrays import Arrays, count_held_out, held_out_index, no_labels
from shared.protocol.messages import count_batches

CLASS_AXES = frozenset((1, 3))
"""Number of axes of class numbers: of examples or of pixels. Numbers as targets may have any from two on."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs with their targets.

    Attributes:
        inputs: float32 of shape (N, ...); pictures are (N, channels, height, width) in [0, 1].
        labels: Classes, int64 of shape (N,) from 0, all `NO_LABEL` where the data set has none; numbers, float32 of
            shape (N, outputs); or classes of pixels, int64 of shape (N, height, width).
        clients: Producer of each example, N names; None where the data set has no such column.
        augment: Applied to inputs whenever they are trained on; None for nothing.
        classes: Class names in label order; empty where the labels were numbers in the files.
        identities: As those of `Arrays`.
    """

    inputs: Tensor
    labels: Tensor
    clients: tuple[str, ...] | None = None
    augment: Augment | None = None
    classes: tuple[str, ...] = ()
    identities: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        """Check dtypes and lengths.

        Raises:
            ValueError: A dtype is wrong, or the lengths differ.
        """
        if self.inputs.dtype != torch.float32 or not _is_target(self.labels):
            raise ValueError(
                "want float32 inputs, and labels int64 (N,), float32 (N, ...) or int64 (N, height, width), got "
                f"{self.inputs.dtype}, {self.labels.dtype} {tuple(self.labels.shape)}"
            )
        counts = {len(self.inputs), len(self.labels), len(self.labels if self.clients is None else self.clients)}
        if len(counts) > 1:
            raise ValueError(f"inputs, labels and clients differ in number: {sorted(counts)}")

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, arrays: Arrays) -> Examples:
        """Wrap arrays without a copy."""
        inputs, labels = torch.from_numpy(arrays.inputs), torch.from_numpy(arrays.labels)
        return cls(inputs, labels, arrays.clients, classes=arrays.classes, identities=arrays.identities)

    def with_augment(self, augment: Augment) -> Examples:
        """Return the same examples with an augmentation for training."""
        return replace(self, augment=augment)

    def without_labels(self) -> Examples:
        """Return the same inputs without their targets."""
        return replace(self, labels=torch.from_numpy(no_labels(len(self))), classes=())

    def as_reconstruction(self) -> Examples:
        """Return the normal examples (label 0 or none) with their inputs as targets, for an autoencoder."""
        normal = (
            self
            if not len(self) or int(self.labels.max()) <= 0
            else self.subset((self.labels <= 0).nonzero().flatten())
        )
        return replace(normal, labels=normal.inputs)

    def subset(self, index: Tensor) -> Examples:
        """Return the examples at `index`, int64 of shape (M,), in that order."""
        return replace(
            self,
            inputs=self.inputs.index_select(0, index),
            labels=self.labels[index],
            clients=None if self.clients is None else tuple(self.clients[i] for i in index.tolist()),
            identities=None if self.identities is None else self.identities[index.numpy()],
        )


def _is_target(labels: Tensor) -> bool:
    if labels.dtype == torch.float32:
        return labels.ndim > 1
    return labels.dtype == torch.int64 and labels.ndim in CLASS_AXES


def split_holdout(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Return the examples to train on and those to evaluate on.

    Examples with identities are held out by them, so there may be none. Of others, a share above zero holds out at
    least one and leaves at least one; a single example is not held out.

    Args:
        share: Of the examples to hold out, in [0, 1).
        seed: The same seed holds out the same examples.

    Raises:
        ValueError: The share is out of range.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), not {share}")
    if examples.identities is not None:
        index = held_out_index(examples.identities, len(examples), share, seed)
        others = np.delete(np.arange(len(examples)), index)
        return examples.subset(torch.from_numpy(others)), examples.subset(torch.from_numpy(index))
    count = count_held_out(len(examples), share)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    if not count:
        return examples, examples.subset(order[:0])  # without a copy of them all
    return examples.subset(order[count:].sort().values), examples.subset(order[:count].sort().values)


def batches(
    examples: Examples, *, batch_size: int, epochs: int, seed: int, merges_single: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each epoch's examples in a new order, all derived from one seed; an epoch's last batch may be smaller.

    The seed decides augmentation too; the order is the same with and without it.

    Args:
        batch_size: B, at least 1.
        merges_single: Whether a last batch of one example joins the previous batch, see `Assignment.merges_single`.

    Yields:
        Inputs of shape (B, ...) and labels of shape (B,), (B, outputs) or (B, height, width).

    Raises:
        ValueError: The batch size is below 1; raised at the first batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, not {batch_size}")
    generator, changing = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    full, last = count_batches(len(examples), batch_size, merges_single=merges_single)
    sizes = [batch_size] * full + [last] * (last > 0)
    for _ in range(epochs):
        for index in torch.randperm(len(examples), generator=generator).split(sizes):
            inputs = examples.inputs.index_select(0, index)  # four times as fast as inputs[index]
            yield examples.augment(inputs, changing) if examples.augment else inputs, examples.labels[index]
