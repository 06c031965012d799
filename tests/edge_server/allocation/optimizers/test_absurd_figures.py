"""Figures that can be no board's: each optimizer answers with numbers, and what it says of them holds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings

import numpy as np
import pytest

from edge_server.allocation.optimizers import bandwidth, hcef, hcef_joint
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth
from edge_server.allocation.optimizers.hcef_problem import Control, derive_terms
from tests.edge_server.allocation.optimizers import instances
from tests.edge_server.allocation.optimizers.instances import by_integers

ABSURD = (0.0, 1e-300, 5e-324, 1e-40, 1e40, 1e155, 1e308, math.inf, -1.0, -1e308, math.nan)
COLUMNS = ("mu_s", "nu_s", "alpha_joules", "tx_w", "deadline_s")
FEW = 2
RATES = ("up_bits_per_s", "compute_s", "personal_s", "warm_up_s", "upload_bits")


def require_sound(found: Control) -> None:
    """Check what every allocation is, whatever was asked."""
    assert np.all((found.steps >= 0.05 * (1 - 1e-12)) & (found.steps <= 1))
    assert np.all((found.sent >= 1e-3 * (1 - 1e-12)) & (found.sent <= 1))
    assert math.isfinite(found.objective)
    assert not math.isnan(found.multiplier)
    assert not np.isnan(found.gain_per_s).any()
    if found.least_objective is not None:
        assert found.least_objective <= found.objective * (1 + 1e-9)
        assert found.gap == max(0.0, found.gap)


@pytest.mark.parametrize("solve", [hcef.solve, hcef_joint.solve], ids=["by turns", "joint"])
@pytest.mark.parametrize("column", COLUMNS)
def test_one_device_with_absurd_figures(solve, column):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one, kind in itertools.product(ABSURD, ("balanced", "energy", "link")):
            problem = instances.control(kind, 6, 3)
            own = np.array(getattr(problem, column))
            own[2] = one
            require_sound(solve(dataclasses.replace(problem, **{column: own})))
            require_sound(solve(dataclasses.replace(problem, **{column: np.full(6, one)})))


@pytest.mark.parametrize("solve", [hcef.solve, hcef_joint.solve], ids=["by turns", "joint"])
@pytest.mark.parametrize("name", ["energy_joules", "sigma2", "g2"])
def test_absurd_figures_of_all(solve, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one, two in itertools.product(ABSURD, (0.0, 1e-300, 1e308, 1.0)):
            problem = dataclasses.replace(instances.control("balanced", 6, 3), **{name: one})
            require_sound(solve(problem))
            require_sound(solve(dataclasses.replace(problem, deadline_s=two, g2=two if name != "g2" else one)))


@pytest.mark.parametrize("count", [FEW, 8, 40])
def test_no_seconds_of_computing_and_no_limit_have_a_bound_that_holds(count):
    """mu = 0 and tau = 0 told a bound above the optimum or far below it, E = inf none at all and a gap of zero."""
    for seed, kind in itertools.product(range(2), ("balanced", "energy")):
        problem = instances.control(kind, count, seed)
        some = np.array(problem.mu_s)
        some[::2] = 0.0
        for changes in (
            {"mu_s": np.zeros(count)},
            {"mu_s": some},
            {"tau": 0},
            {"nu_s": np.zeros(count)},
            {"energy_joules": math.inf},
            {"energy_joules": math.inf, "deadline_s": math.inf},
            {"alpha_joules": 0.0, "tx_w": 0.0, "energy_joules": 0.0},
        ):
            asked = dataclasses.replace(problem, **changes)
            found = hcef_joint.solve(asked)
            require_sound(found)
            assert found.gap <= 1e-3, (kind, seed, changes.keys())
            given = derive_terms(asked)
            if math.isfinite(given.energy_joules) and count == FEW and seed == 0:
                assert found.objective <= by_integers(given) * (1 + 1e-6), (kind, changes.keys())


@pytest.mark.parametrize("name", [*RATES, "threshold_s"])
def test_absurd_figures_of_the_uplink(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one, kind in itertools.product(ABSURD, ("link", "compute", "mixed")):
            problem = instances.bandwidth(kind, 6, 3)
            if name == "threshold_s":
                require_shares(bandwidth.solve(dataclasses.replace(problem, threshold_s=one)))
                continue
            own = np.array(np.broadcast_to(getattr(problem, name), 6), np.float64)
            own[2] = one
            for columns in (own, np.full(6, one)):
                require_shares(bandwidth.solve(Bandwidth(**{**vars(problem), name: columns})))


def require_shares(found: bandwidth.Shares) -> None:
    """Check what every sharing is."""
    assert np.all((found.share >= 0) & (found.pruned >= 0) & (found.pruned <= 1))
    assert found.share.sum() <= 1 + 1e-9
    for told in (found.objective, found.multiplier, found.enough_s):
        assert not math.isnan(told)
    assert not np.isnan(found.gain_per_s).any()
    assert not np.isnan(found.gain_per_compute_s).any()
