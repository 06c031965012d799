"""Axes enclose what they are of with few round figures; quantiles and words are those of anybody else."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.record.amounts import UNKNOWN, Amount, quantile, remaining_seconds, sum_known
from edge_server.report import formatting
from edge_server.report.axes import Axis, format_tick, ticks, whole_ticks

FINITE = st.floats(-1e18, 1e18)


@given(FINITE, FINITE)
def test_ticks_enclose_a_range_in_equal_steps(one, other):
    """And they leave less than one step empty at either end, so that the curve fills the paper."""
    least, most = min(one, other), max(one, other)
    found = ticks(least, most)
    step = found[1] - found[0]
    slack = 1e-6 * step + 1e-9 * max(abs(least), abs(most))
    assert found[0] <= least + slack
    assert most <= found[-1] + slack
    assert 2 <= len(found) <= 12
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert min(steps) > 0
    assert steps == pytest.approx([step] * len(steps), rel=1e-3)


def test_ticks_are_round():
    assert ticks(0.0, 97.3) == (0.0, 20.0, 40.0, 60.0, 80.0, 100.0)
    assert ticks(0.61, 0.88) == (0.6, 0.7, 0.8, 0.9)
    assert ticks(0.0, 0.0) == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    assert ticks(5.0, 5.0)[0] < 5.0 < ticks(5.0, 5.0)[-1]


@given(st.integers(0, 100_000))
def test_whole_ticks_reach_a_count_in_whole_steps(most):
    found = whole_ticks(most)
    assert all(one.is_integer() for one in found)
    assert found[0] == 0
    assert found[-2] < max(1, most) <= found[-1]


def test_a_value_lies_between_its_ticks():
    """Upright, paper counts downwards."""
    axis = Axis((0.0, 50.0, 100.0), 200.0, 100.0)
    assert [axis.at(value) for value in (0.0, 25.0, 100.0)] == [200.0, 175.0, 100.0]


def test_labels_say_no_more_than_they_know():
    assert [format_tick(one) for one in (0.1 + 0.2, 100.0, -2.5, 1e12)] == ["0.3", "100", "\N{MINUS SIGN}2.5", "1e+12"]


@given(st.lists(FINITE, min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_numpys(values, share):
    ordered = sorted(values)
    assert quantile(ordered, share) == pytest.approx(
        np.quantile(ordered, share), rel=1e-6, abs=1e-6 * max(map(abs, values))
    )


def test_sums_count_what_is_known_and_say_whether_it_is_all():
    two, model = Amount(value=2.0), Amount(value=3.0, quality="modelled")
    assert sum_known([]) == Amount()
    assert sum_known([two, model]) == Amount(value=5.0, quality="modelled")
    assert sum_known([two, UNKNOWN]) == Amount(value=2.0, whole=False)
    assert sum_known([UNKNOWN, UNKNOWN]) == UNKNOWN
    assert sum_known([Amount(), two]) == two
    assert remaining_seconds(10.0, [two, model]) == Amount(value=5.0, quality="modelled")
    assert remaining_seconds(10.0, [two, UNKNOWN]) == UNKNOWN


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (Amount(value=12345.0), "joules", "12.3 kJ"),
        (Amount(value=12345.0, whole=False, quality="modelled"), "joules", "≥ 12.3 kJ ≈"),
        (Amount(value=0.5, quality="corrected"), "joules", "0.500 J ~"),
        (Amount(value=0.0042), "seconds", "4.20 ms"),
        (Amount(value=0.0), "seconds", "0 s"),
        (Amount(value=119.0), "seconds", "119 s"),
        (Amount(value=7200.0), "seconds", "2.00 h"),
        (Amount(value=999.0), "bytes", "999 B"),
        (Amount(value=2.5e6, quality="measured"), "bytes", "2.50 MB"),
        (Amount(value=-3.0), "joules", "\N{MINUS SIGN}3.00 J"),
        (UNKNOWN, "joules", "\N{EN DASH}"),
        (Amount(), "bytes", "\N{EN DASH}"),
    ],
)
def test_an_amount_in_words(said, kind, text):
    assert formatting.format_amount(said, kind) == text


def test_changes_in_words():
    assert formatting.format_change(110.0, 100.0) == "+10.0 %"
    assert formatting.format_change(99.99, 100.0) == "± 0.0 %".replace(" ", "", 1)
    assert formatting.format_share_change(0.85, 0.9) == "\N{MINUS SIGN}5.0 points"
    assert [
        formatting.format_change(1.0, None),
        formatting.format_change(None, 1.0),
        formatting.format_change(1.0, 0.0),
    ] == ["", "", ""]
    assert formatting.format_loss(math.pi * 1e200) == "3.14e+200"
