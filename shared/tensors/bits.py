"""Bit packing: numbers of a few bits each, without gaps.

Of numbers wider than 8 bits the lowest bytes come first, then the next, while more than 8 bits remain. The remaining 1
to 8 bits per number are packed one after the other, lowest bit of a byte first. `count` numbers of `width` bits take
⌈count · width / 8⌉ bytes; numbers of 9 bits are bytes, followed by one bit each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.errors import WireError

Numbers: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]

_CHUNK = 1 << 16
"""Numbers per chunk, a multiple of 8: intermediate results fit into the processor's cache."""


def packed_bytes(count: int, width: int) -> int:
    """Return the bytes of `count` numbers."""
    return -(-count * width // 8)


def pack(numbers: Numbers, width: int) -> Bytes:
    """Return the numbers' bits; each is an integer in 0 to 2^width - 1, and `width` is 1 to 32."""
    packed = np.empty(packed_bytes(len(numbers), width), np.uint8)
    full_bytes, bits = _planes(width)
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        for plane in range(full_bytes):
            place = plane * len(numbers) + start
            packed[place : place + len(chunk)] = chunk >> (8 * plane) if plane else chunk
        place = full_bytes * len(numbers) + start * bits // 8
        folded = _pack_small((chunk >> (8 * full_bytes) if full_bytes else chunk).astype(np.uint8), bits)
        packed[place : place + packed_bytes(len(chunk), bits)] = folded[: packed_bytes(len(chunk), bits)]
    return packed


def unpack(packed: Bytes, count: int, width: int) -> Numbers:
    """Return the numbers, of the smallest unsigned dtype that holds them.

    Args:
        packed: Output of `pack`, of shape (⌈count · width / 8⌉,).
        width: Bits of each number, 1 to 32.

    Raises:
        WireError: The number of bytes does not fit, or a bit behind the last number is set.
    """
    if len(packed) != packed_bytes(count, width):
        raise WireError(f"{len(packed)} bytes for {count} numbers of {width} bits", reason="shape")
    if packed_bytes(count, width) * 8 > count * width and packed[-1] >> (8 - (-count * width % 8)):
        raise WireError("bits are set after the last number")
    full_bytes, bits = _planes(width)
    numbers = np.empty(count, np.min_scalar_type((1 << width) - 1))
    for start in range(0, count, _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        place = full_bytes * count + start * bits // 8
        chunk[:] = _unpack_small(packed[place : place + packed_bytes(len(chunk), bits)], bits)[: len(chunk)]
        for plane in reversed(range(full_bytes)):
            place = plane * count + start
            np.bitwise_or(chunk << 8, packed[place : place + len(chunk)], out=chunk)
    return numbers


def _planes(width: int) -> tuple[int, int]:
    full_bytes = (width - 1) // 8
    return full_bytes, width - 8 * full_bytes


def _pack_small(numbers: Bytes, width: int) -> Bytes:
    """Pack bytes that hold numbers of up to 8 bits, padded with zeros to a multiple of 8 numbers.

    Within a 64-bit word of 8 bytes, neighbours are moved together, then neighbouring pairs, then the halves.
    """
    if width == 1:
        return np.packbits(numbers, bitorder="little")
    if width == 8:  # noqa: PLR2004 - a byte
        return numbers
    if gap := -len(numbers) % 8:
        numbers = np.concatenate([numbers, np.zeros(gap, np.uint8)])
    lanes = numbers.view(np.uint64)
    for lane in (8, 16, 32):
        bits = width * lane // 8
        low = _lane_mask(bits, lane)
        lanes = (lanes & low) | ((lanes & (low << np.uint64(lane))) >> np.uint64(lane - bits))
    return _lowest_bytes(lanes, width)


def _lowest_bytes(lanes: NDArray[np.uint64], count: int) -> Bytes:
    """Return the lowest `count` bytes of every word, in order; 2 and 4 bytes as wider numbers, which copy faster."""
    if count in {2, 4}:
        return lanes.astype(f"u{count}").view(np.uint8)
    return lanes.view(np.uint8).reshape(-1, 8)[:, :count].reshape(-1)


def _unpack_small(packed: Bytes, width: int) -> Bytes:
    """Unpack numbers into bytes, with up to seven zeros appended."""
    if width == 1:
        return np.unpackbits(packed, bitorder="little")
    if width == 8:  # noqa: PLR2004 - a byte
        return packed
    if gap := -len(packed) % width:
        packed = np.concatenate([packed, np.zeros(gap, np.uint8)])
    if width in {2, 4}:
        lanes = packed.view(f"u{width}").astype(np.uint64)
    else:
        padded = np.zeros((len(packed) // width, 8), np.uint8)
        padded[:, :width] = packed.reshape(-1, width)
        lanes = padded.reshape(-1).view(np.uint64)
    for lane in (32, 16, 8):
        bits = width * lane // 8
        low = _lane_mask(bits, lane)
        lanes = (lanes & low) | ((lanes & (low << np.uint64(bits))) << np.uint64(lane - bits))
    return lanes.view(np.uint8)


def _lane_mask(bits: int, lane: int) -> np.uint64:
    """Return a word with the lowest `bits` bits set in every second lane of `lane` bits."""
    return np.uint64(sum(((1 << bits) - 1) << place for place in range(0, 64, 2 * lane)))
