"""The clock that is reported is the one that a counting loop found."""

from __future__ import annotations

import pytest

from tests.boards.clocks import BOUNDS, worst_step
from tests.machine import shared


@pytest.mark.parametrize("unit", BOUNDS)
def test_the_clock_is_what_a_counting_loop_finds(unit, tmp_path) -> None:
    """At every step of the unit's clock that was counted without disturbance."""
    steps, _, off = worst_step(shared("reference", "boards"), unit, tmp_path)
    assert steps > 1
    assert abs(off) <= BOUNDS[unit]
