"""Allocator `bandwidth`: uplink share and pruning ratio of each device for one round.

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
from edge_server.allocation.allocators.bandwidth_joules import limit_joules, predict_joules
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth_marks import CLOSE, Upload, solve_with_marks
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, Shares
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.task_joules import add_joules, scale_figure
from edge_server.journal.decision import Decision, DeviceDecision
from shared.protocol.measurements import Cost
from shared.protocol.messages import Value


@dataclass(frozen=True)
class Columns:
    """Input of the problem in columns, one entry per device; seconds, bit/s and bits."""

    step_s: Array
    rate: Array
    compute_s: Array
    before_s: Array
    bits: Array
    problem: Bandwidth


def decide(options: BandwidthOptions, solver: Solver, case: Case) -> Decision:
    """Decide each device's share of the uplink and pruning ratio."""
    if not case.names:
        return Decision()
    columns, shares = solve_columns(options, solver, case, round_columns(options, case))
    if options.equal == "ratio":
        share = np.full(len(columns.rate), 1 / len(columns.rate))
        shares = replace(shares, share=share, multiplier=0.0)
    elif options.equal:
        columns, shares = _equal_shares(options, case, columns, shares)
    is_enough, most = shares.feasible or not np.isfinite(shares.enough_s), case.limits.get("joules", np.inf)
    enough = {} if is_enough else {"deadline_s": float(shares.enough_s) / (1 - options.margin)}
    joules_of_keep = partial(task_joules, options, case, columns, shares)
    shares, least = limit_joules(shares, joules_of_keep, most, options.most_pruned)
    keep, is_held = 1 - shares.pruned, shares.bound == Bound.ENERGY
    bits = options.upload(case.limits).bits(keep) / np.where(is_held & (keep > 0), keep, 1.0)
    columns = replace(columns, bits=np.where(is_held, bits, columns.bits))
    return Decision(
        devices={
            device: _device_decision(options, case, device, columns, shares, place)
            for place, device in enumerate(case.names)
        },
        objective=float(shares.objective),
        multiplier=float(shares.multiplier),
        feasible=bool(shares.feasible),
        enough=enough | ({"joules": least} if most < least < np.inf else {}),
    )


def task_joules(options: BandwidthOptions, case: Case, columns: Columns, shares: Shares, keep: Array) -> Array:
    """Return the joules of tasks at given keep ratios, with the shares of the uplink fixed."""
    (before, warm, masked), none, every = (options.iterations(case.limits, share) for share in (0.5, 0.0, 1.0))
    steps = np.select([keep <= 0, keep >= 1], [sum(none), sum(every)], before + warm + keep * masked)
    with np.errstate(all="ignore"):
        upload_s = options.upload(case.limits).bits(keep) / (shares.share * columns.rate)
    return predict_joules(case, columns.step_s * steps, upload_s)


def round_columns(options: BandwidthOptions, case: Case) -> Columns:
    """Build the problem without marks, which depend on its solution."""
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


def solve_columns(options: BandwidthOptions, solver: Solver, case: Case, columns: Columns) -> tuple[Columns, Shares]:
    """Solve the problem; also return the columns with the upload bits at the optimum, marks included."""
    upload = options.upload(case.limits)
    bits, shares = solve_with_marks(columns.problem, upload, solver)
    problem, keep = replace(columns.problem, upload_bits=bits), 1 - shares.pruned
    with np.errstate(all="ignore"):
        sent = np.where(keep > 0, upload.bits(keep) / keep, bits)
    return replace(columns, problem=problem, bits=sent), shares


def _equal_shares(options: BandwidthOptions, case: Case, columns: Columns, best: Shares) -> tuple[Columns, Shares]:
    """Return the paper's baseline: equal shares, each with the ratio that meets T_th."""
    upload = options.upload(case.limits)
    keep, gain = keep_at_equal_shares(upload, columns)
    takes_part = ~np.isin(best.bound, (Bound.OUT, Bound.UNKNOWN))
    bound = np.where(takes_part, np.where(keep < 1, Bound.TIME, Bound.FULL), best.bound).astype(np.int8)
    least = 1 - options.most_pruned
    can = np.isfinite(columns.before_s + columns.compute_s) & (columns.rate > 0)
    needs_s = columns.before_s + least * columns.compute_s
    with np.errstate(all="ignore"):
        needs_s += upload.bits(np.full(len(keep), least)) * len(keep) / columns.rate
        bits = np.where(keep > 0, upload.bits(keep) / keep, columns.bits)
    shares = Shares(
        share=np.full(len(keep), 1 / len(keep)),
        pruned=1 - keep,
        bound=bound,
        multiplier=0.0,
        gain_per_s=np.where(bound == Bound.TIME, gain, 0.0),
        gain_per_compute_s=np.where(bound == Bound.TIME, gain * keep, 0.0),
        objective=float((1 - keep).sum()),
        feasible=bool((takes_part & (keep >= least * (1 - CLOSE)))[can].all()),
        enough_s=float(np.max(needs_s[can], initial=0.0)),
    )
    return replace(columns, bits=bits), shares


def keep_at_equal_shares(upload: Upload, columns: Columns) -> tuple[Array, Array]:
    """Return each device's keep ratio within T_th at a share of 1 / K, and its gain per second."""
    rate = columns.rate / max(1, len(columns.rate))
    return upload.kept_in_time(columns.problem.threshold_s - columns.before_s, columns.compute_s, rate)


def _device_decision(
    options: BandwidthOptions, case: Case, device: str, columns: Columns, shares: Shares, place: int
) -> DeviceDecision:
    figures = case.figures_of(device)
    share, keep = float(shares.share[place]), 1 - float(shares.pruned[place])
    bits = keep * float(columns.bits[place])
    rate, gain = share * float(columns.rate[place]), float(shares.gain_per_s[place])
    values: dict[str, Value] = {"prune": 1 - keep, "share": share}
    uplink = figures.get("up_bits_per_s")
    # No limit at a guessed rate: the device could never show that its link is faster.
    if share > 0 and uplink and uplink.source != "default":
        values["up_bits_per_s"] = share * uplink.value
    before, warm, masked = options.iterations(case.limits, keep)
    work_s = (before + warm + keep * masked) * float(columns.step_s[place])
    predicted = Cost(
        compute_s=work_s if np.isfinite(work_s) else None,
        upload_s=bits / rate if rate > 0 else None,
        bytes_up=int(bits / 8),
    )
    download = figures.get("download_joules")
    computing = scale_figure(figures.get("compute_w"), predicted.compute_s)
    predicted = add_joules(predicted, figures, computing, download.value if download else None)
    return DeviceDecision(
        values=values,
        figures=figures,
        predicted=predicted,
        binding=Bound(int(shares.bound[place])).name.lower(),
        multiplier=gain if np.isfinite(gain) else None,
    )
