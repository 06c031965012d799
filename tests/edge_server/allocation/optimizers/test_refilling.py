"""One ramp after the other in place of its own, all at once: what filling anew finds for each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_server.allocation.optimizers.refilling import refill
from edge_server.allocation.optimizers.water_filling import Ramps, fill

near = st.integers(-4, 4).map(float)
size = st.integers(0, 3).map(float)
ramp = st.tuples(near, size, size, size)


def ramps(rows: list[tuple[float, float, float, float]]) -> Ramps:
    start, width, low, more = (np.array(one) for one in zip(*rows, strict=True))
    return Ramps(start, start + width, low, low + more)


def one_by_one(others: Ramps, moved: Ramps, room: float) -> list[float]:
    found = []
    for place in range(len(others.start)):
        columns = {name: column.copy() for name, column in vars(others).items()}
        for name, column in columns.items():
            column[place] = getattr(moved, name)[place]
        found.append(float(fill(Ramps(**columns), room).amount[place]))
    return found


@given(st.lists(st.tuples(ramp, ramp), min_size=1, max_size=7), st.integers(0, 40).map(lambda tenths: tenths / 2))
@example([((0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 2.0)), ((0.0, 0.0, 0.0, 1.0), (1.0, 2.0, 0.0, 1.0))], 1.5)
def test_it_is_filling_anew_for_each(rows, room):
    """Steps, ties, floors without room and room for all among them."""
    others, moved = ramps([row for row, _ in rows]), ramps([row for _, row in rows])
    assert refill(others, moved, room) == pytest.approx(one_by_one(others, moved, room), rel=1e-9, abs=1e-9)


def test_many_that_move_a_little():
    rng = np.random.default_rng(4)
    start, width = rng.lognormal(size=300), np.where(rng.random(300) < 0.5, 0.0, rng.exponential(size=300))
    low, high = rng.random(300), 1 + rng.random(300)
    others = Ramps(start, start + width, low, high)
    for factor in (0.9, 0.99, 1.01, 2.0):
        moved = Ramps(factor * start, factor * (start + width), low, high)
        for room in (low.sum() + 1.0, 250.0, 350.0, high.sum() + 1.0):
            assert refill(others, moved, room) == pytest.approx(one_by_one(others, moved, room), rel=1e-9)
