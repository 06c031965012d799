"""Joule limit of `bandwidth`: prune more where task energy binds.

Liu et al. (arXiv 2309.01816) share the uplink without a limit of joules. With one, the shares stay the same, and a
device keeps the smaller of what T_th allows and what its joules allow:

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

JoulesOfKeep: TypeAlias = Callable[[Array], Array]
"""Keep ratios -> joules of the tasks, by device; zero where the watts are unknown."""


HALVINGS, LITTLE = 60, 1e-6
"""Bisections of [0, 1], down to double precision; and the step in the keep ratio for the marginal gain of a joule."""


def predict_joules(case: Case, compute_s: Array, upload_s: Array) -> Array:
    """Return the joules of tasks, as far as the devices' watts are known.

    Args:
        compute_s: Column of seconds.
        upload_s: Column of seconds; NaN for a device that sends nothing.
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


def limit_joules(
    shares: Shares, joules_of_keep: JoulesOfKeep, limit: float, most_pruned: float
) -> tuple[Shares, float]:
    """Prune more where joules bind; also return the smallest limit that all devices could meet.

    Args:
        shares: Allocation without a limit of joules.
        joules_of_keep: Rises with the keep ratio, except that the whole model needs no warm-up.
        limit: Joules of one device's task.
        most_pruned: rho_max.
    """
    keep = 1 - shares.pruned
    least = np.minimum(keep, 1 - most_pruned)
    enough, exceeds = float(np.max(joules_of_keep(least), initial=0.0)), ~(joules_of_keep(keep) <= limit)
    if not exceeds.any():
        return shares, enough
    low, high = least, keep
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fits = joules_of_keep(middle) <= limit
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    limited = np.where(exceeds, low, keep)
    with np.errstate(all="ignore"):
        more = np.nan_to_num(LITTLE / (joules_of_keep(limited + LITTLE) - joules_of_keep(limited)), posinf=0.0)
    return replace(
        shares,
        pruned=1 - limited,
        bound=np.where(exceeds, Bound.ENERGY, shares.bound).astype(np.int8),
        gain_per_s=np.where(exceeds, more, shares.gain_per_s),
        objective=float((1 - limited).sum()),
        feasible=bool(shares.feasible and enough <= limit),
    ), enough
