"""The number of supervised steps a round, on made-up loss curves; equations (9) and (10)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.algorithms.semisupervised.supervised_steps import StepHistory, StepRule, least_steps

K_U = 50


def run(rule, supervised, unlabelled, rounds, *, least=1, first=100):
    """Return K_s of every round's end and the last history; losses are functions of the round, from 0."""
    history, steps = StepHistory(steps=first), []
    for number in range(rounds):
        history = history.observe(rule, supervised(number), unlabelled(number), K_U).decide(rule, least)
        steps.append(history.steps)
        again = StepHistory.from_facts(history.facts("k/") | {"other": 1}, "k/")
        assert repr(again) == repr(history), "a NaN is not equal to itself"
    return steps, history


def test_it_falls_where_the_unlabelled_loss_alone_falls():
    """At every hundredth round with ten periods behind it: 100, 66, 44, 29, ..."""
    steps, history = run(StepRule(), lambda _: 1.0, lambda number: -number, 501)
    assert history.faster == "1" * 10
    assert [steps[number] for number in (98, 99, 198, 199, 298, 299, 399, 499, 500)] == [
        *(100, 100, 100),  # after 100 rounds there are nine falls, and no full window
        *(66, 66, 44, 29, 19, 19),
    ]


def test_it_stays_where_the_supervised_loss_alone_falls():
    steps, history = run(StepRule(), lambda number: -number, lambda _: 1.0, 400)
    assert (set(steps), history.faster) == ({100}, "0" * 10)


def test_half_of_the_periods_are_enough():
    """R_h >= 0.5; of falls as they are, not divided by steps."""
    rule = StepRule(period=1, window=2, per_step=False)
    steps, history = run(rule, lambda _: 0.0, lambda number: -(number // 2), 4)
    assert history.faster.count("1") == 1
    assert steps == [100, 100, 100, 66]


def test_falls_are_divided_by_the_steps_that_they_took():
    """Twice as far in a hundred steps as in fifty is as fast, and no faster."""
    curves = (lambda number: -2.5 * number, lambda number: -2.0 * number)
    assert run(StepRule(), *curves, 200)[1].faster == "1" * 10
    assert run(StepRule(per_step=False), *curves, 200)[1].faster == "0" * 10


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=60), st.integers(1, 120), st.floats(1.01, 4.0))
def test_it_never_rises_and_keeps_its_bounds(losses, least, alpha):
    rule, history, before = StepRule(alpha=alpha, period=2, window=3), StepHistory(), 100
    for number, (supervised, unlabelled) in enumerate(losses, 1):
        history = history.observe(rule, supervised, unlabelled, K_U).decide(rule, least)
        assert min(100, least) <= history.steps <= before
        assert history.steps == before or number % 6 == 0
        before = history.steps


def test_its_least_is_the_papers_and_never_zero():
    """The values of four data sets at K_u = 50 and beta = 8."""
    rule = StepRule()
    sizes = {(1000, 72257): 5, (4000, 46000): 32, (5000, 100000): 19, (250, 49750): 2}
    assert {pair: least_steps(rule, *pair, K_U) for pair in sizes} == sizes
    assert least_steps(rule, 250, 49750, 20) == 1
    assert least_steps(rule, 0, 0, 20) == 1


def test_a_step_or_a_period_without_sense_is_refused():
    for wrong in ({"alpha": 1.0}, {"alpha": math.inf}, {"beta": -1.0}, {"period": 0}, {"window": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StepRule(**wrong)
