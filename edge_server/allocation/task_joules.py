"""Joules of a task as allocators predict them: of the whole device, idle included, as the ledger charges them.

Watts of a part are those of the newest task that told its joules and seconds; before there is one, those that the plan
says, and of a transfer at the least what the device draws idle. What a device has measured of other tasks, and never of
that part, is no figure: the ledger charges nothing for it either.

Paper 004 shares the uplink out without a limit of joules. Where there is one, shares stay as they are, and a device
keeps the least of what T_th allows and of what its joules allow:

    E_k(kept) = E_down + P_busy t_compute(kept) + P_up bits(kept) / (share_k R_k) <= E

A share that it then cannot use stays its own: it sends for a shorter time, which saves joules too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import msgspec
import numpy as np

from edge_server.allocation.figures import DeviceFacts, Estimate
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth_problem import Shares
from edge_server.allocation.optimizers.base import Array, Bound
from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.decision import Figure
from edge_server.plan.devices import DevicePlan
from edge_server.plan.simulated_devices import CyclesPower, GivenPower, ends
from shared.protocol.measurements import Cost

Spent: TypeAlias = Callable[[Array], Array]
"""What devices keep -> the joules of their tasks, by device; what nobody knows of is zero."""

HALVINGS, LITTLE = 60, 1e-6
"""Of an interval within [0, 1], to the last bits of a double; a part of a model, to see what a joule more buys."""


def joule_estimates(one: DeviceFacts, options: MeasuringOptions) -> dict[str, Estimate]:
    """Return the watts of a device's transfers, and by how much predictions of its tasks' joules were off."""
    transfer_w = _planned_transfer_w(one.planned)
    estimates = {
        "upload_w": _transfer_w(one, one.carried.cost if one.carried else None, "upload", transfer_w[0]),
        "download_w": _transfer_w(one, one.task.cost if one.task else None, "download", transfer_w[1]),
    }
    if options.calibrated and "joules_error" in one.errors:
        estimates["joules_error"] = Estimate(one.errors["joules_error"])
    return estimates


def busy_w(one: DeviceFacts) -> Estimate:
    """Return the watts of a device while it trains."""
    power = one.planned.power if one.planned else None
    task, timed = one.task.cost if one.task else Cost(), one.timed
    told = _watts(task.compute_joules, task.compute_s)
    if told is None and timed is not None:
        told = _watts(timed.joules, timed.seconds)
    return Estimate(told, profile=power.busy_w if isinstance(power, GivenPower) else None)


def _transfer_w(one: DeviceFacts, cost: Cost | None, way: str, planned_w: float | None) -> Estimate:
    if cost is None:
        idle_w = planned_w if planned_w is not None else _idle_w(one)
        return Estimate(None, profile=planned_w, default=idle_w)
    joules, seconds = (getattr(cost, f"{way}_{unit}") for unit in ("joules", "s"))
    return Estimate(_watts(joules, seconds))


def _watts(joules: float | None, seconds: float | None) -> float | None:
    return None if joules is None or not seconds else joules / seconds


def _idle_w(one: DeviceFacts) -> float | None:
    if one.task and one.task.cost.idle_w is not None:
        return one.task.cost.idle_w
    return one.timed.idle_w if one.timed else None


def _planned_transfer_w(planned: DevicePlan | None) -> tuple[float | None, float | None]:
    """Return what a device draws while it sends and while it receives, as the plan has it; None where it does not."""
    match planned.power if planned else None:
        case GivenPower() as power:
            return power.tx_w, power.rx_w
        case CyclesPower() as power:
            tx_w = None if power.tx_w is None else power.idle_w + sum(ends(power.tx_w)) / 2
            return tx_w, None if power.rx_w is None else power.idle_w + power.rx_w
        case _:
            return None, None


def work_estimates(one: DeviceFacts) -> dict[str, Estimate]:
    """Return the watts of a device's computing, and the joules of its download, which no decision changes."""
    told = one.task.cost.download_joules if one.task else None
    return {"compute_w": busy_w(one), "download_joules": Estimate(told)}


def with_joules(predicted: Cost, figures: Mapping[str, Figure], compute: float | None, download: float | None) -> Cost:
    """Return a predicted cost with its joules, put right by the errors of earlier predictions.

    Args:
        compute: Joules of its computing, not put right yet; None where nobody knows them.
        download: Likewise of its download.
    """
    error, upload = figures.get("joules_error"), times(figures.get("upload_w"), predicted.upload_s)
    parts = [None if one is None else one * (error.value if error else 1.0) for one in (download, compute, upload)]
    return msgspec.structs.replace(predicted, download_joules=parts[0], compute_joules=parts[1], upload_joules=parts[2])


def times(figure: Figure | None, amount: float | None) -> float | None:
    """Return a figure so many times; None where one of both is not known."""
    return None if figure is None or amount is None else figure.value * amount


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
