"""HCEF's control of a round; what is proved stands in its specification's (h)."""

import dataclasses

import numpy as np
import pytest

from edge_server.allocation.optimizers import hcef_cvxpy
from edge_server.allocation.optimizers.base import Bound
from edge_server.allocation.optimizers.hcef import alternate, solve, solve_sent, solve_steps, start_steps
from edge_server.allocation.optimizers.hcef_budget import Place, remaining
from edge_server.allocation.optimizers.hcef_problem import (
    Hcef,
    derive_terms,
    objective_terms,
    sent_cap,
    steps_cap,
    total_joules,
)
from tests.edge_server.allocation.optimizers.instances import CONTROLS, control

SEEDS = range(5)
COUNTS = (1, 4, 30)


def every():
    return [control(kind, count, seed) for kind in CONTROLS for seed in SEEDS for count in COUNTS]


def changed(problem, **columns):
    return dataclasses.replace(problem, **columns)


def feasible(given, point):
    steps, sent = point
    took = steps * given.step_s + sent * given.send_s
    return (
        total_joules(given, point) <= given.energy_joules * (1 + 1e-12)
        and np.all(took <= given.deadline_s * (1 + 1e-12))
        and np.all((steps >= given.least[0]) & (steps <= 1) & (sent >= given.least[1]) & (sent <= 1))
    )


def test_the_papers_coefficient_of_p22_is_right():
    problem = control("energy", 9, 1)
    given, rng = derive_terms(problem), np.random.default_rng(0)
    sent = rng.random(9)
    printed = (2 - sent) * problem.sigma2 - (4 + sent) * problem.g2
    for steps in rng.random((5, 9)):
        rest = objective_terms(given, (steps, sent)) - (3 * problem.g2 * steps**2 + printed * steps)
        assert rest == pytest.approx(np.full(9, 3 * problem.g2))


@pytest.mark.parametrize("kind", CONTROLS)
def test_both_blocks_are_never_worse_than_the_conic_solver(kind):
    for seed in SEEDS:
        for count in COUNTS:
            given = derive_terms(control(kind, count, seed))
            steps = start_steps(given, np.random.default_rng(seed).random())
            sent, price = solve_sent(given, steps)
            theirs, conic = hcef_cvxpy.solve_sent(given, steps)
            ours, least = (objective_terms(given, (steps, one)).sum() for one in (sent, theirs))
            assert feasible(given, (steps, sent))
            assert -1e-6 * least <= ours - least <= 1e-12 * least
            again, price = solve_steps(given, sent)
            theirs, conic = hcef_cvxpy.solve_steps(given, sent)
            ours, least = (objective_terms(given, (one, sent)).sum() for one in (again, theirs))
            assert feasible(given, (again, sent))
            assert -1e-6 * least <= ours - least <= 1e-12 * least
            if conic > 1e-6 and np.any((again > given.least[0]) & (again < steps_cap(given, sent))):
                assert price == pytest.approx(conic, rel=1e-3)


def test_the_conditions_of_karush_kuhn_and_tucker_hold():
    for problem in every():
        given = derive_terms(problem)
        sent, _ = solve_sent(given, start_steps(given, 0.5))
        steps, price = solve_steps(given, sent)
        slope = 2 * given.bend * (steps - 1) + (2 - sent) * given.noise + price * given.step_joules
        scale = given.bend + given.noise + price * given.step_joules
        cap = steps_cap(given, sent)
        at_floor, at_cap = steps <= given.least[0] * (1 + 1e-9), steps >= cap * (1 - 1e-9)
        rest = slope / scale
        assert np.all(np.abs(rest[~at_floor & ~at_cap]) <= 1e-6)
        assert np.all(rest[at_floor & ~at_cap] >= -1e-6)
        assert np.all(rest[at_cap & ~at_floor] <= 1e-6)
        assert price >= 0
        if price > 0:
            assert total_joules(given, (steps, sent)) == pytest.approx(given.energy_joules)


def test_the_alternation_descends_and_stays_feasible():
    for problem in every():
        given = derive_terms(problem)
        steps, sent, last = start_steps(given, 0.0), np.full(len(problem.mu_s), given.least[1]), np.inf
        for _ in range(6):
            sent, _ = solve_sent(given, steps)
            assert feasible(given, (steps, sent))
            steps, _ = solve_steps(given, sent)
            assert feasible(given, (steps, sent))
            now = objective_terms(given, (steps, sent)).sum()
            assert now <= last + 1e-12 * abs(now)
            last = now
        assert alternate(given, start_steps(given, 0.0), sweeps=6).objective == pytest.approx(last, rel=1e-4)


def test_with_no_limits_all_is_sent_and_steps_are_the_unconstrained_best():
    for sigma2, g2, expected in ((0.5, 1.0, 5 / 6 - 0.5 / 6), (9.0, 1.0, 0.05), (1.0, 0.0, 0.05), (0.0, 0.0, None)):
        problem = Hcef(np.ones(3), 2.0, 1.0, 1.0, np.inf, np.inf, 5, sigma2, g2)
        found = solve(problem)
        assert found.feasible
        assert found.multiplier == 0
        if expected:
            assert found.sent.tolist() == [1.0] * 3
            assert found.steps == pytest.approx(np.full(3, expected))


def test_sending_that_costs_no_joules_is_limited_by_time_alone():
    problem = changed(control("energy", 9, 3), tx_w=0.0)
    given = derive_terms(problem)
    found = solve(problem)
    assert found.sent == pytest.approx(sent_cap(given, found.steps), abs=1e-4)


def test_the_order_of_devices_does_not_matter():
    for problem in every():
        order = np.random.default_rng(1).permutation(len(problem.mu_s))
        names = ("mu_s", "nu_s", "alpha_joules", "tx_w", "deadline_s")
        mixed = solve(changed(problem, **{name: getattr(problem, name)[order] for name in names}))
        assert mixed.steps == pytest.approx(solve(problem).steps[order], rel=1e-9)


def test_floors_that_do_not_fit_are_given_all_the_same_and_what_would_do_is_told():
    problem = Hcef(np.array([1.0, 100.0]), 1.0, 1.0, 1.0, 4.0, 100.0, 5, 0.1, 1.0)
    late = solve(problem)
    assert not late.feasible
    assert (late.steps[1], late.sent[1]) == pytest.approx((0.05, 1e-3))
    assert late.enough_s == pytest.approx([0.05 * 5 + 1e-3, 0.05 * 500 + 1e-3])
    assert solve(changed(problem, deadline_s=float(late.enough_s.max()))).feasible
    poor = solve(changed(problem, deadline_s=100.0, energy_joules=0.1))
    assert not poor.feasible
    assert poor.steps.tolist() == [0.05] * 2
    assert solve(changed(problem, deadline_s=100.0, energy_joules=poor.enough_joules)).feasible
    assert solve(changed(problem, energy_joules=np.nan)).steps.tolist() == [0.05] * 2


def test_one_device_that_claims_absurd_costs_takes_no_more_than_its_part_from_the_others():
    alpha = np.ones(10)
    problem = Hcef(np.ones(10), 1.0, alpha, 1.0, 5.0, 40.0, 5, 0.1, 1.0)
    alpha[3] = 1e9
    found, fair = solve(changed(problem, alpha_joules=alpha)), solve(changed(problem, alpha_joules=np.ones(10)))
    others = np.arange(10) != 3
    assert not found.feasible
    assert Bound(found.bound[3]) is Bound.ENERGY
    assert found.steps[3] == pytest.approx(0.05)
    assert found.steps[others] == pytest.approx(fair.steps[others])


@pytest.mark.parametrize("solver", ["numpy", "cvxpy"])
def test_nobody_one_and_figures_that_are_none(solver):
    assert solve(Hcef(np.empty(0), 1.0, 1.0, 1.0, 1.0, 1.0, 5, 1.0, 1.0), solver=solver).feasible
    nan, inf = np.nan, np.inf
    mu, nu = np.array([1.0, inf, 1.0, nan, -1.0, 1.0]), np.array([1.0, 1.0, inf, 1.0, 1.0, 1.0])
    found = solve(Hcef(mu, nu, 1.0, 1.0, 4.0, 6.0, 5, 0.1, 1.0), solver=solver)
    names = [Bound(code).name for code in found.bound]
    assert names[1:5] == ["OUT", "OUT", "UNKNOWN", "UNKNOWN"]
    assert found.steps[1:5] == pytest.approx(np.full(4, 0.05))
    assert found.sent[1:5] == pytest.approx(np.full(4, 1e-3))
    alone = solve(Hcef(mu[[0, 5]], 1.0, 1.0, 1.0, 4.0, 6.0, 5, 0.1, 1.0), solver=solver)
    assert found.steps[[0, 5]] == pytest.approx(alone.steps, abs=1e-4)


def test_what_a_budget_leaves_makes_the_rest_of_the_run_meet_it():
    rng = np.random.default_rng(5)
    for _ in range(20):
        phi, q = int(rng.integers(2, 9)), int(rng.integers(1, 6))
        over, edge_over = int(rng.integers(phi)), int(rng.integers(q))
        past, now, fixed, total = rng.random(over), rng.random(edge_over), rng.random(), 100 * rng.random()
        left = remaining(total, past.sum(), Place(over, phi, edge_over, q), now.sum(), fixed)
        this_round = now.sum() + (q - edge_over) * left + fixed
        assert past.sum() + (phi - over) * this_round == pytest.approx(total)
    assert remaining(1.0, 0.0, Place(3, 3)) == 0.0
