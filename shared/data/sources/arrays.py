"""Examples as numpy arrays, with torch's shuffle and hold-out reproduced for devices without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.spec import Data

BRIGHTEST = 255
"""Largest value of a byte, scaled to 1."""
NO_LABEL = -1
"""Label of an example that has none; no loss accepts it."""
FLOAT_BYTES = 4
"""Size of an input value."""
UINT32_VALUES = 1 << 32
HOLDOUT_SEED = 0
"""Seed that selects the examples held out for evaluation."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Inputs with their classes.

    Attributes:
        inputs: float32 of shape (N, ...); pictures are (N, channels, height, width) in [0, 1].
        labels: int64 of shape (N,), from 0; all `NO_LABEL` where the data set has none.
        clients: Producer of each example, N names; None where the data set has no such column.
        classes: Class names in label order; empty where the labels were numbers in the files.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def from_inputs(cls, inputs: NDArray[np.float32], clients: tuple[str, ...] | None = None) -> Arrays:
        """Make examples without labels."""
        return cls(inputs, no_labels(len(inputs)), clients)

    def without_labels(self) -> Arrays:
        """Return the same inputs without their classes."""
        return replace(self, labels=no_labels(len(self)), classes=())

    def subset(self, index: NDArray[np.int64]) -> Arrays:
        """Return the examples at `index`, int64 of shape (M,), in that order."""
        clients = None if self.clients is None else tuple(self.clients[i] for i in index.tolist())
        return replace(self, inputs=self.inputs.take(index, axis=0), labels=self.labels[index], clients=clients)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPart:
    """Some or all examples of a split.

    Attributes:
        labels: Every label that was read, int64; may be more than there are examples.
        notes: Warnings for the user about skipped files.
    """

    arrays: Arrays
    labels: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def no_labels(count: int) -> NDArray[np.int64]:
    """Return `count` times `NO_LABEL`, of shape (count,)."""
    return np.full(count, NO_LABEL, dtype=np.int64)


def as_inputs(array: NDArray[Any]) -> NDArray[np.float32]:
    """Convert numbers of shape (N, ...) to float32: bytes become [0, 1], others keep their values."""
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which is refused later
        inputs = array.astype(np.float32, order="C")
    if array.dtype == np.uint8:
        inputs /= BRIGHTEST
    return inputs


def shuffled_order(count: int, seed: int) -> NDArray[np.int64]:
    """Return a permutation of 0 .. count - 1, int64, equal to that of `torch.randperm` with this seed.

    It swaps from the front with words of the Mersenne twister, modulo what remains:
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/TensorFactories.cpp, `randperm_cpu`.

    Args:
        count: Below 2^32 / 20, above which torch draws otherwise.
        seed: Below 2^32, the range of `RandomState`.
    """
    draws = np.random.RandomState(seed).randint(0, UINT32_VALUES, size=max(0, count - 1), dtype=np.uint32)
    jumps = (draws % np.arange(count, 1, -1)).tolist()
    order = list(range(count))
    for place, jump in enumerate(jumps):
        order[place], order[place + jump] = order[place + jump], order[place]
    return np.array(order, dtype=np.int64)


def select_held_out(examples: Arrays, share: float) -> Arrays:
    """Return the examples that a device evaluates on, the same as those of `shared.data.examples.split_holdout`."""
    count = count_held_out(len(examples), share)
    return examples.subset(np.sort(shuffled_order(len(examples), HOLDOUT_SEED)[:count]))


def count_held_out(count: int, share: float) -> int:
    """Count the examples to hold out of `count`: at least one, but never the only one."""
    return min(max(1, round(count * share)), max(0, count - 1)) if share else 0


def count_training(count: int, data: Data) -> int:
    """Count a device's examples that are neither held out nor reserved for validation."""
    remaining = count - count_held_out(count, data.holdout)
    return remaining - count_held_out(remaining, data.validation)
