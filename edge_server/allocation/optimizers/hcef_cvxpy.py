"""Solve HCEF's subproblems with cvxpy: update share and local steps."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import cvxpy as cp
import numpy as np

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, sent_cap, steps_cap

SETTINGS = {"tol_gap_abs": 1e-10, "tol_gap_rel": 1e-10, "tol_feas": 1e-10}


@lru_cache(maxsize=16)
def _compile_block(count: int, *, bent: bool) -> tuple[cp.Problem, dict[str, Any]]:
    """Build: minimise slope @ x + bend |x|^2 subject to joules @ x <= room and a box."""
    x, bend = cp.Variable(count), cp.Parameter(nonneg=True)
    parameters = {name: cp.Parameter(count) for name in ("slope", "least", "most")}
    joules, room = cp.Parameter(count, nonneg=True), cp.Parameter()
    row = joules @ x <= room
    goal = parameters["slope"] @ x + (bend * cp.sum_squares(x) if bent else 0)
    problem = cp.Problem(cp.Minimize(goal), [row, x >= parameters["least"], x <= parameters["most"]])
    return problem, {**parameters, "x": x, "bend": bend, "joules": joules, "room": room, "row": row}


def solve_sent(terms: HcefTerms, steps: Array) -> tuple[Array, float]:
    """Solve P2.1: theta for given rho, and the multiplier."""
    least = np.full(len(steps), terms.least[1])
    room = terms.energy_joules - float((steps * terms.step_joules).sum())
    return _solve_block(-terms.noise * steps, 0.0, (least, sent_cap(terms, steps)), terms.send_joules, room)


def solve_steps(terms: HcefTerms, sent: Array) -> tuple[Array, float]:
    """Solve P2.2: rho for given theta, and the multiplier."""
    least = np.full(len(sent), terms.least[0])
    room = terms.energy_joules - float((sent * terms.send_joules).sum())
    slope = (2 - sent) * terms.noise - 2 * terms.bend
    return _solve_block(slope, terms.bend, (least, steps_cap(terms, sent)), terms.step_joules, room)


def _solve_block(
    slope: Array, bend: float, box: tuple[Array, Array], joules: Array, room: float
) -> tuple[Array, float]:
    """Solve with figures scaled to about one; clip the result to the box and the row.

    Raises:
        cvxpy.SolverError: The solver found no solution.
    """
    if not len(slope):
        return slope, 0.0
    worth, joule = max(float(np.max(np.abs(slope), initial=0.0)), bend) or 1.0, float(joules.sum()) or 1.0
    problem, parameters = _compile_block(len(slope), bent=bend > 0)
    parameters["slope"].value, parameters["bend"].value = slope / worth, bend / worth
    parameters["least"].value, parameters["most"].value = box
    parameters["joules"].value, parameters["room"].value = joules / joule, min(room / joule, 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": 1e-10 is near double precision
        problem.solve(solver=cp.CLARABEL, **SETTINGS)
    x = np.clip(parameters["x"].value, box[0], box[1])
    over = float((joules * x).sum()) - room
    movable = float((joules * (x - box[0])).sum())
    if over > 0 and movable > 0:
        x = x - min(1.0, over / movable) * (x - box[0])
    return x, max(0.0, float(parameters["row"].dual_value)) * worth / joule
