"""Energy of power samples, against hand-sized figures, closed forms and noise whose statistics are known."""

from __future__ import annotations

import itertools
import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.measurement.energy import Sample, integrate_energy, integrate_spans


def instants(*pairs: tuple[float, float]) -> list[Sample]:
    return [Sample(at, watts) for at, watts in pairs]


def test_a_ramp_is_exact_and_its_edges_are_interpolated():
    """Watts 2 + t between samples at 0, 1, 2, 3; from 0.5 to 2.5 that is 2*2 + (2.5^2 - 0.5^2)/2 = 7 J."""
    found = integrate_energy(instants((0, 2), (1, 3), (2, 4), (3, 5)), 0.5, 2.5, kind="instant", period_s=1.0)
    assert found.joules == pytest.approx(7.0)
    assert (found.seconds, found.covered_ratio) == (2.0, 1.0)


def test_a_gap_is_filled_by_the_mean_of_its_ends_and_told():
    """From 4 to 10 (six periods) nothing came: 4*2 + 6*(2+4)/2 + 4*4 = 42 J, of which 8 of 14 s are covered."""
    samples = instants(*((at, 2.0) for at in range(5)), *((at, 4.0) for at in range(10, 15)))
    found = integrate_energy(samples, 0, 14, kind="instant", period_s=1.0, uncertainty=0.03)
    assert found.joules == pytest.approx(42.0)
    assert found.covered_ratio == pytest.approx(8 / 14)
    assert found.uncertainty > 0.1  # of watts between 2 and 4 for 6 s
    short = integrate_energy(samples, 0, 4, kind="instant", period_s=1.0, uncertainty=0.03)
    assert 0.03 < short.uncertainty < 0.04  # four equal samples do not tell that nothing was between them


def test_three_periods_are_no_gap_and_more_are():
    def covered(pause: float) -> float:
        samples = instants((0, 1), (1, 1), (1 + pause, 1), (2 + pause, 1), (3 + pause, 1), (4 + pause, 1))
        return integrate_energy(samples, 0, 4 + pause, kind="instant", period_s=1.0).covered_ratio

    assert covered(3.0) == 1.0
    assert covered(3.5) == pytest.approx(4 / 7.5)


def test_too_little_is_no_figure():
    """Where samples cover less than half of the time, where there are none, and where no time passed."""
    samples = instants((0, 2), (1, 2))
    assert integrate_energy(samples, 0, 100, kind="instant", period_s=1.0) is None
    assert integrate_energy(samples, 50, 60, kind="instant", period_s=1.0) is None
    assert integrate_energy([], 0, 1, kind="instant", period_s=1.0) is None
    assert integrate_energy(samples, 1, 1, kind="instant", period_s=1.0) is None


def test_a_counter_is_exact_however_rarely_it_is_read():
    """Mean watts hold since the sample before: 3 J from 0 to 1, then 100 s at 5 W; from 0.5 to 51 that is 251.5 J."""
    found = integrate_energy(instants((0, 3), (1, 3), (101, 5)), 0.5, 51, kind="mean", period_s=0.2, uncertainty=0.0)
    assert found.joules == pytest.approx(0.5 * 3 + 50 * 5)
    assert found.covered_ratio == 1.0
    assert 0 < found.uncertainty < 0.15  # of the half of 100 s, whose mean alone is known
    whole = integrate_energy(instants((0, 3), (1, 3), (101, 5)), 0, 101, kind="mean", period_s=0.2, uncertainty=0.0)
    assert whole.uncertainty == 0.0


def test_an_error_in_watts_counts_for_as_long_as_it_lasts():
    """A plug of 1 W: 10 s at 5 W are 50 ± 10 J, and at 2 W 20 ± 10 J; beside it what a share takes."""
    for watts, share in ((5.0, 0.2), (2.0, 0.5)):
        samples = [Sample(0.2 * number, watts) for number in range(51)]
        found = integrate_energy(samples, 0, 10, kind="instant", period_s=0.2, uncertainty_w=1.0)
        assert found.uncertainty == pytest.approx(share, rel=0.01)
        both = integrate_spans(
            samples, [(0, 5), (5, 10)], kind="instant", period_s=0.2, uncertainty=share, uncertainty_w=1.0
        )
        assert both.uncertainty == pytest.approx(math.hypot(share, share), rel=0.01)


def test_an_unknown_uncertainty_stays_unknown():
    assert integrate_energy(instants((0, 2), (1, 2)), 0, 1, kind="instant", period_s=1.0).uncertainty is None


@given(
    watts=st.lists(st.floats(0.1, 50), min_size=3, max_size=30),
    cut=st.floats(0.05, 0.95),
    kind=st.sampled_from(["instant", "mean"]),
)
def test_two_parts_are_the_whole(watts, cut, kind):
    """However a stretch of time is cut in two, the parts' joules add up; and they lie between least and most watts."""
    samples = [Sample(0.2 * number, one) for number, one in enumerate(watts)]
    end = samples[-1].at
    whole, first, second = (
        integrate_energy(samples, start, stop, kind=kind, period_s=0.2)
        for start, stop in ((0, end), (0, cut * end), (cut * end, end))
    )
    assert first.joules + second.joules == pytest.approx(whole.joules, rel=1e-9)
    assert min(watts) * end * (1 - 1e-9) <= whole.joules <= max(watts) * end * (1 + 1e-9)


def test_the_uncertainty_is_the_spread_of_what_is_found():
    """White noise of 0.5 W on 3 W, sampled at 5 Hz for 10 s: over 300 runs the errors are as large as it says."""
    random = Random(4)
    errors, told = [], []
    for _ in range(300):
        samples = [Sample(0.2 * number, random.gauss(3, 0.5)) for number in range(51)]
        found = integrate_energy(samples, 0, 10, kind="instant", period_s=0.2, uncertainty=0.0)
        errors.append(found.joules / 30 - 1)
        told.append(found.uncertainty)
    spread = math.sqrt(statistics.fmean(error**2 for error in errors))
    assert 0.8 < spread / statistics.fmean(told) < 1.25


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=12), st.sampled_from(["instant", "mean"]))
def test_spans_that_follow_one_another_take_what_the_whole_takes(lengths, kind):
    """However time is cut, no joule is lost or counted twice; of every second one, the rest is in the others."""
    samples = instants(*((0.25 * place, 3 + math.sin(place)) for place in range(160)))
    ends = [1.0 + sum(lengths[:place]) for place in range(len(lengths) + 1)]
    spans = list(itertools.pairwise(ends))

    def joules(some):
        return integrate_spans(samples, some, kind=kind, period_s=0.25).joules if some else 0.0

    whole = integrate_energy(samples, ends[0], ends[-1], kind=kind, period_s=0.25).joules
    assert joules(spans) == pytest.approx(whole)
    assert joules(spans[::2]) + joules(spans[1::2]) == pytest.approx(whole)


def test_a_span_that_nothing_covers_makes_all_of_them_unknown():
    samples = instants((0, 2), (1, 2), (2, 2))
    assert integrate_spans(samples, [(0.5, 1.5), (50, 60)], kind="instant", period_s=1.0) is None
    assert integrate_spans(samples, [(1, 1)], kind="instant", period_s=1.0) is None
    assert integrate_spans(samples, [(1, 1), (0, 2)], kind="instant", period_s=1.0, uncertainty=0.1).joules == 4.0
