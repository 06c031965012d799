"""The largest of many numbers, in time that grows with how many there are and not with how many are wanted.

Two passes: one counts magnitudes by their highest bits, which tells in what bin the last wanted one is; of that bin
alone the numbers are put in order. A third gathers the positions. Nothing of the numbers' size is held beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.codecs.positions import Positions

Numbers = NDArray[Any]
"""Signed integers of 16, 32 or 64 bits. The sign does not count: the bits of floats so have the order of magnitudes,
NaN above infinity."""

_BIN_BITS = 12
CHUNK = 1 << 16
"""Numbers worked on at a time: what lies between two steps stays in the processor's cache."""


def find_largest(numbers: Numbers, count: int) -> Positions:
    """Return the positions of the largest magnitudes, ascending; of equal ones the lower positions.

    Args:
        numbers: Of shape (d,).
        count: How many, 0 to d.
    """
    if count >= len(numbers):
        return np.arange(len(numbers))
    if not count:
        return np.empty(0, np.int64)
    limit, equal = _last_taken(numbers, count)
    found = []
    for start in range(0, len(numbers), CHUNK):
        sizes = _sizes(numbers, start)
        kept = sizes > limit
        if equal:
            taken = np.flatnonzero(sizes == limit)[:equal]
            kept[taken] = True
            equal -= len(taken)
        found.append(np.flatnonzero(kept) + start)
    return np.concatenate(found)


def _sizes(numbers: Numbers, start: int) -> Numbers:
    """Return the magnitudes of a chunk."""
    return numbers[start : start + CHUNK] & np.iinfo(numbers.dtype).max


def _last_taken(numbers: Numbers, count: int) -> tuple[int, int]:
    """Return the smallest magnitude that is taken, and how many of that very one are."""
    shift = 8 * numbers.itemsize - 1 - _BIN_BITS
    counts = np.zeros(1 << _BIN_BITS, np.int64)
    for start in range(0, len(numbers), CHUNK):
        counts += np.bincount(_sizes(numbers, start) >> shift, minlength=len(counts))
    reached = np.cumsum(counts[::-1])
    place = int(np.searchsorted(reached, count))
    number = len(counts) - 1 - place
    wanted = count - int(reached[place] - counts[number])
    chunks = (_sizes(numbers, start) for start in range(0, len(numbers), CHUNK))
    members = np.concatenate([sizes[sizes >> shift == number] for sizes in chunks])
    limit = int(np.partition(members, len(members) - wanted)[len(members) - wanted])
    return limit, wanted - int(np.count_nonzero(members > limit))
