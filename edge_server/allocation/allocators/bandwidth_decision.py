"""Decision of `bandwidth`: uplink shares and pruning ratios of one round.

s is the seconds of one local iteration on the whole network, corrected by earlier prediction errors; N_v and N_u are
the weights of the personal and of the global part, N those of the network:

    T_per = tau_v s N_v / N,   T_W = s N_u / N for every step of the warm-up,   c = tau_u s N_u / N

or, where masks save no work, T_per = s for every step of all, T_W = c = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from edge_server.allocation.allocators.bandwidth_figures import BandwidthOptions
from edge_server.allocation.allocators.bandwidth_joules import hold_to_joules, spent_joules
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth_marks import CLOSE, Upload, solve_with_marks
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, Shares
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.task_joules import times, with_joules
from edge_server.journal.decision import Decision, DeviceDecision
from shared.protocol.measurements import Cost
from shared.protocol.messages import Value


@dataclass(frozen=True)
class Columns:
    """The problem in columns, one entry a device; seconds, bit/s and bits."""

    step_s: Array
    rate: Array
    compute_s: Array
    before_s: Array
    bits: Array
    problem: Bandwidth


def decide(options: BandwidthOptions, solver: Solver, case: Case) -> Decision:
    """Share the bandwidth out, and say how much each device must prune for its share.

    Args:
        solver: Ours, or the conic one.
        case: What it is decided from.
    """
    if not case.names:
        return Decision()
    asked, shares = solve_columns(options, solver, case, round_columns(options, case))
    if options.equal == "ratio":
        share = np.full(len(asked.rate), 1 / len(asked.rate))
        shares = replace(shares, share=share, multiplier=0.0)
    elif options.equal:
        asked, shares = _equal_shares(options, case, asked, shares)
    is_enough, most = shares.feasible or not np.isfinite(shares.enough_s), case.limits.get("joules", np.inf)
    enough = {} if is_enough else {"deadline_s": float(shares.enough_s) / (1 - options.margin)}
    spent = partial(task_joules, options, case, asked, shares)
    shares, least = hold_to_joules(shares, spent, most, options.most_pruned)
    kept, is_held = 1 - shares.pruned, shares.bound == Bound.ENERGY
    bits = options.upload(case.limits).bits(kept) / np.where(is_held & (kept > 0), kept, 1.0)
    asked = replace(asked, bits=np.where(is_held, bits, asked.bits))
    return Decision(
        devices={
            device: _given(options, case, device, asked, shares, place) for place, device in enumerate(case.names)
        },
        objective=float(shares.objective),
        multiplier=float(shares.multiplier),
        feasible=bool(shares.feasible),
        enough=enough | ({"joules": least} if most < least < np.inf else {}),
    )


def task_joules(options: BandwidthOptions, case: Case, asked: Columns, shares: Shares, kept: Array) -> Array:
    """Return the joules of tasks at what devices keep, at their shares of the uplink."""
    (before, warm, masked), none, every = (options.iterations(case.limits, share) for share in (0.5, 0.0, 1.0))
    steps = np.select([kept <= 0, kept >= 1], [sum(none), sum(every)], before + warm + kept * masked)
    with np.errstate(all="ignore"):
        upload_s = options.upload(case.limits).bits(kept) / (shares.share * asked.rate)
    return spent_joules(case, asked.step_s * steps, upload_s)


def round_columns(options: BandwidthOptions, case: Case) -> Columns:
    """Return what the optimizer is asked at first, when nobody knows the marks."""
    limits = case.limits
    step = np.array(case.column("step_s", np.inf)) * np.array(case.column("compute_error", 1.0))
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    with np.errstate(invalid="ignore"):
        personal_s, warm_up_s, compute_s = (count * step if count else 0 * rate for count in options.iterations(limits))
    bits = np.full(len(rate), options.bits_per_weight * limits["weights_global"])
    threshold_s = (1 - options.margin) * limits["deadline_s"]
    most = options.most_share(len(rate))
    problem = Bandwidth(rate, compute_s, personal_s, warm_up_s, bits, threshold_s, options.most_pruned, most)
    return Columns(step, rate, compute_s, personal_s + warm_up_s, bits, problem)


def solve_columns(options: BandwidthOptions, solver: Solver, case: Case, asked: Columns) -> tuple[Columns, Shares]:
    """Return the optimum, with the bits of every device that its ratio needs where marks count.

    Args:
        solver: Ours, or the conic one.
        case: What it is decided from.
        asked: The problem without marks.
    """
    upload = options.upload(case.limits)
    bits, shares = solve_with_marks(asked.problem, upload, solver)
    problem, kept = replace(asked.problem, upload_bits=bits), 1 - shares.pruned
    with np.errstate(all="ignore"):
        sent = np.where(kept > 0, upload.bits(kept) / kept, bits)
    return replace(asked, problem=problem, bits=sent), shares


def _equal_shares(options: BandwidthOptions, case: Case, asked: Columns, best: Shares) -> tuple[Columns, Shares]:
    """Return the paper's baseline: equal shares, each with the ratio that meets T_th, whatever others could use."""
    upload = options.upload(case.limits)
    kept, gain = kept_at_equal_shares(upload, asked)
    takes_part = ~np.isin(best.bound, (Bound.OUT, Bound.UNKNOWN))
    bound = np.where(takes_part, np.where(kept < 1, Bound.TIME, Bound.FULL), best.bound).astype(np.int8)
    least = 1 - options.most_pruned
    can = np.isfinite(asked.before_s + asked.compute_s) & (asked.rate > 0)
    needs_s = asked.before_s + least * asked.compute_s
    with np.errstate(all="ignore"):
        needs_s += upload.bits(np.full(len(kept), least)) * len(kept) / asked.rate
        bits = np.where(kept > 0, upload.bits(kept) / kept, asked.bits)
    shares = Shares(
        share=np.full(len(kept), 1 / len(kept)),
        pruned=1 - kept,
        bound=bound,
        multiplier=0.0,
        gain_per_s=np.where(bound == Bound.TIME, gain, 0.0),
        gain_per_compute_s=np.where(bound == Bound.TIME, gain * kept, 0.0),
        objective=float((1 - kept).sum()),
        feasible=bool((takes_part & (kept >= least * (1 - CLOSE)))[can].all()),
        enough_s=float(np.max(needs_s[can], initial=0.0)),
    )
    return replace(asked, bits=bits), shares


def kept_at_equal_shares(upload: Upload, asked: Columns) -> tuple[Array, Array]:
    """Return what each device can keep within T_th at a share of 1 / K, and what of it one more second would add."""
    rate = asked.rate / max(1, len(asked.rate))
    return upload.kept_in_time(asked.problem.threshold_s - asked.before_s, asked.compute_s, rate)


def _given(
    options: BandwidthOptions, case: Case, device: str, asked: Columns, shares: Shares, place: int
) -> DeviceDecision:
    figures = case.known(device)
    share, kept = float(shares.share[place]), 1 - float(shares.pruned[place])
    bits = kept * float(asked.bits[place])
    rate, gain = share * float(asked.rate[place]), float(shares.gain_per_s[place])
    values: dict[str, Value] = {"prune": 1 - kept, "share": share}
    told = figures.get("up_bits_per_s")
    if share > 0 and told and told.source != "default":  # who is held to a guess never shows more than the guess
        values["up_bits_per_s"] = share * told.value
    before, warm, masked = options.iterations(case.limits, kept)
    work_s = (before + warm + kept * masked) * float(asked.step_s[place])
    predicted = Cost(
        compute_s=work_s if np.isfinite(work_s) else None,
        upload_s=bits / rate if rate > 0 else None,
        bytes_up=int(bits / 8),
    )
    download = figures.get("download_joules")
    computing = times(figures.get("compute_w"), predicted.compute_s)
    predicted = with_joules(predicted, figures, computing, download.value if download else None)
    return DeviceDecision(
        values=values,
        figures=figures,
        predicted=predicted,
        binding=Bound(int(shares.bound[place])).name.lower(),
        multiplier=gain if np.isfinite(gain) else None,
    )
