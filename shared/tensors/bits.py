"""Bit packing: numbers of a few bits each, without gaps, as quickly as memory allows.

Of numbers wider than 8 bits the lowest bytes come first, then the next, while more than 8 bits are left. The rest, 1 to
8 bits a number, is packed one after the other, from the lowest bit of a byte on. `count` numbers of `width` bits take
⌈count · width / 8⌉ bytes; those of 9 bits are bytes, and behind them one bit each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.errors import WireError

Numbers: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]

_CHUNK = 1 << 16
"""Numbers worked on at a time, a multiple of 8: what lies between two steps stays in the processor's cache."""


def packed_bytes(count: int, width: int) -> int:
    """Return how many bytes so many numbers take."""
    return -(-count * width // 8)


def pack(numbers: Numbers, width: int) -> Bytes:
    """Return the numbers' bits; each is an integer in 0 to 2^width - 1, and `width` is 1 to 32."""
    packed = np.empty(packed_bytes(len(numbers), width), np.uint8)
    whole, rest = _planes(width)
    for start in range(0, len(numbers), _CHUNK):
        some = numbers[start : start + _CHUNK]
        for plane in range(whole):
            place = plane * len(numbers) + start
            packed[place : place + len(some)] = some >> (8 * plane) if plane else some
        place = whole * len(numbers) + start * rest // 8
        folded = _fold((some >> (8 * whole) if whole else some).astype(np.uint8), rest)
        packed[place : place + packed_bytes(len(some), rest)] = folded[: packed_bytes(len(some), rest)]
    return packed


def unpack(packed: Bytes, count: int, width: int) -> Numbers:
    """Return the numbers, of the smallest unsigned dtype that holds them.

    Args:
        packed: As `pack` gives it, of shape (⌈count · width / 8⌉,).
        count: How many numbers.
        width: Bits of each, 1 to 32.

    Raises:
        WireError: There are not exactly as many bytes as they take, or a bit behind the last number is set.
    """
    if len(packed) != packed_bytes(count, width):
        raise WireError(f"{len(packed)} bytes for {count} numbers of {width} bits", reason="shape")
    if packed_bytes(count, width) * 8 > count * width and packed[-1] >> (8 - (-count * width % 8)):
        raise WireError("bits are set behind the last number")
    whole, rest = _planes(width)
    numbers = np.empty(count, np.min_scalar_type((1 << width) - 1))
    for start in range(0, count, _CHUNK):
        some = numbers[start : start + _CHUNK]
        place = whole * count + start * rest // 8
        some[:] = _unfold(packed[place : place + packed_bytes(len(some), rest)], rest)[: len(some)]
        for plane in reversed(range(whole)):
            place = plane * count + start
            np.bitwise_or(some << 8, packed[place : place + len(some)], out=some)
    return numbers


def _planes(width: int) -> tuple[int, int]:
    """Return how many whole bytes a number gives before the rest, and the rest's bits, 1 to 8."""
    whole = (width - 1) // 8
    return whole, width - 8 * whole


def _fold(numbers: Bytes, width: int) -> Bytes:
    """Pack bytes that hold numbers of up to 8 bits; zeros are added up to a multiple of 8 numbers.

    Of 8 bytes in a 64-bit word neighbours are moved together, then neighbouring pairs, then the halves.
    """
    if width == 1:
        return np.packbits(numbers, bitorder="little")
    if width == 8:  # noqa: PLR2004 - a byte
        return numbers
    if gap := -len(numbers) % 8:
        numbers = np.concatenate([numbers, np.zeros(gap, np.uint8)])
    words = numbers.view(np.uint64)
    for lane in (8, 16, 32):
        held = width * lane // 8
        low = _lane_mask(held, lane)
        words = (words & low) | ((words & (low << np.uint64(lane))) >> np.uint64(lane - held))
    return _lowest_bytes(words, width)


def _lowest_bytes(words: NDArray[np.uint64], count: int) -> Bytes:
    """Return the lowest `count` bytes of every word, in order; of 2 and 4 as wider numbers, which copy faster."""
    if count in {2, 4}:
        return words.astype(f"u{count}").view(np.uint8)
    return words.view(np.uint8).reshape(-1, 8)[:, :count].reshape(-1)


def _unfold(packed: Bytes, width: int) -> Bytes:
    """Return bytes that hold the numbers, and up to seven zeros behind them."""
    if width == 1:
        return np.unpackbits(packed, bitorder="little")
    if width == 8:  # noqa: PLR2004 - a byte
        return packed
    if gap := -len(packed) % width:
        packed = np.concatenate([packed, np.zeros(gap, np.uint8)])
    if width in {2, 4}:
        words = packed.view(f"u{width}").astype(np.uint64)
    else:
        padded = np.zeros((len(packed) // width, 8), np.uint8)
        padded[:, :width] = packed.reshape(-1, width)
        words = padded.reshape(-1).view(np.uint64)
    for lane in (32, 16, 8):
        held = width * lane // 8
        low = _lane_mask(held, lane)
        words = (words & low) | ((words & (low << np.uint64(held))) << np.uint64(lane - held))
    return words.view(np.uint8)


def _lane_mask(held: int, lane: int) -> np.uint64:
    """Return a word of which the lowest `held` bits are set in every second lane of `lane` bits."""
    return np.uint64(sum(((1 << held) - 1) << place for place in range(0, 64, 2 * lane)))
