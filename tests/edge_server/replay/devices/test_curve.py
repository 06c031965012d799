"""A curve's integral and its inverse, against a sum that goes step by step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.replay.devices.curve import Curve, constant, steps

PAIRS = [(0.0, 2.0), (1.0, 0.0), (3.0, 4.0)]
AFTER = st.sampled_from(["hold", "repeat", "zero"])
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), min_size=1, max_size=12)


def of(lengths: list[tuple[int, int]], after: str) -> Curve:
    """Return a curve of steps in eighths of a second, so that sums of binary fractions are exact."""
    starts = [sum(length for length, _ in lengths[:index]) / 8 for index in range(len(lengths) + 1)]
    pairs = [(start, float(value)) for start, (_, value) in zip(starts, lengths, strict=False)]
    return steps(pairs, after=after, end_s=starts[-1])


def summed(curve: Curve, t0: float, t1: float) -> float:
    """Return the integral by adding up eighths of a second."""
    return sum(curve.at(eighth / 8) / 8 for eighth in range(round(t0 * 8), round(t1 * 8)))


@pytest.mark.parametrize(
    ("after", "at", "integral", "when"),
    [("hold", 4.0, 2 + 8 + 16, 8.0), ("repeat", 0.0, 2 + 8 + 2 + 4, 10.0), ("zero", 0.0, 2 + 8, math.inf)],
)
def test_behind_its_last_step_a_curve_holds_repeats_or_ends(after, at, integral, when):
    """2 for 1 s, 0 for 2 s, 4 for 2 s: 10 a turn of 5 s. What comes behind decides the value at 7 s, and 22 from 0 on.

    Held: 10 after 5 s, 12 more take 3 s. Repeated: two turns are 20 by 10 s, 2 more take 1 s, less the 2 of second 0.
    """
    curve = steps(PAIRS, after=after, end_s=5.0)
    assert curve.at(7.0) == at
    assert curve.integral(0.0, 9.0) == integral
    assert curve.finish_time(0.0, 22.0 if after != "repeat" else 20.0) == when


def test_the_last_step_is_as_long_as_the_one_before_it():
    assert steps(PAIRS, after="repeat").edges == (0.0, 1.0, 3.0, 5.0)
    assert steps([(0.0, 3.0)], after="zero").integral(0.0, 9.0) == 3.0


@given(LENGTHS, AFTER, st.integers(0, 900), st.integers(0, 900), st.integers(0, 99))
def test_an_integral_is_the_sum_of_its_steps(lengths, after, first, more, begin):
    curve = of(lengths, after).later(begin / 8)
    t0, t1 = first / 8, (first + more) / 8
    assert curve.integral(t0, t1) == pytest.approx(summed(curve, t0, t1), rel=1e-12, abs=1e-9)


@given(LENGTHS, AFTER, st.integers(0, 900), st.integers(1, 20_000))
def test_when_is_the_earliest_moment_of_an_amount(lengths, after, first, amount):
    """By then it is reached, and not long before."""
    curve, t0 = of(lengths, after), first / 8
    moment = curve.finish_time(t0, float(amount))
    if moment == math.inf:
        assert curve.integral(t0, t0 + 1e6) < amount
        return
    assert curve.integral(t0, moment) == pytest.approx(amount, rel=1e-9)
    assert curve.integral(t0, max(t0, moment - 1e-3)) < amount


@given(st.floats(1e-3, 1e10), st.integers(1, 1 << 30), st.floats(0, 1e6))
def test_a_constant_is_the_plain_division_bit_for_bit(value, size, t0):
    """What replays with a fixed rate were timed by must not change."""
    assert constant(value).finish_time(t0, 8 * size) == t0 + 8 * size / value


def test_nothing_takes_no_time():
    """Not even where nothing flows."""
    assert constant(0.0).finish_time(3.0, 0.0) == 3.0
    assert constant(0.0).finish_time(3.0, 1.0) == math.inf
    assert steps([(0.0, 0.0), (1.0, 0.0)], after="repeat").finish_time(5.0, 1.0) == math.inf


def test_a_curve_may_be_scaled_and_entered_later():
    curve = steps(PAIRS, after="repeat", end_s=5.0)
    assert curve.scale(0.5).integral(0.0, 5.0) == 5.0
    assert [curve.later(2.5).at(t) for t in (0.0, 1.0, 3.0)] == [0.0, 4.0, 2.0]
    assert curve.later(2.5).finish_time(0.0, 4.0) == 1.5


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(1.0, 2.0)],
        [(0.0, 2.0), (0.0, 3.0)],
        [(0.0, 2.0), (2.0, 3.0), (1.0, 4.0)],
        [(0.0, -1.0)],
        [(0.0, math.nan)],
        [(0.0, math.inf)],
    ],
)
def test_what_is_no_curve_is_refused(pairs):
    with pytest.raises(ValueError):  # noqa: PT011 - by the check of the curve, which nothing else precedes
        steps(pairs)
