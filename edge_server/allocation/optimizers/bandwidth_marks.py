"""Bandwidth problem with marks: uploads that also carry mask positions and biases.

The upload size is not linear in the kept share:

    bits(kept) = q N kept + min(N, 32 N kept) + biases        one bit per weight, or 32 per kept weight
    bits(1) = q N + biases,  bits(0) = 0

so the problem is solved repeatedly with W_k = bits(kept_k) / kept_k until the kept shares no longer move. Without
floors a device may oscillate between nothing and something; then the best of these shares is taken, and each device
keeps as much as it can send in time. Every result is checked against every device's deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge_server.allocation.optimizers.bandwidth import solve
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, Shares, derive_terms
from edge_server.allocation.optimizers.base import Array, Bound, Solver, column

INDEX_BITS = 32
TURNS, CLOSE, LEAST_KEPT = 20, 1e-9, 1e-3


@dataclass(frozen=True)
class Upload:
    """Upload size in bits as a function of the keep ratio.

    Attributes:
        weights: N, number of prunable weights.
        dense_bits: Bits that pruning never saves: biases and the like.
        marked: Whether marks and biases count in addition to weights.
    """

    weights: float
    bits_per_weight: float
    dense_bits: float = 0.0
    marked: bool = True

    def bits(self, keep: Array) -> Array:
        """Return the upload bits at given keep ratios."""
        marks = np.where(keep < 1, self.weights * np.minimum(1, INDEX_BITS * keep), 0.0)
        marks += np.where(keep > 0, self.dense_bits, 0.0)
        bits: Array = self.bits_per_weight * self.weights * keep + (marks if self.marked else 0.0)
        return bits

    def bits_per_model(self, keep: Array) -> Array:
        """Return W_k, the upload bits per kept share, at keep ratios below 1."""
        bits = self.bits_per_weight * self.weights + np.zeros(len(keep))
        if self.marked:
            bits += self.weights * np.minimum(INDEX_BITS, 1 / np.maximum(keep, 1 / INDEX_BITS))
            bits += self.dense_bits / np.maximum(keep, LEAST_KEPT)
        return bits

    def kept_in_time(self, slack_s: Array, compute_s: Array, rate: Array) -> tuple[Array, Array]:
        """Return the largest keep ratios within the given seconds, and their gain per second.

        Seconds are kept c + bits(kept) / rate. They rise along two straight lines: one where the upload lists the
        positions of weights, one where it has a bitmap.

        Args:
            slack_s: Column of s_k.
            compute_s: Column of c_k.
            rate: Column of b_k R_k, in bit/s.
        """
        dense = self.dense_bits if self.marked else 0.0
        bitmap, index = (self.weights, INDEX_BITS * self.weights) if self.marked else (0.0, 0.0)
        weight_bits = self.bits_per_weight * self.weights
        with np.errstate(all="ignore"):
            by_bitmap, by_index = compute_s + weight_bits / rate, compute_s + (weight_bits + index) / rate
            keep = (slack_s - (bitmap + dense) / rate) / by_bitmap
            few = (slack_s - dense / rate) / by_index
            has_few = ~(keep >= 1 / INDEX_BITS)
            keep = np.where(has_few, np.minimum(few, 1 / INDEX_BITS), keep) if self.marked else keep
            keep = np.where(slack_s >= compute_s + (weight_bits + dense) / rate, 1.0, keep)
            gain = 1 / np.where(has_few & self.marked, by_index, by_bitmap)
        return np.clip(np.nan_to_num(keep, nan=0.0), 0.0, 1.0), np.nan_to_num(gain, posinf=0.0)


def solve_with_marks(problem: Bandwidth, upload: Upload, solver: Solver = "numpy") -> tuple[Array, Shares]:
    """Return W_k and the shares; every device meets the threshold.

    Args:
        problem: Its `upload_bits` count the weights alone.
    """
    bits, shares = column(problem.upload_bits, len(problem.up_bits_per_s)), solve(problem, solver)
    is_stable, attempts = not upload.marked, []
    for _ in range(TURNS if upload.marked else 0):
        keep = 1 - shares.pruned
        bits = upload.bits_per_model(keep)
        shares = solve(replace(problem, upload_bits=bits), solver)
        if is_stable := bool(np.abs(1 - shares.pruned - keep).max(initial=0.0) < CLOSE):
            break
        attempts.append((bits, shares))
    if is_stable:
        return bits, fit_to_deadline(problem, upload, shares, is_stable=True)
    bits = upload.bits_per_model(np.full(len(bits), 1 - problem.most_pruned))  # an upper bound for every device
    attempts.append((bits, solve(replace(problem, upload_bits=bits), solver)))
    tried = [(bits, fit_to_deadline(problem, upload, shares, is_stable=False)) for bits, shares in attempts]
    return min(tried, key=lambda attempt: (not attempt[1].feasible, attempt[1].objective))


def fit_to_deadline(problem: Bandwidth, upload: Upload, shares: Shares, *, is_stable: bool) -> Shares:
    """Adjust keep ratios to what each device can send within the threshold, and update `feasible`.

    Args:
        problem: Its `upload_bits` are ignored.
        is_stable: Whether the ratios are exact except for rounding; then only those that are too large change.
    """
    terms, keep, most = derive_terms(problem), 1 - shares.pruned, problem.most_share
    if 0 < (total := float(shares.share.sum())) < 1:  # all meet T_th with less; the rest makes them faster
        shares = replace(shares, share=np.minimum(shares.share / total, most))
    rate = shares.share * column(problem.up_bits_per_s, len(keep))
    fits, _ = upload.kept_in_time(terms.slack, terms.compute, rate)
    fits = np.where(terms.takes_part, fits, 0.0) if upload.weights > 0 else keep
    changes = keep > fits * (1 + CLOSE) if is_stable else keep != fits
    if not changes.any():
        return shares
    keep = np.where(changes, fits, keep)
    least = (1 - problem.most_pruned) * (1 - CLOSE)
    bound = np.where(changes & (keep >= 1), Bound.FULL, shares.bound)
    bound = np.where(changes & (keep < 1) & (shares.bound == Bound.FULL), Bound.TIME, bound)
    bound = np.where(changes & (keep == 0) & terms.takes_part, Bound.NOTHING, bound)
    return replace(
        shares,
        pruned=1 - keep,
        bound=bound.astype(np.int8),
        objective=float((1 - keep).sum()),
        feasible=shares.feasible and bool((keep[terms.takes_part] >= least).all()),
    )
