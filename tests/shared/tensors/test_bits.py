"""Packed numbers: the layout, to the bit, and the way back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.tensors.bits import pack, unpack


def textbook(numbers: np.ndarray, width: int) -> list[int]:
    """Pack bit by bit: all lowest bytes first, then what is left of each number."""
    planes = []
    while width > 8:
        planes += [int(number) & 0xFF for number in numbers]
        numbers, width = numbers >> 8, width - 8
    bits = [bool(number >> place & 1) for number in numbers for place in range(width)]
    return planes + np.packbits(bits, bitorder="little").tolist() if bits else planes


@pytest.mark.parametrize("width", range(1, 33))
@settings(max_examples=20, derandomize=True, deadline=None)
@given(data=st.data())
def test_as_the_textbook_and_back(width, data):
    """Every width, every count that leaves bits over; ⌈count · width / 8⌉ bytes."""
    count = data.draw(st.one_of(st.integers(0, 17), st.sampled_from([63, 64, 65, 200])))
    seed = data.draw(st.integers(0, 1 << 30))
    numbers = np.random.default_rng(seed).integers(0, 1 << width, count, dtype=np.int64)
    packed = pack(numbers, width)
    assert packed.tolist() == textbook(numbers, width)
    assert len(packed) == -(-count * width // 8)
    assert unpack(packed, count, width).tolist() == numbers.tolist()


@pytest.mark.parametrize("width", [1, 3, 4, 9, 17])
@pytest.mark.parametrize("count", [1 << 16, (1 << 16) + 11])
def test_more_numbers_than_are_worked_on_at_a_time(width, count):
    numbers = np.random.default_rng(width).integers(0, 1 << width, count, dtype=np.int64)
    packed = pack(numbers, width)
    assert packed.tolist() == textbook(numbers, width)
    assert np.array_equal(unpack(packed, count, width), numbers)


def test_nine_bits_by_hand():
    """Magnitudes as bytes, then one bit a number, from the lowest on: 0b0101."""
    assert pack(np.array([0x1FF, 0x002, 0x103]), 9).tolist() == [0xFF, 0x02, 0x03, 0b101]


@pytest.mark.parametrize(("packed", "count", "width"), [([0], 0, 3), ([], 1, 1), ([0, 0], 8, 1), ([0] * 9, 7, 9)])
def test_a_byte_too_many_or_too_few(packed, count, width):
    with pytest.raises(WireError) as caught:
        unpack(np.array(packed, np.uint8), count, width)
    assert caught.value.reason == "shape"


@pytest.mark.parametrize(("packed", "count", "width"), [([0b1000], 3, 1), ([0, 0b10], 3, 3), ([1, 1, 0b100], 2, 9)])
def test_a_bit_behind_the_last(packed, count, width):
    """There is one way to write numbers, so that a payload's digest names what it holds."""
    with pytest.raises(WireError) as caught:
        unpack(np.array(packed, np.uint8), count, width)
    assert caught.value.reason == "malformed"
