"""Cohort selection as a function of seed, round and online devices."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.rounds.assign import select_cohort
from edge_server.rounds.quorum import updates_needed

names = st.lists(st.text("abcdefgh0123456789", min_size=1, max_size=4), unique=True, max_size=12)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(online=names, size=st.integers(0, 15), seed=st.integers(), number=st.integers(1, 10**6))
def test_a_cohort_is_of_the_size_asked_for_in_order_and_of_those_who_are_there(online, size, seed, number):
    """Zero, or more than there are, takes all; the order in which devices came changes nothing."""
    cohort = select_cohort(online, size=size, seed=seed, number=number)
    assert len(cohort) == (min(size, len(online)) if size else len(online))
    assert list(cohort) == sorted(set(cohort))
    assert set(cohort) <= set(online)
    assert cohort == select_cohort(list(reversed(online)), size=size, seed=seed, number=number)


def test_rounds_and_seeds_draw_anew():
    """Else some devices would never be asked."""
    online = [f"d{number:02d}" for number in range(20)]
    draws = [select_cohort(online, size=5, seed=1, number=number) for number in range(1, 401)]
    assert len(set(draws)) > 350
    assert draws[0] != select_cohort(online, size=5, seed=2, number=1)
    shares = Counter(device for draw in draws for device in draw)
    assert set(shares) == set(online)
    assert all(70 <= count <= 130 for count in shares.values())  # 100 expected, standard deviation 8.7


def test_the_draw_is_the_same_for_ever():
    """A resumed run, a replay and another Python must agree: these are the draws of version 1."""
    online = ["a", "b", "c", "d", "e"]
    draws = [select_cohort(online, size=2, seed=7, number=number) for number in (1, 2, 3)]
    assert draws == [("a", "b"), ("c", "d"), ("a", "d")]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(online=names, size=st.integers(1, 9), tenths=st.integers(0, 30), seed=st.integers(), number=st.integers(1, 99))
def test_over_selection_asks_for_a_share_more(online, size, tenths, seed, number):
    """ceil(size * (1 + share)), reckoned in exact fractions, of those who are there; a draw like any other."""
    wanted = math.ceil(size * (1 + Fraction(tenths, 10)))
    cohort = select_cohort(online, size=size, seed=seed, number=number, over_selection=tenths / 10)
    assert len(cohort) == min(wanted, len(online))
    assert set(cohort) <= set(online)
    assert cohort == select_cohort(
        list(reversed(online)), size=size, seed=seed, number=number, over_selection=tenths / 10
    )
    assert cohort == select_cohort(online, size=wanted, seed=seed, number=number)


def test_over_selection_is_not_rounded_up_for_what_binary_fractions_add():
    """50 and a tenth of it are 55; in floating point they are a little more."""
    online = [f"d{number}" for number in range(100)]
    assert len(select_cohort(online, size=50, seed=1, number=1, over_selection=0.1)) == 55


@pytest.mark.parametrize(
    ("asked", "size", "quorum", "updates"),
    [
        (10, 0, 1.0, 10),  # everybody who is there
        (25, 0, 0.28, 7),  # 7.000000000000001 in binary
        (13, 10, 1.0, 10),  # three more than needed were asked
        (13, 10, 0.75, 8),  # 7.5 of the ten, not 9.75 of the thirteen
        (7, 10, 1.0, 7),  # fewer are there than the plan wants
        (7, 10, 0.5, 4),
        (1, 3, 0.1, 1),
        (0, 3, 1.0, 0),
    ],
)
def test_a_quorum_is_a_share_of_the_cohort_without_those_asked_in_addition(asked, size, quorum, updates):
    assert updates_needed(asked, size=size, quorum=quorum) == updates
