"""Ask `edge_server.optimizers.bandwidth` for one round: from devices' figures to paper 004's symbols and back.

s is the seconds of one local iteration on the whole network, put right by its own errors; N_v and N_u are the weights
of the personal and of the global part, of N in all:

    T_per = tau_v s N_v / N,   T_W = s N_u / N for every step of the warm-up,   c = tau_u s N_u / N

or, where masks save no work, T_per = s for every step of all, T_W = c = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge_server.deciding.case import Case
from edge_server.decision import Decision, Figure, Given
from edge_server.optimizers.bandwidth import Bandwidth, Shares, solve
from edge_server.optimizers.base import Array, Bound, Solver
from edge_server.trial.optimizer_plan import BandwidthOptions
from shared.measures import Cost
from shared.messages import Value

INDEX_BITS = 32
TURNS, CLOSE, LEAST_KEPT = 20, 1e-9, 1e-3


@dataclass(frozen=True)
class Asked:
    """The problem in columns, one entry a device; seconds, bit/s and bits."""

    rate: Array
    compute_s: Array
    before_s: Array
    bits: Array
    problem: Bandwidth


def decide(options: BandwidthOptions, solver: Solver, case: Case) -> Decision:
    """Share the bandwidth out, and say how much each device must prune for its share."""
    if not case.names:
        return Decision(optimizer="bandwidth", limits=dict(case.limits))
    asked = _asked(options, case)
    asked, shares = _solved(options, solver, case, asked)
    if options.equal:
        shares = _equal(asked, shares, keeps_ratio=options.equal == "ratio")
    is_enough = shares.feasible or not np.isfinite(shares.enough_s)
    return Decision(
        optimizer="bandwidth",
        limits=dict(case.limits),
        devices={device: _given(case.known(device), asked, shares, place) for place, device in enumerate(case.names)},
        objective=float(shares.objective),
        multiplier=float(shares.multiplier),
        feasible=bool(shares.feasible),
        enough={} if is_enough else {"deadline_s": float(shares.enough_s)},
    )


def _asked(options: BandwidthOptions, case: Case) -> Asked:
    limits = case.limits
    step = np.array(case.column("step_s", np.inf)) * np.array(case.column("compute_error", 1.0))
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    with np.errstate(invalid="ignore"):
        personal_s, warm_up_s, compute_s = (count * step if count else 0 * rate for count in options.iterations(limits))
    bits = np.full(len(rate), options.bits_per_weight * limits["weights_global"])
    threshold_s = (1 - options.margin) * limits["deadline_s"]
    problem = Bandwidth(rate, compute_s, personal_s, warm_up_s, bits, threshold_s, options.most_pruned)
    return Asked(rate, compute_s, personal_s + warm_up_s, bits, problem)


def _solved(options: BandwidthOptions, solver: Solver, case: Case, asked: Asked) -> tuple[Asked, Shares]:
    """Return the optimum, with the marks in the bits of every device where they count: as many as its ratio needs.

    So with biases, which are never pruned: W_k = q N_u + (marks and biases) / (1 - rho_k), solved again and again.
    """
    shares = solve(asked.problem, solver)
    for _ in range(TURNS if options.marks else 0):
        kept, weights = 1 - shares.pruned, case.limits["weights_global"]
        marks = weights * np.minimum(INDEX_BITS, 1 / np.maximum(kept, 1 / INDEX_BITS))
        marks += 8 * case.limits.get("dense_bytes", 0.0) / np.maximum(kept, LEAST_KEPT)
        asked = replace(asked, bits=options.bits_per_weight * weights + marks)
        shares = solve(replace(asked.problem, upload_bits=asked.bits), solver)
        if np.abs(1 - shares.pruned - kept).max() < CLOSE:
            break
    if 0 < (total := float(shares.share.sum())) < 1:  # all meet T_th with less: what is left makes them faster
        shares = replace(shares, share=shares.share / total)
    problem = replace(asked.problem, upload_bits=asked.bits)
    whole = options.bits_per_weight * case.limits["weights_global"] + 8 * case.limits.get("dense_bytes", 0.0)
    bits = np.where(shares.pruned > 0, asked.bits, whole)  # who sends all of it need not say what
    return replace(asked, problem=problem, bits=bits if options.marks else asked.bits), shares


def _equal(asked: Asked, best: Shares, *, keeps_ratio: bool) -> Shares:
    """Return the paper's baseline: equal shares, with the ratios that meet T_th, or with those of the best shares."""
    share = np.full(len(asked.rate), 1 / len(asked.rate))
    pruned = best.pruned
    if not keeps_ratio:
        with np.errstate(all="ignore"):
            whole_s = asked.compute_s + asked.bits / (share * asked.rate)
            slack_s = asked.problem.threshold_s - asked.before_s
            pruned = np.clip(np.nan_to_num(1 - slack_s / whole_s, nan=1.0), 0.0, 1.0)
    return replace(best, share=share, pruned=pruned, objective=float(pruned.sum()), multiplier=0.0)


def _given(figures: dict[str, Figure], asked: Asked, shares: Shares, place: int) -> Given:
    share, kept = float(shares.share[place]), 1 - float(shares.pruned[place])
    bits = kept * float(asked.bits[place])
    rate, gain = share * float(asked.rate[place]), float(shares.gain_per_s[place])
    values: dict[str, Value] = {"prune": 1 - kept, "share": share}
    told = figures.get("up_bits_per_s")
    if share > 0 and told and told.source != "default":  # who is held to a guess never shows more than the guess
        values["up_bits_per_s"] = share * told.value
    work_s = float(asked.before_s[place]) + kept * float(asked.compute_s[place])
    predicted = Cost(
        compute_s=work_s if np.isfinite(work_s) else None,
        upload_s=bits / rate if rate > 0 else None,
        bytes_up=int(bits / 8),
    )
    return Given(
        values=values,
        figures=figures,
        predicted=predicted,
        binding=Bound(int(shares.bound[place])).name.lower(),
        multiplier=gain if np.isfinite(gain) else None,
    )
