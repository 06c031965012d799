"""Who takes part is a function of the seed, the round and who is there."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.cohort import select

names = st.lists(st.text("abcdefgh0123456789", min_size=1, max_size=4), unique=True, max_size=12)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(online=names, size=st.integers(0, 15), seed=st.integers(), number=st.integers(1, 10**6))
def test_a_cohort_is_of_the_size_asked_for_in_order_and_of_those_who_are_there(online, size, seed, number):
    """Zero, or more than there are, takes all; the order in which devices came changes nothing."""
    cohort = select(online, size=size, seed=seed, number=number)
    assert len(cohort) == (min(size, len(online)) if size else len(online))
    assert list(cohort) == sorted(set(cohort))
    assert set(cohort) <= set(online)
    assert cohort == select(list(reversed(online)), size=size, seed=seed, number=number)


def test_rounds_and_seeds_draw_anew():
    """Else some devices would never be asked."""
    online = [f"d{number:02d}" for number in range(20)]
    draws = [select(online, size=5, seed=1, number=number) for number in range(1, 401)]
    assert len(set(draws)) > 350
    assert draws[0] != select(online, size=5, seed=2, number=1)
    shares = Counter(device for draw in draws for device in draw)
    assert set(shares) == set(online)
    assert all(70 <= count <= 130 for count in shares.values())  # 100 expected, standard deviation 8.7


def test_the_draw_is_the_same_for_ever():
    """A resumed run, a replay and another Python must agree: these are the draws of version 1."""
    online = ["a", "b", "c", "d", "e"]
    draws = [select(online, size=2, seed=7, number=number) for number in (1, 2, 3)]
    assert draws == [("a", "b"), ("c", "d"), ("a", "d")]
