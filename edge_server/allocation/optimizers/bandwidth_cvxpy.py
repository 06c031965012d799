"""Conic formulation (cvxpy) of the `bandwidth` problem, compiled once per fleet size.

With y = b / cap, r = c cap / u and a cone t (1 + r y) >= (alpha + beta y)^2 for each device:

    r < 1 (also c = 0):  1 - rho = (s cap / u) (y - t),  alpha = 0, beta = sqrt(r)
    r >= 1:              1 - rho = (s / c) (1 - t),      alpha = 1, beta = 0
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import cvxpy as cp
import numpy as np

from edge_server.allocation.optimizers.bandwidth_problem import BandwidthTerms
from edge_server.allocation.optimizers.base import Array

SETTINGS = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10}
PARAMETERS = ("by_share", "by_curve", "alpha", "beta", "still", "slope", "floor", "cap")


@lru_cache(maxsize=8)
def _compile_problem(count: int) -> tuple[cp.Problem, dict[str, Any]]:
    part, curve = cp.Variable(count), cp.Variable(count)
    parameters = {name: cp.Parameter(count, nonneg=True) for name in PARAMETERS}
    under = parameters["still"] + cp.multiply(parameters["slope"], part)
    above = parameters["alpha"] + cp.multiply(parameters["beta"], part)
    room = parameters["cap"] @ part <= 1
    rows = [cp.SOC(curve + under, cp.vstack([2 * above, curve - under])), part >= parameters["floor"], part <= 1]
    goal = cp.Minimize(parameters["by_curve"] @ curve - parameters["by_share"] @ part)
    return cp.Problem(goal, [room, *rows]), {**parameters, "part": part, "room": room}


def solve_conic(terms: BandwidthTerms) -> tuple[Array, float]:
    """Return the shares, clipped to their bounds, and the multiplier of the uplink.

    Raises:
        cvxpy.SolverError: The solver found no solution.
    """
    if not terms.cap.any():
        return terms.cap, 0.0
    problem, parameters = _compile_problem(len(terms.cap))
    needs = terms.cap > 0
    cap, full = np.where(needs, terms.cap, 1.0), np.where(needs, terms.full, 1.0)
    ratio = terms.compute * cap / full
    bent, scale = ratio >= 1, 1 + ratio
    parameters["by_share"].value = np.where(needs & ~bent, terms.slack * cap / full, 0.0)
    parameters["by_curve"].value = np.where(needs, terms.slack / np.where(bent, terms.compute, full / cap), 0.0)
    parameters["alpha"].value = np.where(bent, scale**-0.5, 0.0)
    parameters["beta"].value = np.where(bent, 0.0, np.sqrt(ratio / scale))
    parameters["still"].value, parameters["slope"].value = 1 / scale, ratio / scale
    parameters["floor"].value, parameters["cap"].value = terms.floor / cap, terms.cap
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": 1e-10 is near double precision
        problem.solve(solver=cp.CLARABEL, **SETTINGS)
    share = np.clip(terms.cap * parameters["part"].value, terms.floor, terms.cap)
    movable = share - terms.floor
    over = max(0.0, float(share.sum()) - 1.0)
    if over:
        share = share - over * movable / movable.sum()
    return share, max(0.0, float(parameters["room"].dual_value))
