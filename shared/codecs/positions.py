"""Ascending positions among so many, as a bitmap, as 32-bit numbers or as gaps, whichever takes the fewest bytes.

Of k positions among d:

    bitmap       ⌈d / 8⌉ bytes, one bit each, from the lowest of a byte on
    positions    4 k, as i32
    gaps         at most 1 + ⌈k r / 8⌉ + ⌈(k + ⌊(d - k) / 2^r⌋) / 8⌉, Rice-coded by the r that takes the fewest

    all of them  no byte: nothing need be said

A gap counts what lies between a position and the one before, or the beginning. `gaps` holds r in a byte; the lowest r
bits of every gap, as `shared.tensors.bits` packs them; then, gap by gap, as many zero bits as it has left above these,
and a one. All gaps are d - k together at most, so that what is left of them is (d - k) / 2^r at most: the bound holds
wherever the positions are, and scattered ones are near it. One r serves all: where values crowd in a few layers, an r
for each would save half a bit a position, beside the 32 of its value.

R. F. Rice. Some Practical Universal Noiseless Coding Techniques. JPL Publication 79-22, 1979.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import WireError
from shared.tensors.bits import pack, packed_bytes, unpack

Positions = NDArray[np.int64]

FORMS: Mapping[str, str] = {"bitmap": "u8", "positions": "i32", "gaps": "u8"}
"""By the name of their only tensor, which has one dimension: its dtype. Of two as small the first is taken."""
MOST = (1 << 31) - 1
"""Among so many at most: a position is 32 bits, one of them a sign."""
_POSITION_BYTES = 4
_MOST_BITS = 31


def most_bytes(total: int, count: int) -> int:
    """Return what so many positions take at most, wherever they are.

    Args:
        total: d, among how many they are.
        count: k, how many, 0 to d.
    """
    if count == total:
        return 0
    left = total - count
    gaps = min(_gap_bytes(count, bits, left >> bits) for bits in _candidates(total, count))
    return min(packed_bytes(total, 1), _POSITION_BYTES * count, gaps)


def pack_positions(positions: Positions, total: int) -> dict[str, Tensor]:
    """Return the form that takes the fewest bytes, by its name; none where they are all.

    Args:
        positions: Ascending, each at most once, of shape (k,).
        total: Among how many they are.
    """
    count = len(positions)
    if count == total:
        return {}
    gaps = np.diff(positions, prepend=-1) - 1
    size, bits = min((_gap_bytes(count, bits, int((gaps >> bits).sum())), bits) for bits in _candidates(total, count))
    sizes = {"bitmap": packed_bytes(total, 1), "positions": _POSITION_BYTES * count, "gaps": size}
    form = min(sizes, key=lambda name: sizes[name])
    if form == "positions":
        return {form: torch.from_numpy(positions.astype(np.int32))}
    packed = _pack_bitmap(positions, total) if form == "bitmap" else _pack_gaps(gaps, bits)
    return {form: torch.from_numpy(packed)}


def unpack_positions(form: str, held: Tensor, total: int, count: int) -> Positions:
    """Return the positions, ascending.

    Args:
        form: One of `FORMS`.
        held: Its tensor, of its dtype and one dimension.
        total: Among how many they are, `MOST` at most.

    Raises:
        WireError: They are not so many ascending positions of these.
    """
    if form == "bitmap":
        found = np.flatnonzero(unpack(held.numpy(), total, 1))
    elif form == "positions":
        found = held.numpy().astype(np.int64)
    else:
        found = np.cumsum(_unpack_gaps(held.numpy(), count, total) + 1) - 1
    if len(found) != count:
        raise WireError(f"{len(found)} positions of {count} values", reason="shape")
    if count and (found[0] < 0 or found[-1] >= total or (np.diff(found) <= 0).any()):
        raise WireError(f"positions are not ascending in 0 to {total - 1}", reason="shape")
    return found


def _candidates(total: int, count: int) -> range:
    """Return the r by which some gaps may be smallest: of scattered ones d / k is about 2^r, others are smaller."""
    mean = (total - count) // max(count, 1)
    return range(min(mean.bit_length(), _MOST_BITS) + 1)


def _gap_bytes(count: int, bits: int, above: int) -> int:
    """Return the bytes of gaps that are `above` together, without their lowest bits."""
    return 1 + packed_bytes(count, bits) + packed_bytes(count + above, 1)


def _pack_bitmap(positions: Positions, total: int) -> NDArray[np.uint8]:
    mask = np.zeros(total, bool)
    mask[positions] = True
    return pack(mask, 1)


def _pack_gaps(gaps: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    ends = np.cumsum((gaps >> bits) + 1) - 1
    unary = _pack_bitmap(ends, int(ends[-1]) + 1 if len(ends) else 0)
    low = pack(gaps & ((1 << bits) - 1), bits) if bits else np.empty(0, np.uint8)
    return np.concatenate([np.array([bits], np.uint8), low, unary])


def _unpack_gaps(packed: NDArray[np.uint8], count: int, total: int) -> NDArray[np.int64]:
    """Return so many gaps, which together leave room for as many positions among `total`.

    Raises:
        WireError: The bytes are not so many gaps.
    """
    bits = int(packed[0]) if len(packed) else _MOST_BITS + 1
    if bits > _MOST_BITS:
        raise WireError(f"gaps of {bits} low bits, at most {_MOST_BITS} may be")
    middle = 1 + packed_bytes(count, bits)
    unary = np.unpackbits(packed[middle:], bitorder="little")
    if len(packed) < middle or np.count_nonzero(unary) != count:
        raise WireError(f"{len(packed)} bytes are not the gaps of {count} values", reason="shape")
    ends = np.flatnonzero(unary)
    if len(unary) != 8 * packed_bytes(int(ends[-1]) + 1 if count else 0, 1):
        raise WireError("bytes stand behind the last gap", reason="shape")
    above = np.diff(ends, prepend=-1) - 1
    if int(above.sum()) << bits > total:
        raise WireError(f"gaps lead beyond the last of {total} positions", reason="shape")
    low = unpack(packed[1:middle], count, bits) if bits else 0
    return (above << bits) + low
