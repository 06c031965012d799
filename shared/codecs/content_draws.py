"""Content-seeded randomness: the same tree gives the same bytes, without any state."""

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
        TypeError: It is not an integer.
        ValueError: It is below 0.
    """
    if index(option) < 0:
        raise ValueError(f"seed must be 0 or more; it is {option}")
    return index(option) % SEEDS


def seed_from_content(leaves: Sequence[Tensor], seed: int) -> Generator:
    """Return a generator seeded by the leaves' bytes and a seed, 0 to 2^64 - 1."""
    content = digest([memoryview(seed.to_bytes(8, "little")), *map(tensor_bytes, leaves)])
    return Generator().manual_seed(int.from_bytes(content[:8], "little", signed=True))
