"""A model as few numbers, by which journals tell how far the models of sites are apart.

Numbers of a model get signs by their positions and are summed up in `SIZE` sums, position by position in turn
(M. Charikar, K. Chen, M. Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002). The squared distance of
two sketches is on average that of the models, with a standard deviation of about sqrt(2 / SIZE) of it: 12.5 %, and 6 %
of a distance. A sketch is linear: mixing mixes sketches with the same weights, so what holds of models for any weights,
such as that their mean is kept and that disagreement shrinks by zeta at the least, holds of sketches, but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

SIZE = 128
STRETCH = 1 << 20
"""Numbers of a model that are taken at once."""
WORD = 64


def signs(start: int, count: int) -> NDArray[np.float64]:
    """Return 1 or -1 of each of so many positions: bits of SplitMix64 of their places, the same everywhere.

    (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.)
    """
    first = start // WORD
    word = np.arange(first, (start + count - 1) // WORD + 1, dtype=np.uint64) + np.uint64(1)
    word *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    word ^= word >> np.uint64(31)
    bits = np.unpackbits(word.astype("<u8").view(np.uint8))[start - first * WORD :][:count]
    return np.where(bits, -1.0, 1.0)


def fold(values: NDArray[np.float64], start: int) -> NDArray[np.float64]:
    """Return the sketch of a part of a model, to be added to those of its other parts.

    Args:
        values: So many numbers.
        start: Position of the first in the model.
    """
    lead = start % SIZE
    sums = np.zeros(-(-(lead + len(values)) // SIZE) * SIZE)
    sums[lead : lead + len(values)] = values * signs(start, len(values))
    total: NDArray[np.float64] = sums.reshape(-1, SIZE).sum(axis=0)
    return total


def packed(sketch: NDArray[np.float64]) -> bytes:
    """Return a sketch as a journal has it: little-endian float64."""
    return sketch.astype("<f8").tobytes()


def unpacked(data: bytes) -> NDArray[np.float64] | None:
    """Return a sketch of a journal; None where there is none, or a number of it is none."""
    if len(data) != 8 * SIZE:
        return None
    found = np.frombuffer(data, "<f8").astype(np.float64)
    return found if bool(np.isfinite(found).all()) else None


def distance(one: bytes, other: bytes) -> float | None:
    """Return how far two models are apart, within some percent, by their sketches; None where one is not known."""
    sketches = unpacked(one), unpacked(other)
    if sketches[0] is None or sketches[1] is None:
        return None
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(sketches[0] - sketches[1]))


def disagreement(sketches: Mapping[str, NDArray[np.float64]], sizes: Mapping[str, int]) -> float:
    """Return the root of the sum over sites of N_i |y_i - mean|^2, the mean over devices, as far as sketches tell.

    Args:
        sketches: Of the model of each site.
        sizes: How many devices each has.
    """
    middle = mean(sketches, sizes)
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(sizes[site] * ((one - middle) ** 2).sum() for site, one in sketches.items())))


def mean(sketches: Mapping[str, NDArray[np.float64]], sizes: Mapping[str, int]) -> NDArray[np.float64]:
    """Return the mean over devices.

    Args:
        sketches: Of the model of each site.
        sizes: How many devices each has.
    """
    whole = sum(sizes[site] for site in sketches)
    total = np.zeros(SIZE)
    for site, one in sketches.items():
        total += sizes[site] / whole * one
    return total
