"""Examples as numpy arrays; shuffle and hold-out equal those of torch.

Targets are called labels throughout: a class, numbers, or a class of each pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.data.identity import is_held_out
from shared.data.spec import Data

BRIGHTEST = 255
"""Largest value of a byte, scaled to 1."""
NO_LABEL = -1
"""Label of an example that has none; no loss accepts it."""
FLOAT_BYTES = 4
"""Size of an input value."""
UINT32_VALUES = 1 << 32
HOLDOUT_SEED, VALIDATION_SEED = 0, 1
"""Seeds that select the examples held out for evaluation, and of the others those reserved for validation."""


Labels: TypeAlias = NDArray[Any]
"""Targets of any kind, see `Arrays.labels`."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Inputs with their targets.

    Attributes:
        inputs: float32 of shape (N, ...); pictures are (N, channels, height, width) in [0, 1].
        labels: Classes, int64 of shape (N,) from 0, all `NO_LABEL` where the data set has none; numbers, float32 of
            shape (N, outputs); or classes of pixels, int64 of shape (N, height, width).
        clients: Producer of each example, N names; None where the data set has no such column.
        classes: Class names in label order; empty where the labels were numbers in the files.
        identities: Hash of each example's name, time or content, uint64 of shape (N,), by which examples are held out;
            None where a random draw holds them out.
    """

    inputs: NDArray[np.float32]
    labels: Labels
    clients: tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()
    identities: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def from_inputs(
        cls,
        inputs: NDArray[np.float32],
        clients: tuple[str, ...] | None = None,
        identities: NDArray[np.uint64] | None = None,
    ) -> Arrays:
        """Make examples without labels."""
        return cls(inputs, no_labels(len(inputs)), clients, identities=identities)

    def without_labels(self) -> Arrays:
        """Return the same inputs without their labels."""
        return replace(self, labels=no_labels(len(self)), classes=())

    def subset(self, index: NDArray[np.int64]) -> Arrays:
        """Return the examples at `index`, int64 of shape (M,), in that order."""
        return replace(
            self,
            inputs=self.inputs.take(index, axis=0),
            labels=self.labels[index],
            clients=None if self.clients is None else tuple(self.clients[i] for i in index.tolist()),
            identities=None if self.identities is None else self.identities[index],
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReadPart:
    """Some or all examples of a split.

    Attributes:
        labels: Every label that was read; may be more than there are examples.
        notes: Warnings for the user about skipped files.
    """

    arrays: Arrays
    labels: Labels
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


def is_finite(values: NDArray[np.float32]) -> bool:
    """Check that no number is NaN or infinite, in one pass without a copy."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = values.sum()
    return bool(np.isfinite(total) or np.isfinite([values.min(), values.max()]).all())  # large numbers may overflow


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


def held_out_index(identities: NDArray[np.uint64] | None, count: int, share: float, seed: int) -> NDArray[np.int64]:
    """Return the examples to hold out of `count`, ascending: by their identities, or else by a random draw."""
    if identities is not None:
        return np.flatnonzero(is_held_out(identities, share, seed))
    return np.sort(shuffled_order(count, seed)[: count_held_out(count, share)])


def select_held_out(examples: Arrays, share: float) -> Arrays:
    """Return the examples that a device evaluates on, the same as those of `shared.data.examples.split_holdout`."""
    return examples.subset(held_out_index(examples.identities, len(examples), share, HOLDOUT_SEED))


def count_held_out(count: int, share: float) -> int:
    """Count the examples to draw as held out of `count`: at least one, but never the only one."""
    return min(max(1, round(count * share)), max(0, count - 1)) if share else 0


def count_sides(count: int, identities: NDArray[np.uint64] | None, data: Data) -> tuple[int, int]:
    """Count a device's held-out examples, and those that are neither held out nor reserved for validation.

    Args:
        count: All examples of the device.
        identities: As those of `Arrays`.
    """
    if identities is None:
        held_out = count_held_out(count, data.holdout)
        return held_out, count - held_out - count_held_out(count - held_out, data.validation)
    is_out = is_held_out(identities, data.holdout, HOLDOUT_SEED)
    others = identities[~is_out]
    return int(is_out.sum()), int((~is_held_out(others, data.validation, VALIDATION_SEED)).sum())
