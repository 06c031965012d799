"""Water-filling solution of the joint bandwidth and pruning problem of Liu et al. (`bandwidth_problem`).

The formulas are in `bandwidth_problem`. https://arxiv.org/abs/2309.01816
"""

from __future__ import annotations

import numpy as np

from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, BandwidthTerms, Shares, derive_terms
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.optimizers.water_filling import Ramps, fill


def solve(problem: Bandwidth, solver: Solver = "numpy") -> Shares:
    """Return the optimum; does not fail whatever devices report."""
    terms = derive_terms(problem)
    if solver == "cvxpy":
        from edge_server.allocation.optimizers.bandwidth_cvxpy import solve_conic  # noqa: PLC0415 - a second to import

        return build_shares(terms, *solve_conic(terms))
    filled = fill(ramps(terms), 1.0)
    return build_shares(terms, filled.amount, filled.level**-2.0)


def ramps(terms: BandwidthTerms) -> Ramps:
    """Return b_k as ramps in x = 1 / sqrt(lambda)."""
    full = np.where(terms.cap > 0, terms.full, 1.0)  # no ramp for a device that needs no share
    root = np.sqrt(terms.slack * full)
    starts, ends = ((bound * terms.compute + full) / root for bound in (terms.floor, terms.cap))
    return Ramps(starts, ends, terms.floor, terms.cap)


def build_shares(terms: BandwidthTerms, share: Array, multiplier: float) -> Shares:
    """Complete given shares b_k and multiplier lambda to an allocation: ratios, bounds, gains."""
    slack, full, compute = terms.slack, terms.full, terms.compute
    filled, spare = share >= terms.cap, slack - compute
    sent = share * compute + full
    with np.errstate(all="ignore"):
        keep = np.where(full > 0, share * slack / sent, slack / compute)
    keeps_all = terms.takes_part & filled & (spare >= full) & ~terms.limited
    keep = np.where(terms.takes_part, np.where(keeps_all, 1.0, np.minimum(keep, 1.0)), 0.0)
    at_floor = (share <= terms.floor) & ~filled
    bound = np.where(at_floor, np.where(share > 0, Bound.FLOOR, Bound.NOTHING), Bound.INTERIOR)
    at_most = np.where(terms.limited, Bound.FAIRNESS, Bound.TIME)
    bound = np.where(keeps_all, Bound.FULL, np.where(filled, at_most, bound))
    bound = np.where(terms.takes_part, bound, np.where(terms.valid, Bound.OUT, Bound.UNKNOWN)).astype(np.int8)
    with np.errstate(all="ignore"):
        more = np.where(full > 0, share / sent, np.where(keep < 1, 1 / compute, 0.0))
        freed = multiplier * np.where(keeps_all, full / spare**2, 0.0)
        least = slack / np.where(share > 0, keep, 1.0) - compute
        freed = np.where(at_floor & (share > 0), multiplier * full / (keep * least**2), freed)
    fixed = keeps_all | at_floor
    gain = np.where(terms.takes_part & ~fixed, more, np.where(fixed & terms.takes_part, freed, 0.0))
    saved = gain * np.where(keeps_all, 1.0, keep)
    return Shares(
        share, 1.0 - keep, bound, multiplier, gain, saved, float((1.0 - keep).sum()), terms.feasible, terms.enough_s
    )
