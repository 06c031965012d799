"""P2 as a whole: feasible, certified, and never above what alternation finds."""

import dataclasses

import numpy as np
import pytest

from edge_server.allocation.optimizers.hcef import solve as by_turns
from edge_server.allocation.optimizers.hcef_few import best_within
from edge_server.allocation.optimizers.hcef_joint import solve
from edge_server.allocation.optimizers.hcef_problem import (
    Hcef,
    derive_terms,
    objective_terms,
    total_joules,
)
from tests.edge_server.allocation.optimizers.instances import CONTROLS, best_of_ten, control, fleet


@pytest.mark.parametrize("kind", CONTROLS)
def test_it_is_feasible_certified_and_never_worse_than_alternation_from_any_start(kind):
    for seed in range(5):
        for count in (1, 2, 5, 17, 64):
            problem, rng = control(kind, count, seed), np.random.default_rng(seed)
            given, found = derive_terms(problem), solve(problem)
            point = found.steps, found.sent
            assert total_joules(given, point) <= given.energy_joules * (1 + 1e-11)
            assert np.all(found.steps * given.step_s + found.sent * given.send_s <= given.deadline_s * (1 + 1e-11))
            assert found.least_objective <= found.objective * (1 + 1e-12)
            assert found.objective <= best_of_ten(given, rng) * (1 + 1e-9)


@pytest.mark.parametrize("seed", [26, 58, 172])
def test_it_is_not_worse_where_the_last_joules_pay_for_one_device_between_its_faces(seed):
    """Of 200 balanced instances, those in which alternation from ten or from thirty starts once found a better one."""
    problem, rng = control("balanced", 64, seed), np.random.default_rng(seed)
    found = solve(problem).objective
    assert found <= best_of_ten(derive_terms(problem), rng) * (1 + 1e-9)
    others = np.random.default_rng(seed + 1000)
    assert found <= min(best_of_ten(derive_terms(problem), others) for _ in range(4)) * (1 + 1e-9)


def test_the_certified_gap_is_small_where_there_are_many():
    for kind in ("balanced", "energy", "time"):
        gaps = [solve(control(kind, 64, seed)).gap for seed in range(20)]
        assert np.median(gaps) <= 1e-3
        assert max(gaps) <= 5e-3


@pytest.mark.parametrize(
    ("count", "seed"),
    [(257, 100_048), (300, 100_009), (512, 100_018), (700, 100_150), (1000, 101_851), (2000, 100_829)],
)
def test_the_certified_gap_is_small_where_many_are_equal(count, seed):
    """One side of the multiplier stays at its floors here; the gap was 0.5 to 2 %."""
    problem = fleet(1, count, seed)
    found = solve(problem)
    assert found.gap <= 2e-4
    assert found.objective <= best_of_ten(derive_terms(problem), np.random.default_rng(seed)) * (1 + 1e-9)


def test_two_devices_are_within_half_a_percent_of_a_fine_grid():
    for kind in ("balanced", "energy", "link"):
        for seed in range(4):
            problem = control(kind, 2, seed)
            given = derive_terms(problem)
            floors = given.least[0] * given.step_joules + given.least[1] * given.send_joules
            spare = (given.energy_joules - floors.sum()) * np.linspace(0, 1, 4001)
            shared = np.stack((floors[0] + spare, floors[1] + spare[::-1]))
            grid = objective_terms(given, best_within(given, shared)).sum(axis=0).min()
            assert solve(problem).objective <= grid * 1.0001


def test_a_devices_best_within_its_joules_is_no_worse_than_a_grid_of_both():
    given = derive_terms(control("balanced", 6, 1))
    floors = given.least[0] * given.step_joules + given.least[1] * given.send_joules
    limit = floors + 0.4 * (given.step_joules + given.send_joules)
    found = objective_terms(given, tuple(one[:, None] for one in map(np.ravel, best_within(given, limit[:, None]))))[
        :, 0
    ]
    steps = np.linspace(given.least[0], 1, 300)[:, None, None] + np.zeros((1, 300, 6))
    sent = np.linspace(given.least[1], 1, 300)[None, :, None] + np.zeros((300, 1, 6))
    fits = (steps * given.step_s + sent * given.send_s <= given.deadline_s) & (
        steps * given.step_joules + sent * given.send_joules <= limit
    )
    grid = np.where(fits, objective_terms(given, (steps, sent)), np.inf).min(axis=(0, 1))
    assert np.all(found <= grid + 1e-12)


def test_the_multiplier_is_what_one_more_joule_takes_off():
    problem = control("energy", 64, 2)
    more = dataclasses.replace(problem, energy_joules=problem.energy_joules * 1.01)
    found, better = solve(problem), solve(more)
    bought = (found.objective - better.objective) / (0.01 * problem.energy_joules)
    assert bought == pytest.approx(found.multiplier, rel=0.05)


def test_budgets_below_the_floors_no_budget_and_nobody():
    problem = control("energy", 5, 0)
    poor = solve(dataclasses.replace(problem, energy_joules=0.0))
    assert not poor.feasible
    assert poor.steps.tolist() == [0.05] * 5
    assert poor.gap == 0
    rich = solve(dataclasses.replace(problem, energy_joules=np.inf, deadline_s=np.inf))
    assert rich.sent.tolist() == [1.0] * 5
    assert rich.multiplier == 0
    exact = solve(dataclasses.replace(problem, energy_joules=poor.enough_joules))
    assert exact.feasible
    assert solve(Hcef(np.empty(0), 1.0, 1.0, 1.0, 1.0, 1.0, 5, 1.0, 1.0)).gap == 0
    still = by_turns(dataclasses.replace(problem, sigma2=0.0, g2=0.0))
    assert solve(dataclasses.replace(problem, sigma2=0.0, g2=0.0)).objective == still.objective == 0.0


@pytest.mark.parametrize("kind", CONTROLS)
def test_budgets_below_the_floors_that_do_not_divide_evenly(kind):
    """What devices' even parts of E add up to may be E but for rounding: nothing is left to divide by."""
    for seed in range(40):
        shares = np.random.default_rng(seed).uniform(0.01, 0.3, 2)
        for count in (3, 7, 9, 12):
            problem = control(kind, count, seed)
            for share in shares:
                poor = dataclasses.replace(problem, energy_joules=share * derive_terms(problem).enough_joules)
                assert not solve(poor).feasible


def test_budgets_that_the_floors_take_but_for_rounding():
    for seed in range(8):
        problem = control("balanced", 9, seed)
        floors = derive_terms(problem).floor_joules
        for more in (0.0, 1e-16, 3e-16, 1e-15, 1e-14, 1e-12, 1e-11, 1e-9):
            tight = dataclasses.replace(problem, energy_joules=floors * (1 + more))
            found = solve(tight)
            assert total_joules(derive_terms(tight), (found.steps, found.sent)) <= floors * (1 + more) * (1 + 1e-12)
