"""The rate of a link from its transfers: every figure is worked out by hand, time is an argument."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.measurement.link_rate import (
    HALF_LIFE_S,
    MAX_TRANSFERS,
    MIN_PART_BYTES,
    MIN_TRANSFER_BYTES,
    Direction,
    LinkTransfer,
    drop_outdated,
    estimate_rate,
)

MB = 1_000_000


def haul(mbit_per_s: float, at: float = 0.0, size: int = 4 * MB) -> LinkTransfer:
    return LinkTransfer(size, 8 * size / (mbit_per_s * 1e6), at)


def way(*mbit_per_s: float, size: int = 4 * MB) -> Direction:
    one = Direction("up")
    for number, rate in enumerate(mbit_per_s):
        one.add(haul(rate, at=float(number), size=size))
    return one


def mbit(one: Direction) -> float:
    rate = estimate_rate(one.transfers)
    assert rate
    return rate.bits_per_s / 1e6


def test_of_nothing_nothing_is_known() -> None:
    assert estimate_rate([]) is None


def test_times_add_up_so_the_mean_is_harmonic_and_weighted_by_bytes() -> None:
    """1 MB at 8 Mbit/s takes 1 s and 3 MB at 4 Mbit/s take 6 s: 4 MB in 7 s are 32/7 Mbit/s."""
    rate = estimate_rate([haul(8, size=MB), haul(4, size=3 * MB)])
    assert rate
    assert rate.bits_per_s == pytest.approx(32e6 / 7)
    assert rate.n == 2


def test_after_a_half_life_a_transfer_counts_half() -> None:
    """2 MB of 8 Mbit/s against 4 MB of 4: 48 Mbit in 10 s."""
    rate = estimate_rate([haul(8, at=0.0), haul(4, at=HALF_LIFE_S)])
    assert rate
    assert rate.bits_per_s == pytest.approx(48e6 / 10)
    assert rate.at == HALF_LIFE_S


def test_an_old_rate_is_still_told_but_not_trusted() -> None:
    """A year later the link is what it was last known to be, with little confidence, and the age is in `at`."""
    rate = estimate_rate([haul(8), haul(8)])
    assert rate
    assert rate.bits_per_s == pytest.approx(8e6)
    assert rate.at == 0.0
    assert rate.confidence(365 * 86_400.0) == "low"


def test_the_low_rate_is_that_of_the_slowest_fifth_of_the_bytes() -> None:
    """Four of five equal transfers at 10 Mbit/s and one at 6: the slowest holds just a fifth; of six it holds less."""
    for count, low in ((4, 6e6), (5, 10e6)):
        rate = estimate_rate([haul(6), *[haul(10)] * count])
        assert rate
        assert rate.p20_bits_per_s == pytest.approx(low)


def test_confidence_needs_many_alike_and_young() -> None:
    alike, unlike = [haul(10)] * 5, [haul(10), haul(5), haul(10), haul(5), haul(10)]
    told = {
        name: rate.confidence(now)
        for name, hauls, now in (
            ("five", alike, 10.0),
            ("four", alike[:4], 10.0),
            ("one", alike[:1], 10.0),
            ("unlike", unlike, 10.0),
            ("old", alike, HALF_LIFE_S),
        )
        if (rate := estimate_rate(hauls))
    }
    assert told == {"five": "high", "four": "medium", "one": "low", "unlike": "medium", "old": "low"}


def test_a_single_transfer_has_no_spread() -> None:
    """Nobody knows how far off it is, which is not the same as not at all."""
    one, two = estimate_rate([haul(8)]), estimate_rate([haul(8), haul(8)])
    assert one
    assert two
    assert one.spread_bits_per_s is None
    assert two.spread_bits_per_s == 0.0


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1e4), st.integers(MIN_TRANSFER_BYTES, 10**9), st.floats(0, 1e6)),
        min_size=1,
        max_size=8,
    )
)
def test_the_mean_lies_between_the_slowest_and_the_fastest(hauls: list[tuple[float, int, float]]) -> None:
    """Property: whatever the sizes and ages; the low rate is one of those measured."""
    made = sorted((haul(rate, at, size) for rate, size, at in hauls), key=lambda one: one.at)
    rate = estimate_rate(made)
    rates = [one.bits_per_s for one in made]
    assert rate
    assert min(rates) * 0.999 <= rate.bits_per_s <= max(rates) * 1.001
    assert rate.p20_bits_per_s in rates


def test_the_last_eight_count() -> None:
    one = way(*[10] * 5, *[12] * MAX_TRANSFERS)
    assert len(one.transfers) == MAX_TRANSFERS
    assert mbit(one) == pytest.approx(12)


@pytest.mark.parametrize(("before", "after"), [(10, 2), (2, 10), (20, 1), (10, 5)])
def test_a_step_shows_within_two_transfers(before: float, after: float) -> None:
    """After any number of transfers before it; the first alone may be an accident and moves the mean only a little."""
    for count in (1, 3, 8, 20):
        assert mbit(way(*[before] * count, after, after)) == pytest.approx(after)
        assert len(way(*[before] * count, after).transfers) == min(count + 1, MAX_TRANSFERS)


def test_a_transfer_across_a_step_is_forgotten_too() -> None:
    """Half of it at 10 and half at 2 Mbit/s is 3.3; with the next one the link is known to be at 1.5."""
    assert mbit(way(10, 10, 10, 3.3, 1.5)) == pytest.approx(1.5)


def test_a_single_slow_transfer_and_one_that_swings_back_are_no_step() -> None:
    assert len(way(10, 10, 10, 2, 10, 2, 10).transfers) == 7
    assert len(way(10, 10, 3, 25).transfers) == 4


def test_a_smaller_change_is_followed_by_the_mean() -> None:
    assert len(drop_outdated([haul(10), haul(7), haul(7)])) == 3


def test_a_transfer_too_short_for_a_rate_is_pooled_with_others() -> None:
    """At 8 Mbit/s 128 KiB take 0.13 s: four of them last half a second, and are one."""
    small = 128 * 1024
    assert not way(*[8] * 3, size=small).transfers
    one = way(*[8] * 4, size=small)
    assert [part.bytes for part in one.transfers] == [4 * small]
    assert mbit(one) == pytest.approx(8)


def test_a_large_one_that_took_no_time_waits_for_more() -> None:
    """25 MB in 0.2 s: a gigabit, but not for long enough to be sure."""
    one = Direction("up")
    for number in range(3):
        one.add(LinkTransfer(25 * MB, 0.2, float(number)))
    assert [part.seconds for part in one.transfers] == [pytest.approx(0.6)]


def test_tiny_transfers_and_those_of_no_time_tell_no_rate() -> None:
    one = Direction("up")
    for _ in range(1000):
        one.add(LinkTransfer(MIN_PART_BYTES - 1, 0.5, 0.0))
        one.add(LinkTransfer(MB, 0.0, 0.0))
        one.add(LinkTransfer(MB, -1.0, 0.0))
        one.add(LinkTransfer(MB, math.nan, 0.0))
    assert not one.transfers


def test_parts_too_far_apart_are_not_pooled() -> None:
    one, small = Direction("up"), 128 * 1024
    for number in range(10):
        one.add(haul(8, at=number * HALF_LIFE_S, size=small))
    assert not one.transfers


def test_a_reset_forgets_also_what_was_pooled() -> None:
    one = way(8, 8)
    one.add(haul(8, size=128 * 1024))
    one.reset()
    for number in range(3):
        one.add(haul(8, at=float(number), size=128 * 1024))
    assert not one.transfers
