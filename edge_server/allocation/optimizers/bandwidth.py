"""Water-filling solution of paper 004's joint bandwidth and pruning problem.

The formulas are in `bandwidth_problem`. https://arxiv.org/abs/2309.01816
"""

from __future__ import annotations

import numpy as np

from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, BandwidthTerms, Shares, terms
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.optimizers.water_filling import Ramps, fill


def solve(problem: Bandwidth, solver: Solver = "numpy") -> Shares:
    """Return the optimum; nothing that devices say makes it fail."""
    given = terms(problem)
    if solver == "cvxpy":
        from edge_server.allocation.optimizers.bandwidth_cvxpy import optimum  # noqa: PLC0415 - a second to import

        return allocation(given, *optimum(given))
    filled = fill(ramps(given), 1.0)
    return allocation(given, filled.amount, filled.level**-2.0)


def ramps(given: BandwidthTerms) -> Ramps:
    """Return b_k over x = 1 / sqrt(lambda)."""
    full = np.where(given.cap > 0, given.full, 1.0)  # who needs no share has no ramp
    root = np.sqrt(given.slack * full)
    starts, ends = ((bound * given.compute + full) / root for bound in (given.floor, given.cap))
    return Ramps(starts, ends, given.floor, given.cap)


def allocation(given: BandwidthTerms, share: Array, multiplier: float) -> Shares:
    """Return what the shares amount to, and why they are as they are.

    Args:
        share: b_k, a column.
        multiplier: lambda.
    """
    slack, full, compute = given.slack, given.full, given.compute
    filled, spare = share >= given.cap, slack - compute
    sent = share * compute + full
    with np.errstate(all="ignore"):
        kept = np.where(full > 0, share * slack / sent, slack / compute)
    whole = given.takes_part & filled & (spare >= full) & ~given.held
    kept = np.where(given.takes_part, np.where(whole, 1.0, np.minimum(kept, 1.0)), 0.0)
    at_floor = (share <= given.floor) & ~filled
    bound = np.where(at_floor, np.where(share > 0, Bound.FLOOR, Bound.NOTHING), Bound.INTERIOR)
    at_most = np.where(given.held, Bound.FAIRNESS, Bound.TIME)
    bound = np.where(whole, Bound.FULL, np.where(filled, at_most, bound))
    bound = np.where(given.takes_part, bound, np.where(given.told, Bound.OUT, Bound.UNKNOWN)).astype(np.int8)
    with np.errstate(all="ignore"):
        more = np.where(full > 0, share / sent, np.where(kept < 1, 1 / compute, 0.0))
        freed = multiplier * np.where(whole, full / spare**2, 0.0)
        least = slack / np.where(share > 0, kept, 1.0) - compute
        freed = np.where(at_floor & (share > 0), multiplier * full / (kept * least**2), freed)
    fixed = whole | at_floor
    rest = np.where(given.takes_part & ~fixed, more, np.where(fixed & given.takes_part, freed, 0.0))
    saved = rest * np.where(whole, 1.0, kept)
    return Shares(
        share, 1.0 - kept, bound, multiplier, rest, saved, float((1.0 - kept).sum()), given.feasible, given.enough_s
    )
