import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.allocation.optimizers import water_filling
from edge_server.allocation.optimizers.water_filling import Ramps, fill

near = st.integers(-4, 4).map(float)


@given(st.lists(st.tuples(near, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=8), st.data())
def test_it_fills_the_room_or_gives_all_that_is_wanted(rows, data):
    start, width, low, high = (np.array(one, float) for one in zip(*rows, strict=True)) if rows else 4 * [np.empty(0)]
    ramps = Ramps(start, start + width, low, low + high)
    room = data.draw(st.floats(0, 30))
    most = data.draw(st.sampled_from([math.inf, 0.0, 2.5]))
    filled = fill(ramps, room, most)
    assert np.all(filled.amount >= ramps.low)
    assert np.all(filled.amount <= ramps.high)
    assert filled.fits == (low.sum() <= room)
    if filled.fits:
        assert filled.amount.sum() == pytest.approx(min(room, ramps.above(most).sum()))
    below, above = ramps.below(filled.level), ramps.above(filled.level)
    if low.sum() < room:
        assert np.all(filled.amount >= below - 1e-9)
        assert np.all(filled.amount <= above + 1e-9)


def test_halving_finds_what_sorting_finds(monkeypatch):
    rng = np.random.default_rng(3)
    start = rng.normal(size=500)
    width = np.where(rng.random(500) < 0.5, 0.0, rng.exponential(size=500))
    ramps = Ramps(start, start + width, rng.random(500), 1 + rng.random(500))
    for room in (300.0, 500.0, 700.0):
        monkeypatch.setattr(water_filling, "FEW", 10_000)
        by_sorting = fill(ramps, room)
        monkeypatch.setattr(water_filling, "FEW", 4)
        assert fill(ramps, room).level == pytest.approx(by_sorting.level, rel=1e-12)
        assert fill(ramps, room).amount == pytest.approx(by_sorting.amount)


def test_equal_jumps_share_alike():
    ones = np.ones(4)
    assert fill(Ramps(ones, ones, 0 * ones, ones), 1.0).amount == pytest.approx(0.25 * ones)
