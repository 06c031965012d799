"""Hash of an example's identity, by which growing data sets hold examples out.

The hash of a name, a time or the content does not depend on what else the data set holds, so an example stays on its
side for ever. Two examples of one identity, such as a picture stored twice, are on the same side.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

_GOLDEN, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TOP_BITS = np.uint64(11)
"""A double has 53 bits of 64."""


def hash_texts(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Hash names or times, uint64 of shape (N,)."""
    return np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), dtype=np.uint64)


def hash_contents(inputs: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Hash the values of each example, uint64 of shape (N,)."""
    rows = np.ascontiguousarray(inputs).reshape(len(inputs), -1)
    contents = rows.view(f"V{rows.itemsize * rows.shape[1]}").reshape(-1)
    return np.fromiter(map(xxhash.xxh3_64_intdigest, contents), dtype=np.uint64, count=len(inputs))


def is_held_out(identities: NDArray[np.uint64], share: float, seed: int) -> NDArray[np.bool_]:
    """Select the held-out examples: those whose hash, mixed with the seed, is in the lowest share of its range.

    The mixing function is that of G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014, https://doi.org/10.1145/2660193.2660195.
    """
    with np.errstate(over="ignore"):
        bits = identities + _GOLDEN * np.uint64(seed + 1)
        bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
        bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
        bits ^= bits >> np.uint64(31)
    return np.asarray((bits >> _TOP_BITS).astype(np.float64) * 2.0**-53 < share)
