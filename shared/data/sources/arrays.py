"""Examples as numpy arrays, and what is drawn of them: as torch would draw it, on boards that have no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.spec import Data

BRIGHTEST = 255
"""The largest value of a byte, scaled to 1."""
NO_LABEL = -1
"""Stands for the label of an example that has none; no loss takes it."""
FLOAT_BYTES = 4
"""Of a number of the inputs."""
WORDS = 1 << 32
HOLDOUT_SEED = 0
"""Draws the examples that a device holds back to evaluate on."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Inputs with their classes.

    Attributes:
        inputs: float32 of shape (N, ...); pictures are (N, channels, height, width) in [0, 1].
        labels: int64 of shape (N,), from 0; `NO_LABEL` of all where the data set has none.
        clients: Who produced each example, N names; None where the data set does not say.
        classes: Names of the classes in the order of their numbers; none where the labels were numbers all along.
    """

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    clients: tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def unlabelled(cls, inputs: NDArray[np.float32], clients: tuple[str, ...] | None = None) -> Arrays:
        """Return examples of which nobody says a class."""
        return cls(inputs, no_labels(len(inputs)), clients)

    def without_labels(self) -> Arrays:
        """Return the same inputs, of which nobody says a class any more."""
        return replace(self, labels=no_labels(len(self)), classes=())

    def subset(self, index: NDArray[np.int64]) -> Arrays:
        """Return the examples at `index`, int64 of shape (M,), in that order."""
        clients = None if self.clients is None else tuple(self.clients[i] for i in index.tolist())
        return replace(self, inputs=self.inputs.take(index, axis=0), labels=self.labels[index], clients=clients)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPart:
    """Some examples of a split, or all.

    Attributes:
        arrays: The examples that were read.
        labels: Of every example whose label was read, int64.
        notes: What a user should know of what was not read.
    """

    arrays: Arrays
    labels: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def no_labels(count: int) -> NDArray[np.int64]:
    """Return the labels of examples that have none, of shape (count,)."""
    return np.full(count, NO_LABEL, dtype=np.int64)


def as_inputs(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers of shape (N, ...) as float32: bytes are brightness and become [0, 1], others stay as they are."""
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which is refused later
        inputs = array.astype(np.float32, order="C")
    if array.dtype == np.uint8:
        inputs /= BRIGHTEST
    return inputs


def shuffled_order(count: int, seed: int) -> NDArray[np.int64]:
    """Return 0 .. count - 1, int64 of shape (count,), in the order that the seed gives: that of `torch.randperm`.

    It swaps from the front with words of the Mersenne twister, modulo what is left:
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/TensorFactories.cpp, `randperm_cpu`.

    Args:
        count: Below 2^32 / 20, above which torch draws otherwise.
        seed: Below 2^32.
    """
    words = np.random.RandomState(seed).randint(0, WORDS, size=max(0, count - 1), dtype=np.uint32)
    jumps = (words % np.arange(count, 1, -1)).tolist()
    order = list(range(count))
    for place, jump in enumerate(jumps):
        order[place], order[place + jump] = order[place + jump], order[place]
    return np.array(order, dtype=np.int64)


def held_out(examples: Arrays, share: float) -> Arrays:
    """Return the examples that a device evaluates on, as `shared.data.examples.split_holdout` holds them out."""
    count = count_held_out(len(examples), share)
    return examples.subset(np.sort(shuffled_order(len(examples), HOLDOUT_SEED)[:count]))


def count_held_out(count: int, share: float) -> int:
    """Return how many of `count` examples are held out: at least one, and not the only one."""
    return min(max(1, round(count * share)), max(0, count - 1)) if share else 0


def count_trained_on(count: int, data: Data) -> int:
    """Return how many of a device's `count` examples are neither held out nor kept for validation."""
    rest = count - count_held_out(count, data.holdout)
    return rest - count_held_out(rest, data.validation)
