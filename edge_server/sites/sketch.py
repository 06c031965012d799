"""Count sketch of a model, to estimate distances between sites' models from journals.

A model's numbers get signs by their positions and are added up in `SIZE` sums in turn (M. Charikar, K. Chen, M.
Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002). The squared distance of two sketches is on average
that of the models, with a standard deviation of about sqrt(2 / SIZE) of it: 12.5 %, and 6 % of a distance. A sketch is
linear: mixing mixes sketches with the same weights. So what holds for models with any weights, such as that their mean
is preserved and that disagreement shrinks by at least zeta, holds for sketches, apart from rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

SIZE = 128
STRETCH = 1 << 20
"""Numbers of a model that are processed at once."""
WORD = 64


def signs(start: int, count: int) -> NDArray[np.float64]:
    """Return 1 or -1 for `count` positions from `start`: bits of SplitMix64, the same on every machine.

    (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.)
    """
    first = start // WORD
    hashes = np.arange(first, (start + count - 1) // WORD + 1, dtype=np.uint64) + np.uint64(1)
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    sign_bits = np.unpackbits(hashes.astype("<u8").view(np.uint8))[start - first * WORD :][:count]
    return np.where(sign_bits, -1.0, 1.0)


def fold(values: NDArray[np.float64], start: int) -> NDArray[np.float64]:
    """Return the sketch of a part of a model; the sketches of all parts add up to the model's.

    Args:
        values: One-dimensional.
        start: Position of the first value in the model.
    """
    lead = start % SIZE
    sums = np.zeros(-(-(lead + len(values)) // SIZE) * SIZE)
    sums[lead : lead + len(values)] = values * signs(start, len(values))
    total: NDArray[np.float64] = sums.reshape(-1, SIZE).sum(axis=0)
    return total


def pack_sketch(sketch: NDArray[np.float64]) -> bytes:
    """Encode a sketch for the journal, as little-endian float64."""
    return sketch.astype("<f8").tobytes()


def unpack_sketch(data: bytes) -> NDArray[np.float64] | None:
    """Decode a journalled sketch; None if it is missing or not finite."""
    if len(data) != 8 * SIZE:
        return None
    sketch = np.frombuffer(data, "<f8").astype(np.float64)
    return sketch if bool(np.isfinite(sketch).all()) else None


def distance(first: bytes, second: bytes) -> float | None:
    """Return the approximate distance of two models by their sketches; None if one is unknown."""
    sketches = unpack_sketch(first), unpack_sketch(second)
    if sketches[0] is None or sketches[1] is None:
        return None
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(sketches[0] - sketches[1]))


def disagreement(sketches: Mapping[str, NDArray[np.float64]], sizes: Mapping[str, int]) -> float:
    """Return the root of the sum over sites of N_i |y_i - mean|^2, the mean over devices, estimated from sketches."""
    middle = mean(sketches, sizes)
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(sizes[site] * ((sketch - middle) ** 2).sum() for site, sketch in sketches.items())))


def mean(sketches: Mapping[str, NDArray[np.float64]], sizes: Mapping[str, int]) -> NDArray[np.float64]:
    """Return the mean over devices."""
    devices = sum(sizes[site] for site in sketches)
    total = np.zeros(SIZE)
    for site, sketch in sketches.items():
        total += sizes[site] / devices * sketch
    return total
