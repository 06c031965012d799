"""Draws that are a function of what is encoded: the same tree gives the same bytes, and nothing need be remembered."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from torch import Generator, Tensor

from shared.protocol.payload import digest
from shared.tensors.tree import tensor_bytes

SEEDS = 1 << 64


def read_seed(option: int) -> int:
    """Return a codec's option `seed`.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 0.
    """
    if index(option) < 0:
        raise ValueError(f"seed must be 0 or more; it is {option}")
    return index(option) % SEEDS


def draw_from(leaves: Sequence[Tensor], seed: int) -> Generator:
    """Return a generator that is a function of the leaves' bytes and of a seed, 0 to 2^64 - 1."""
    content = digest([memoryview(seed.to_bytes(8, "little")), *map(tensor_bytes, leaves)])
    return Generator().manual_seed(int.from_bytes(content[:8], "little", signed=True))
