"""Largest keep ratio of a device within its memory, deadline and joules.

    keep_k = max p  subject to
    seconds_k(p) = steps_k step_s_k curve(p) + 8 (up(p) / R_up_k + down(p) / R_down_k) <= deadline_k
    joules_k(p) = steps_k step_joules_k curve(p) + 8 (tx_w_k up(p) / R_up_k + rx_w_k down(p) / R_down_k) <= energy_k
    memory(p) <= memory_k

All three rise with p. `curve` is the time of a step relative to the full model's; if it was not measured, that of
FedSPU's exact gradients, (2 + p^2) / 3: frozen neurons stay in the forward pass and in the gradient of the inputs.
Between the given ratios all values are interpolated linearly, which for that curve is on the safe side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_server.allocation.optimizers.base import Array, Bound, Codes, Mask, column, mask_valid


@dataclass(frozen=True)
class KeepRatio:
    """Input of one round; a column has one entry per device or one for all, a table one per ratio.

    Attributes:
        step_s: Seconds of a step on the full model; infinite for no clock.
        up_bits_per_s: R_up_k; zero for no link.
        ratios: Candidates p, ascending, in (0, 1].
        up_bytes: Table of upload bytes, ascending.
        down_bytes: Table of download bytes, ascending; zero to ignore downloads.
        down_bits_per_s: R_down_k; infinite to ignore downloads.
        deadline_s: Infinite for no limit.
        step_joules: Joules of a step on the full model.
        tx_w, rx_w: Watts while sending and while receiving.
        energy_joules: Infinite for no limit.
        memory_bytes: Table of training memory, ascending.
        memory_limit_bytes: Infinite for no limit.
        curve: Table of a step's time relative to the full model's, ascending. None for (2 + p^2) / 3.
        continuous: Whether ratios between the candidates may be chosen.
        fixed_keep: Ratio of a device that it keeps for the whole run; NaN without one.
    """

    step_s: Array
    steps: ArrayLike
    up_bits_per_s: ArrayLike
    ratios: Array
    up_bytes: ArrayLike
    down_bytes: ArrayLike = 0.0
    down_bits_per_s: ArrayLike = math.inf
    deadline_s: ArrayLike = math.inf
    step_joules: ArrayLike = 0.0
    tx_w: ArrayLike = 0.0
    rx_w: ArrayLike = 0.0
    energy_joules: ArrayLike = math.inf
    memory_bytes: ArrayLike = 0.0
    memory_limit_bytes: ArrayLike = math.inf
    curve: ArrayLike | None = None
    continuous: bool = False
    fixed_keep: ArrayLike = math.nan


@dataclass(frozen=True)
class KeepAllocation:
    """Allocation; a device that fits no ratio gets the smallest, with `fits` false.

    Attributes:
        keep: p_k, keep ratio.
        bound: `Bound` of each device.
        seconds, joules: Predicted cost of the round, by device.
        memory_bytes: Predicted training memory.
        up_bytes: Predicted upload size.
        fits: Whether a device is within its limits.
        feasible: Whether all devices are.
        gain_per_s, gain_per_joule, gain_per_byte: Increase of p_k per additional unit, if only that limit binds.
        enough_s, enough_joules, enough_bytes: Cost of the smallest ratio, or of a fixed one.
    """

    keep: Array
    bound: Codes
    seconds: Array
    joules: Array
    memory_bytes: Array
    up_bytes: Array
    fits: Mask
    feasible: bool
    gain_per_s: Array
    gain_per_joule: Array
    gain_per_byte: Array
    enough_s: Array
    enough_joules: Array
    enough_bytes: Array


def solve(problem: KeepRatio) -> KeepAllocation:
    """Return the largest ratios; does not fail whatever devices report."""
    ratios = np.asarray(problem.ratios, np.float64)
    costs, valid = _costs(problem, ratios)
    count = len(valid)
    limits = [column(limit, count) for limit in (problem.deadline_s, problem.energy_joules, problem.memory_limit_bytes)]
    reached = [_largest(ratios, cost, limit) for cost, limit in zip(costs, limits, strict=True)]
    able = np.isfinite(costs[0][:, 0]) & np.isfinite(costs[1][:, 0])
    least = np.minimum.reduce(reached)
    keep = least if problem.continuous else _round_down(ratios, least)
    keep = np.maximum(np.where(valid & able, keep, 0.0), ratios[0])
    fixed_keep = column(problem.fixed_keep, count)
    has_own = fixed_keep > 0
    keep = np.where(has_own, fixed_keep, keep)
    taken_costs = [_interpolate(ratios, cost, keep) for cost in costs]
    least_costs = [np.where(has_own, cost, all_of[:, 0]) for cost, all_of in zip(taken_costs, costs, strict=True)]
    fits = valid & able & (least >= np.where(has_own, keep, ratios[0]))
    binds = [Bound.TIME, Bound.ENERGY, Bound.MEMORY]
    code = np.array(binds, np.int8)[np.argmin(reached, axis=0)]
    code = np.where((keep >= ratios[-1]) & fits, Bound.FULL, code)
    bound = np.where(valid, np.where(able, code, Bound.OUT), Bound.UNKNOWN)
    bound = np.where(has_own, Bound.SETTLED, bound).astype(np.int8)
    gains = [np.where(bound == kind, _slope(ratios, cost, keep), 0.0) for kind, cost in zip(binds, costs, strict=True)]
    table = np.broadcast_to(np.asarray(problem.up_bytes, np.float64), (count, len(ratios)))
    return KeepAllocation(
        keep=keep,
        bound=bound,
        seconds=taken_costs[0],
        joules=taken_costs[1],
        memory_bytes=taken_costs[2],
        up_bytes=_interpolate(ratios, table, keep),
        fits=fits,
        feasible=bool(fits.all()),
        gain_per_s=gains[0],
        gain_per_joule=gains[1],
        gain_per_byte=gains[2],
        enough_s=least_costs[0],
        enough_joules=least_costs[1],
        enough_bytes=least_costs[2],
    )


def _costs(problem: KeepRatio, ratios: Array) -> tuple[list[Array], Mask]:
    """Return seconds, joules and bytes of every device at every ratio, and the mask of valid devices."""
    count = len(problem.step_s)
    columns = (
        problem.step_s, problem.steps, problem.up_bits_per_s, problem.down_bits_per_s, problem.step_joules,
        problem.tx_w, problem.rx_w,
    )  # fmt: skip
    step, steps, up, down, joules, tx, rx = (column(values, count)[:, None] for values in columns)
    limits = (problem.deadline_s, problem.energy_joules, problem.memory_limit_bytes)
    valid = mask_valid(step, steps, up, down, joules, tx, rx)[:, 0] & mask_valid(
        *(column(values, count) for values in limits)
    )
    curve = (2 + ratios**2) / 3 if problem.curve is None else np.asarray(problem.curve, np.float64)
    up_bits, down_bits = 8 * np.asarray(problem.up_bytes, np.float64), 8 * np.asarray(problem.down_bytes, np.float64)
    with np.errstate(all="ignore"):
        sending = np.where(up_bits > 0, up_bits / up, 0.0)
        coming = np.where(down_bits > 0, down_bits / down, 0.0)
        seconds = steps * step * curve + sending + coming
        joules_spent = np.where(steps * joules > 0, steps * joules * curve, 0.0) + np.where(tx > 0, tx * sending, 0.0)
        joules_spent = joules_spent + np.where(rx > 0, rx * coming, 0.0)
    shape = count, len(ratios)
    memory = np.broadcast_to(np.asarray(problem.memory_bytes, np.float64), shape)
    return [np.broadcast_to(seconds, shape), np.broadcast_to(joules_spent, shape), memory], valid


def _largest(ratios: Array, cost: Array, limit: Array) -> Array:
    """Return the largest ratio within a cost limit, interpolated linearly; zero if there is none."""
    within = cost <= limit[:, None]
    last = np.where(within.all(axis=1), len(ratios), np.argmin(within, axis=1)) - 1
    rows, at = np.arange(len(limit)), np.clip(last, 0, max(0, len(ratios) - 2))
    beyond = np.minimum(at + 1, len(ratios) - 1)
    with np.errstate(all="ignore"):
        share = (limit - cost[rows, at]) / (cost[rows, beyond] - cost[rows, at])
    share = np.where(np.isfinite(share), np.clip(share, 0.0, 1.0), 0.0)
    between = ratios[at] + share * (ratios[beyond] - ratios[at])
    return np.where(last < 0, 0.0, np.where(last == len(ratios) - 1, ratios[-1], between))


def _round_down(ratios: Array, keep: Array) -> Array:
    """Return the largest candidate at or below `keep`."""
    return ratios[np.maximum(np.searchsorted(ratios, keep, side="right") - 1, 0)]


def _cell(ratios: Array, keep: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    low = np.clip(np.searchsorted(ratios, keep, side="right") - 1, 0, max(0, len(ratios) - 2))
    return low, np.minimum(low + 1, len(ratios) - 1)


def _interpolate(ratios: Array, cost: Array, keep: Array) -> Array:
    low, high = _cell(ratios, keep)
    rows = np.arange(len(keep))
    with np.errstate(all="ignore"):
        share = np.where(high > low, (keep - ratios[low]) / (ratios[high] - ratios[low]), 0.0)
        values: Array = np.where(
            share > 0, cost[rows, low] + share * (cost[rows, high] - cost[rows, low]), cost[rows, low]
        )
    return values


def _slope(ratios: Array, cost: Array, keep: Array) -> Array:
    """Return the increase of the ratio per unit of cost, just above `keep`."""
    low, high = _cell(ratios, keep)
    rows = np.arange(len(keep))
    with np.errstate(all="ignore"):
        slope = (ratios[high] - ratios[low]) / (cost[rows, high] - cost[rows, low])
    return np.where(np.isfinite(slope), slope, 0.0)
