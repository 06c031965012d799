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
def _compiled(count: int) -> tuple[cp.Problem, dict[str, Any]]:
    part, curve = cp.Variable(count), cp.Variable(count)
    given = {name: cp.Parameter(count, nonneg=True) for name in PARAMETERS}
    under = given["still"] + cp.multiply(given["slope"], part)
    above = given["alpha"] + cp.multiply(given["beta"], part)
    room = given["cap"] @ part <= 1
    rows = [cp.SOC(curve + under, cp.vstack([2 * above, curve - under])), part >= given["floor"], part <= 1]
    goal = cp.Minimize(given["by_curve"] @ curve - given["by_share"] @ part)
    return cp.Problem(goal, [room, *rows]), {**given, "part": part, "room": room}


def optimum(given: BandwidthTerms) -> tuple[Array, float]:
    """Return the shares, put back within their bounds, and the multiplier of the uplink.

    Raises:
        cvxpy.SolverError: The solver gave up.
    """
    if not given.cap.any():
        return given.cap, 0.0
    problem, told = _compiled(len(given.cap))
    needs = given.cap > 0
    cap, full = np.where(needs, given.cap, 1.0), np.where(needs, given.full, 1.0)
    ratio = given.compute * cap / full
    bent, scale = ratio >= 1, 1 + ratio
    told["by_share"].value = np.where(needs & ~bent, given.slack * cap / full, 0.0)
    told["by_curve"].value = np.where(needs, given.slack / np.where(bent, given.compute, full / cap), 0.0)
    told["alpha"].value = np.where(bent, scale**-0.5, 0.0)
    told["beta"].value = np.where(bent, 0.0, np.sqrt(ratio / scale))
    told["still"].value, told["slope"].value = 1 / scale, ratio / scale
    told["floor"].value, told["cap"].value = given.floor / cap, given.cap
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": 1e-10 is close to what doubles hold
        problem.solve(solver=cp.CLARABEL, **SETTINGS)
    share = np.clip(given.cap * told["part"].value, given.floor, given.cap)
    movable = share - given.floor
    over = max(0.0, float(share.sum()) - 1.0)
    if over:
        share = share - over * movable / movable.sum()
    return share, max(0.0, float(told["room"].dual_value))
