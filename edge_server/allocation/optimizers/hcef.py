r"""HCEF's control problem P2 of one edge round, by alternation (Algorithm 3).

Zhang, Gao, Guo, Gong. HCEF: heterogeneity-aware cooperative federated edge learning with adaptive computation and
communication compression. https://arxiv.org/abs/2409.04022

    P2: minimise sum_n (2 - theta_n) rho_n (sigma^2 + G^2) + w (1 - rho_n)^2 G^2                        (15)
        rho_n tau mu_n + theta_n nu_n <= D_n,   sum_n (rho_n tau alpha_n + p_n theta_n nu_n) <= E
        rho_min <= rho_n <= 1,   theta_min <= theta_n <= 1

    P2.1, rho fixed: maximise sum_n rho_n theta_n, a fractional knapsack of joules filled in order of rho_n / (p_n nu_n)
    P2.2, theta fixed: minimise sum_n w G^2 rho_n^2 + C_n rho_n, C_n = (2 - theta_n)(sigma^2 + G^2) - 2 w G^2,
        rho_n = clip(-(C_n + lambda tau alpha_n) / (2 w G^2), rho_min, min(1, (D_n - theta_n nu_n) / (tau mu_n)))

Both are water-filling, exact; G = 0 turns P2.2 into a knapsack too. Algorithm 3 alternates between them, and its result
depends on the start: by default half of the room beyond the floors is spent on steps first. `hcef_joint` solves P2 as a
whole. Floors that do not fit are granted nevertheless, and `enough_s`, `enough_joules` say what they need; no device's
floor counts as more than its equal part of E then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from edge_server.allocation.optimizers.base import Array, Solver
from edge_server.allocation.optimizers.hcef_problem import (
    Control,
    Hcef,
    HcefTerms,
    build_control,
    derive_terms,
    sent_cap,
    steps_cap,
)
from edge_server.allocation.optimizers.water_filling import Ramps, fill

STILL = 1e-4
NEAR = 1e-6
"""Tolerance for steps that count as whole."""

Block: TypeAlias = Callable[[HcefTerms, Array], tuple[Array, float]]
"""Solver of P2.1 given rho, or of P2.2 given theta; also returns the multiplier of the energy row."""


def solve(problem: Hcef, start: float = 0.5, solver: Solver = "numpy", sweeps: int = 50) -> Control:
    """Solve P2 by alternation (Algorithm 3).

    Args:
        start: Share of the room beyond the floors that is spent on steps first.
        sweeps: Maximum number of sweeps.
    """
    terms = derive_terms(problem)
    blocks: tuple[Block, Block] = (solve_sent, solve_steps)
    if solver == "cvxpy":
        from edge_server.allocation.optimizers import hcef_cvxpy  # noqa: PLC0415 - a second to import

        blocks = hcef_cvxpy.solve_sent, hcef_cvxpy.solve_steps
    return alternate(terms, start_steps(terms, start), blocks, sweeps)


def start_steps(terms: HcefTerms, share: float) -> Array:
    """Return the optimal steps if only a share of the room beyond the floors is available."""
    least_s, least_joules = np.where(terms.able, terms.enough_s, 0.0), terms.floor_joules
    with np.errstate(invalid="ignore"):  # no limit: a share of infinity is infinite
        deadline = least_s + share * (terms.deadline_s - least_s) if share else least_s
    energy = least_joules + share * (terms.energy_joules - least_joules) if share else least_joules
    half = replace(terms, deadline_s=deadline, energy_joules=energy)
    return solve_steps(half, np.full(len(least_s), terms.least[1]))[0]


def alternate(terms: HcefTerms, steps: Array, blocks: tuple[Block, Block] | None = None, sweeps: int = 50) -> Control:
    """Alternate between P2.1 and P2.2 until no device moves any more (Algorithm 3).

    Args:
        steps: Initial rho.
        blocks: Solvers of P2.1 and P2.2; default: those of this module.
        sweeps: Maximum number of sweeps.
    """
    p21, p22 = blocks or (solve_sent, solve_steps)
    sent, multiplier, done = np.full(len(steps), terms.least[1]), 0.0, 0
    while done < sweeps:
        done += 1
        before = steps, sent
        sent, _ = p21(terms, steps)
        steps, multiplier = p22(terms, sent)
        if max(np.max(np.abs(steps - before[0]), initial=0.0), np.max(np.abs(sent - before[1]), initial=0.0)) <= STILL:
            break
    return build_control(terms, (steps, sent), multiplier, sweeps=done)


def round_steps(terms: HcefTerms, tau: int, allocation: Control) -> Control:
    """Round rho tau to whole numbers, and solve theta again for these.

    All are rounded down, then up again where deadlines and joules allow, the largest fractions first.

    Args:
        terms: rho_min must be at least 1 / tau.
        tau: Local iterations of a round at rho = 1.
    """
    exact = allocation.steps * tau
    count = np.floor(exact + NEAR)
    step_s, step_joules = terms.step_s / tau, terms.step_joules / tau
    joules_left = terms.energy_joules - float((count * step_joules + allocation.sent * terms.send_joules).sum())
    in_time = (count + 1) * step_s + allocation.sent * terms.send_s <= terms.deadline_s
    lost = np.where(in_time & (exact - count > NEAR), exact - count, 0.0)
    order = np.argsort(-lost, kind="stable")
    affordable = np.cumsum(np.where(lost > 0, step_joules, 0.0)[order]) <= joules_left
    count[order] += affordable & (lost[order] > 0)
    steps = np.clip(count / tau, terms.least[0], 1.0)
    sent = allocation.sent if terms.least[1] >= 1 else solve_sent(terms, steps)[0]
    rounded = build_control(terms, (steps, sent), allocation.multiplier, sweeps=allocation.sweeps)
    # The room that rounding leaves is not a missed gain.
    return replace(rounded, bound=allocation.bound, gain_per_s=allocation.gain_per_s)


def solve_sent(terms: HcefTerms, steps: Array) -> tuple[Array, float]:
    """Solve P2.1: theta for given rho, and the multiplier."""
    least, most = terms.least[1], sent_cap(terms, steps)
    joules, room = terms.send_joules, terms.energy_joules - float((steps * terms.step_joules).sum())
    free = joules <= 0
    with np.errstate(all="ignore"):
        worth = np.where(free, 0.0, -terms.noise * steps / joules)
    filled = fill(Ramps(worth, worth, least * joules, most * joules), room, most=0.0)
    with np.errstate(all="ignore"):
        sent = np.where(free, most, filled.amount / joules)
    return np.clip(sent, least, most), max(0.0, -filled.level)


def solve_steps(terms: HcefTerms, sent: Array) -> tuple[Array, float]:
    """Solve P2.2: rho for given theta, and the multiplier."""
    least, most = terms.least[0], steps_cap(terms, sent)
    joules, room = terms.step_joules, terms.energy_joules - float((sent * terms.send_joules).sum())
    slope = (2 - sent) * terms.noise - 2 * terms.bend
    free = joules <= 0
    with np.errstate(all="ignore"):
        start = np.where(free, 0.0, (slope + 2 * terms.bend * least) / joules)
        end = np.where(free, 0.0, (slope + 2 * terms.bend * most) / joules)
        alone = -slope / (2 * terms.bend) if terms.bend else np.where(slope < 0, np.inf, -np.inf)
    filled = fill(Ramps(start, np.maximum(start, end), least * joules, most * joules), room, most=0.0)
    with np.errstate(all="ignore"):
        steps = np.where(free, alone, filled.amount / joules)
    return np.clip(steps, least, most), max(0.0, -filled.level)
