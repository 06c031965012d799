"""P2 on fleets of equal boards: certified, never above alternation, nor above an integer programme's points."""

from __future__ import annotations

import os

import numpy as np
import pytest

from edge_server.allocation.optimizers.hcef_joint import solve
from edge_server.allocation.optimizers.hcef_problem import derive_terms, total_joules
from tests.edge_server.allocation.optimizers.instances import best_of_ten, by_integers, fleet

SEEDS = int(os.environ.get("FLEETS", "5"))
"""Of each size and number of kinds; FLEETS=100 for the study."""

KINDS = (1, 2, 3, 5, 0)
MANY = 10_000
"""Devices of fleets of which half as many seeds are tried."""


@pytest.mark.parametrize("count", [8, 16, 30, 64, 200, 1000, pytest.param(MANY, marks=pytest.mark.slow)])
def test_equal_boards_are_certified_and_never_worse_than_ten_alternations(count):
    gaps = []
    for kinds in KINDS:
        for seed in range(SEEDS if count < MANY else max(1, SEEDS // 2)):
            problem = fleet(kinds, count, seed)
            given, found = derive_terms(problem), solve(problem)
            assert total_joules(given, (found.steps, found.sent)) <= given.energy_joules * (1 + 1e-11)
            assert np.all(found.steps * given.step_s + found.sent * given.send_s <= given.deadline_s * (1 + 1e-11))
            assert found.least_objective <= found.objective * (1 + 1e-12)
            assert found.objective <= best_of_ten(given, np.random.default_rng(seed)) * (1 + 1e-9), (kinds, seed)
            gaps.append(found.gap)
    assert np.mean(np.array(gaps) > 1e-3) <= 0.01


@pytest.mark.parametrize("count", [8, 200, *(pytest.param(count, marks=pytest.mark.slow) for count in (25, 500))])
def test_no_mixture_of_points_on_a_grid_is_better(count):
    for kinds in (1, 2, 3):
        for seed in range(max(1, SEEDS // 3)):
            problem = fleet(kinds, count, seed)
            found, other = solve(problem), by_integers(derive_terms(problem))
            assert found.objective <= other * (1 + 1e-6), (kinds, seed)
            assert found.least_objective <= other * (1 + 1e-9), (kinds, seed)
