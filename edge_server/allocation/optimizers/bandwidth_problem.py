r"""Joint bandwidth and pruning problem of Liu et al.

Liu, Ratnarajah, Sellathurai, Eldar. Adaptive Model Pruning and Personalization for Federated Learning over Wireless
Networks. https://arxiv.org/abs/2309.01816

    minimise sum_k rho_k  subject to                                                                    (43)
    T_per_k + T_W_k + (1 - rho_k) (c_k + W / (b_k R_k)) <= T_th,   sum_k b_k <= 1,   0 <= b_k, rho_k <= 1

With s_k = T_th - T_per_k - T_W_k (the warm-up that (46) omits is in it) and u_k = W / R_k:

    1 - rho_k = min(1, b_k s_k / (b_k c_k + u_k))                                                       (47), (50)
    b_k = clip((sqrt(s_k u_k / lambda) - u_k) / c_k,  floor_k,  cap_k)                                  (54), complete
    cap_k = min(1, u_k / (s_k - c_k)) if s_k > c_k else 1: more would not be used
    floor_k = (1 - rho_max) u_k / (s_k - (1 - rho_max) c_k): what rho_k <= rho_max needs

Both are at most b_max, the largest share that one device may have; the paper has no such limit, b_max = 1. b_k is a
ramp in x = 1 / sqrt(lambda), a jump where c_k = 0: water-filling finds x exactly. Devices with s_k <= 0 or no rate take
no part. Where the floors do not fit together, the largest are dropped, so that one hopeless device does not cost the
others their floors; `enough_s` is the T_th with which all would fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from edge_server.allocation.optimizers.base import Array, Codes, Mask, clip_figure, column, mask_valid

NEWTON_STEPS, ROUNDING = 60, 1e-12


@dataclass(frozen=True)
class Bandwidth:
    """Input of one round; a column has one entry per device, and a single value applies to all.

    Attributes:
        up_bits_per_s: R_k, rate with the whole uplink; zero for no link.
        compute_s: c_k, seconds of the masked steps on the whole global part; infinite for no clock.
        personal_s: T_per_k, seconds of the steps on the personal part.
        warm_up_s: T_W_k, seconds of the steps that measure importance.
        upload_bits: W, bits of the whole global part.
        threshold_s: T_th, time limit of the round.
        most_pruned: rho_max; 1 for no floor.
        most_share: b_max, maximum share of the uplink per device.
    """

    up_bits_per_s: Array
    compute_s: ArrayLike
    personal_s: ArrayLike
    warm_up_s: ArrayLike
    upload_bits: ArrayLike
    threshold_s: float
    most_pruned: float = 0.95
    most_share: float = 1.0


@dataclass(frozen=True)
class Shares:
    """Allocation: result of the problem.

    Attributes:
        share: b_k, share of the uplink.
        pruned: rho_k, pruning ratio.
        bound: `Bound` of each device.
        multiplier: lambda, increase in the sum of keep ratios per additional uplink.
        gain_per_s: Increase per additional second of T_th, in each device's keep ratio or through the bandwidth that
            it frees.
        gain_per_compute_s: Increase per second less of c_k.
        objective: Sum of rho_k over all devices, including excluded ones.
        feasible: Whether every device with a link and a clock takes part and has its floor.
        enough_s: Smallest T_th that would be feasible.
    """

    share: Array
    pruned: Array
    bound: Codes
    multiplier: float
    gain_per_s: Array
    gain_per_compute_s: Array
    objective: float
    feasible: bool
    enough_s: float


@dataclass(frozen=True)
class BandwidthTerms:
    """Problem in the symbols of the module docstring; excluded devices have s = u = 1, c = 0 and cap 0.

    Attributes:
        slack: s_k, seconds left for steps and upload.
        full: u_k, seconds of the whole upload over the whole uplink.
        compute: c_k, seconds of the masked steps.
        floor: Minimum b_k; zero where it does not fit.
        full_floor: Minimum b_k if the floors of all devices fitted.
        cap: Maximum b_k of each device.
        limited: Devices whose b_k is limited by b_max.
        valid: Devices with valid figures.
        takes_part: Devices with time, a link and a clock.
    """

    slack: Array
    full: Array
    compute: Array
    floor: Array
    full_floor: Array
    cap: Array
    limited: Mask
    valid: Mask
    takes_part: Mask
    feasible: bool
    enough_s: float


def derive_terms(problem: Bandwidth) -> BandwidthTerms:
    """Derive participation, floors and caps of the devices."""
    count = len(problem.up_bits_per_s)
    rate, compute = column(problem.up_bits_per_s, count), column(problem.compute_s, count)
    personal, warm, bits = (column(x, count) for x in (problem.personal_s, problem.warm_up_s, problem.upload_bits))
    threshold, most = clip_figure(problem.threshold_s), problem.most_share
    valid, before, least_keep = (
        mask_valid(rate, compute, personal, warm, bits),
        personal + warm,
        1.0 - problem.most_pruned,
    )
    with np.errstate(all="ignore"):
        full, slack = bits / rate, threshold - before
        able = valid & np.isfinite(compute + before) & np.isfinite(full)
        within = able & (slack > 0)
        slack, full = np.where(within, slack, 1.0), np.where(within, full, 1.0)
        compute = np.where(within, compute, 0.0)
        least = least_keep * full / np.maximum(slack - least_keep * compute, 0.0)
        cap = np.where(slack - compute >= full, full / (slack - compute), 1.0)
    limited = within & (cap > most)
    cap = np.where(within & (full > 0), np.minimum(cap, most), 0.0)  # a device with nothing to send needs no share
    has_floor = within & (least <= 1.0)  # false for NaN: nothing to send, and no time for the steps
    full_floor = floor = np.where(has_floor, np.minimum(least, cap), 0.0)
    has_floor &= least <= most
    feasible = bool(floor.sum() <= 1.0 and has_floor[able].all()) if least_keep else bool(within[able].all())
    if floor.sum() > 1.0:
        rising = np.sort(floor)
        floor = np.where(floor < rising[np.argmax(np.cumsum(rising) > 1.0)], floor, 0.0)
    enough = threshold if feasible else _least_threshold(problem, able, least_keep)
    return BandwidthTerms(slack, full, compute, floor, full_floor, cap, limited, valid, within, feasible, enough)


def _least_threshold(problem: Bandwidth, able: Mask, least_keep: float) -> float:
    """Return the T at which sum_k kept u_k / (T - before_k - kept c_k) = 1.

    The inverse of the sum is concave and increasing, so that Newton steps from below never pass the root.
    """
    count = len(able)
    personal, warm, compute = (
        column(x, count)[able] for x in (problem.personal_s, problem.warm_up_s, problem.compute_s)
    )
    least = personal + warm + least_keep * compute
    needs = least_keep * column(problem.upload_bits, count)[able] / column(problem.up_bits_per_s, count)[able]
    at = float(np.max(least + needs / problem.most_share, initial=0.0))
    least, needs = least[needs > 0], needs[needs > 0]
    at = float(np.nextafter(at, np.inf)) if len(needs) else at  # the addition above may round away the upload time
    for _ in range(NEWTON_STEPS):
        parts = needs / (at - least)
        total = float(parts.sum())
        if total <= 1.0 + ROUNDING:
            break
        at += total * (total - 1.0) / float((parts / (at - least)).sum())
    return at * (1.0 + ROUNDING)
