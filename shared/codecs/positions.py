"""Position lists: bitmap, 32-bit numbers or Rice-coded gaps, whichever is smallest.

Of k positions among d:

    bitmap       ⌈d / 8⌉ bytes, one bit each, lowest bit of a byte first
    positions    4 k, as i32
    gaps         at most 1 + ⌈k r / 8⌉ + ⌈(k + ⌊(d - k) / 2^r⌋) / 8⌉, Rice-coded with the best r

    all of them  no bytes

A gap is the number of values between a position and the previous one, or the start. `gaps` holds r in a byte; the
lowest r bits of every gap, as `shared.tensors.bits` packs them; then the remaining bits of each gap in unary: zeros and
a one. All gaps sum to at most d - k, so the unary part sums to at most (d - k) / 2^r: the bound holds for any
positions, and scattered ones are close to it. One r serves all gaps: for values concentrated in a few layers, an r for
each would save half a bit a position, beside the 32 of its value.

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
"""Dtype of each form's only tensor, of one dimension, by its name. In a tie the first form is used."""
MOST = (1 << 31) - 1
"""Maximum number of values: a position has 32 bits including a sign."""
_POSITION_BYTES = 4
_MOST_BITS = 31


def most_bytes(total: int, count: int) -> int:
    """Return the maximum bytes of positions, wherever they are.

    Args:
        total: d, number of values.
        count: k, number of positions, 0 to d.
    """
    if count == total:
        return 0
    others = total - count
    gaps = min(_gap_bytes(count, bits, others >> bits) for bits in _candidates(total, count))
    return min(packed_bytes(total, 1), _POSITION_BYTES * count, gaps)


def pack_positions(positions: Positions, total: int) -> dict[str, Tensor]:
    """Return the smallest form, by its name; empty if all positions are selected.

    Args:
        positions: Ascending, without repetition, of shape (k,).
        total: d, number of values.
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


def unpack_positions(form: str, packed: Tensor, total: int, count: int) -> Positions:
    """Return the positions, ascending.

    Args:
        form: A key of `FORMS`.
        packed: Tensor of the form, of its dtype and one dimension.
        total: d, number of values, at most `MOST`.

    Raises:
        WireError: They are not `count` ascending positions within `total`.
    """
    if form == "bitmap":
        positions = np.flatnonzero(unpack(packed.numpy(), total, 1))
    elif form == "positions":
        positions = packed.numpy().astype(np.int64)
    else:
        positions = np.cumsum(_unpack_gaps(packed.numpy(), count, total) + 1) - 1
    if len(positions) != count:
        raise WireError(f"{len(positions)} positions of {count} values", reason="shape")
    if count and (positions[0] < 0 or positions[-1] >= total or (np.diff(positions) <= 0).any()):
        raise WireError(f"positions are not ascending in 0 to {total - 1}", reason="shape")
    return positions


def _candidates(total: int, count: int) -> range:
    """Return the possible optimal values of r: about log2(d / k) for scattered positions, smaller for others."""
    mean = (total - count) // max(count, 1)
    return range(min(mean.bit_length(), _MOST_BITS) + 1)


def _gap_bytes(count: int, bits: int, above: int) -> int:
    """Return the bytes of gaps whose unary parts sum to `above`."""
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
    """Return the gaps of `count` positions within `total`.

    Raises:
        WireError: The bytes are not that many gaps.
    """
    bits = int(packed[0]) if len(packed) else _MOST_BITS + 1
    if bits > _MOST_BITS:
        raise WireError(f"gaps of {bits} low bits, at most {_MOST_BITS} are allowed")
    middle = 1 + packed_bytes(count, bits)
    unary = np.unpackbits(packed[middle:], bitorder="little")
    if len(packed) < middle or np.count_nonzero(unary) != count:
        raise WireError(f"{len(packed)} bytes are not the gaps of {count} values", reason="shape")
    ends = np.flatnonzero(unary)
    if len(unary) != 8 * packed_bytes(int(ends[-1]) + 1 if count else 0, 1):
        raise WireError("there are bytes after the last gap", reason="shape")
    above = np.diff(ends, prepend=-1) - 1
    if int(above.sum()) << bits > total:
        raise WireError(f"gaps lead beyond the last of {total} positions", reason="shape")
    low = unpack(packed[1:middle], count, bits) if bits else 0
    return (above << bits) + low
