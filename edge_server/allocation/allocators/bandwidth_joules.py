"""Joule limit of `bandwidth`: prune more where task energy binds.

Paper 004 shares the uplink without a limit of joules. With one, the shares stay the same, and a device keeps the
smaller of what T_th allows and what its joules allow:

    E_k(kept) = E_down + P_busy t_compute(kept) + P_up bits(kept) / (share_k R_k) <= E

The device keeps a share that it can no longer fill: it sends for a shorter time, which saves joules too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth_problem import Shares
from edge_server.allocation.optimizers.base import Array, Bound

Spent: TypeAlias = Callable[[Array], Array]
"""What devices keep -> the joules of their tasks, by device; what nobody knows of is zero."""


HALVINGS, LITTLE = 60, 1e-6
"""Of an interval within [0, 1], to the last bits of a double; a part of a model, to see what a joule more buys."""


def spent_joules(case: Case, compute_s: Array, upload_s: Array) -> Array:
    """Return the joules of tasks, as far as devices have told what they draw.

    Args:
        compute_s: Seconds of computing, a column.
        upload_s: Seconds of uploads; what is no number belongs to a device that sends nothing.
    """
    busy_w, upload_w, download, error = (
        np.array(case.column(name, otherwise))
        for name, otherwise in (("compute_w", 0.0), ("upload_w", 0.0), ("download_joules", 0.0), ("joules_error", 1.0))
    )
    with np.errstate(all="ignore"):
        computing = np.where(busy_w > 0, busy_w * np.nan_to_num(compute_s, posinf=np.inf), 0.0)
        sending = np.where(upload_w > 0, upload_w * np.nan_to_num(upload_s, posinf=np.inf), 0.0)
    joules: Array = error * (download + computing + sending)
    return joules


def hold_to_joules(shares: Shares, spent: Spent, limit: float, most_pruned: float) -> tuple[Shares, float]:
    """Return the allocation with more pruned where joules bind, and the smallest limit that would do for all.

    Args:
        shares: Without a limit of joules.
        spent: Joules of tasks; they rise with what is kept, but for a warm-up that the whole model does not need.
        limit: Joules of one device's task.
        most_pruned: The largest ratio.
    """
    kept = 1 - shares.pruned
    least = np.minimum(kept, 1 - most_pruned)
    enough, over = float(np.max(spent(least), initial=0.0)), ~(spent(kept) <= limit)
    if not over.any():
        return shares, enough
    low, high = least, kept
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = spent(middle) <= limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    held = np.where(over, low, kept)
    with np.errstate(all="ignore"):
        more = np.nan_to_num(LITTLE / (spent(held + LITTLE) - spent(held)), posinf=0.0)
    return replace(
        shares,
        pruned=1 - held,
        bound=np.where(over, Bound.ENERGY, shares.bound).astype(np.int8),
        gain_per_s=np.where(over, more, shares.gain_per_s),
        objective=float((1 - held).sum()),
        feasible=bool(shares.feasible and enough <= limit),
    ), enough
