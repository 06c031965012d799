"""Select the largest magnitudes of an array in linear time.

Two passes: one builds a histogram of the magnitudes' highest bits, which shows the bin of the selection limit; only
this bin is partitioned. A third pass collects the positions. No copy of the numbers is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.codecs.positions import Positions

Numbers = NDArray[Any]
"""Signed integers of 16, 32 or 64 bits, ordered without the sign: like this, the bits of floats are ordered by
magnitude, with NaN above infinity."""

_BIN_BITS = 12
CHUNK = 1 << 16
"""Numbers per chunk: intermediate results fit into the processor's cache."""


def find_largest(numbers: Numbers, count: int) -> Positions:
    """Return the positions of the largest magnitudes, ascending; of equal ones the lower positions.

    Args:
        numbers: Of shape (d,).
        count: Number of positions, 0 to d.
    """
    if count >= len(numbers):
        return np.arange(len(numbers))
    if not count:
        return np.empty(0, np.int64)
    limit, equal = _selection_limit(numbers, count)
    positions = []
    for start in range(0, len(numbers), CHUNK):
        sizes = _magnitudes(numbers, start)
        selected = sizes > limit
        if equal:
            ties = np.flatnonzero(sizes == limit)[:equal]
            selected[ties] = True
            equal -= len(ties)
        positions.append(np.flatnonzero(selected) + start)
    return np.concatenate(positions)


def _magnitudes(numbers: Numbers, start: int) -> Numbers:
    return numbers[start : start + CHUNK] & np.iinfo(numbers.dtype).max


def _selection_limit(numbers: Numbers, count: int) -> tuple[int, int]:
    """Return the smallest selected magnitude, and how many numbers of exactly this magnitude are selected."""
    shift = 8 * numbers.itemsize - 1 - _BIN_BITS
    counts = np.zeros(1 << _BIN_BITS, np.int64)
    for start in range(0, len(numbers), CHUNK):
        counts += np.bincount(_magnitudes(numbers, start) >> shift, minlength=len(counts))
    reached = np.cumsum(counts[::-1])
    place = int(np.searchsorted(reached, count))
    number = len(counts) - 1 - place
    from_bin = count - int(reached[place] - counts[number])
    chunks = (_magnitudes(numbers, start) for start in range(0, len(numbers), CHUNK))
    members = np.concatenate([sizes[sizes >> shift == number] for sizes in chunks])
    limit = int(np.partition(members, len(members) - from_bin)[len(members) - from_bin])
    return limit, from_bin - int(np.count_nonzero(members > limit))
