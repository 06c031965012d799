"""Positions in the fewest bytes: every form comes back, and none takes more than is told beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codecs.positions import most_bytes, pack_positions, unpack_positions
from shared.errors import WireError


def drawn(total: int, count: int, seed: int = 1) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False)).astype(np.int64)


def bytes_of(held: dict) -> int:
    return sum(one.nbytes for one in held.values())


@settings(max_examples=80, derandomize=True, deadline=None)
@given(data=st.data(), total=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_positions_come_back_and_take_no_more_than_told(data, total, seed):
    """Nor more than 32 bits each, or a bitmap."""
    count = data.draw(st.integers(0, total))
    positions = drawn(total, count, seed)
    held = pack_positions(positions, total)
    assert bytes_of(held) <= most_bytes(total, count) <= min(4 * count, math.ceil(total / 8))
    if count == total:
        assert held == {}
        return
    [(form, tensor)] = held.items()
    assert unpack_positions(form, tensor, total, count).tolist() == positions.tolist()


@pytest.mark.parametrize(
    ("positions", "total", "form"),
    [
        (range(0, 300, 2), 300, "bitmap"),
        (range(0, 3000, 10), 3000, "gaps"),
        (range(100, 200), 3000, "gaps"),
        ([1_000_000], 1_000_001, "positions"),
        ([], 9, "positions"),
    ],
)
def test_the_form_that_takes_the_fewest_bytes(positions, total, form):
    positions = np.array(positions, np.int64)
    held = pack_positions(positions, total)
    assert list(held) == [form]
    assert unpack_positions(form, held[form], total, len(positions)).tolist() == positions.tolist()


def test_gaps_by_hand():
    """Gaps of 5, 34 and 158: by 5 low bits 5, 2 and 30, above them 0, 1 and 4 zeros and a one each."""
    held = pack_positions(np.array([5, 40, 199]), 200)
    assert list(held) == ["gaps"]
    low = 5 | 2 << 5 | 30 << 10
    above = 0b1 | 0b10 << 1 | 0b10000 << 3
    assert held["gaps"].tolist() == [5, low & 0xFF, low >> 8, above]


def test_scattered_positions_take_what_is_told_but_for_a_few_percent():
    """And those that crowd at the beginning far less."""
    for count in (300, 6000, 60_000):
        told, taken = most_bytes(600_000, count), bytes_of(pack_positions(drawn(600_000, count), 600_000))
        assert 0.9 * told <= taken <= told
    close = np.flatnonzero(np.random.default_rng(1).random(12_000) < 0.5)
    assert bytes_of(pack_positions(close, 600_000)) < 0.3 * len(close)


@pytest.mark.parametrize("total", [1 << 31, (1 << 40) + 7])
def test_bytes_of_more_than_anybody_has(total):
    """The formula counts, and holds nothing."""
    assert most_bytes(total, total) == 0
    assert most_bytes(total, 1) <= 4
    assert most_bytes(total, total // 2) == math.ceil(total / 8)


def test_gaps_of_another_count_are_refused():
    held = pack_positions(drawn(3000, 30), 3000)["gaps"]
    for count in (29, 31, 0):
        with pytest.raises(WireError) as caught:
            unpack_positions("gaps", held, 3000, count)
        assert caught.value.reason in ("shape", "malformed")
    with pytest.raises(WireError):
        unpack_positions("gaps", held, 2000, 30)
