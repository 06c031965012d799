"""Bandwidth and pruning of one round: from devices' figures to paper 004's symbols, and back.

s is the seconds of one local iteration on the whole network, put right by its own errors; N_v and N_u are the weights
of the personal and of the global part, of N in all:

    T_per = tau_v s N_v / N,   T_W = s N_u / N for every step of the warm-up,   c = tau_u s N_u / N

or, where masks save no work, T_per = s for every step of all, T_W = c = 0.

What each device would keep if its own figures alone were others, and all else as it is: bandwidth, for each at once.

Deciding once more for every device takes time that grows with the square of the fleet. What the others would do is
known beforehand, though: how much of the uplink they take at every level of the water. That is exact but for marks, of
which only a device's own follow what it keeps. Of few devices those of the others matter; then all is decided again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth import allocation, ramps, solve
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, Shares, Terms, terms
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.optimizers.refilling import refill
from edge_server.journal.decision import Decision, Given
from edge_server.plan.optimizer import BandwidthOptions
from shared.protocol.measurements import Cost
from shared.protocol.messages import Value

INDEX_BITS = 32
TURNS, CLOSE, LEAST_KEPT = 20, 1e-9, 1e-3


@dataclass(frozen=True)
class Asked:
    """The problem in columns, one entry a device; seconds, bit/s and bits."""

    step_s: Array
    rate: Array
    compute_s: Array
    before_s: Array
    bits: Array
    problem: Bandwidth


def decide(options: BandwidthOptions, solver: Solver, case: Case) -> Decision:
    """Share the bandwidth out, and say how much each device must prune for its share."""
    if not case.names:
        return Decision(optimizer="bandwidth", limits=dict(case.limits))
    asked, shares = solved(options, solver, case, asked_for(options, case))
    if options.equal == "ratio":
        share = np.full(len(asked.rate), 1 / len(asked.rate))
        shares = replace(shares, share=share, multiplier=0.0)
    elif options.equal:
        asked, shares = _equal(options, case, asked, shares)
    is_enough = shares.feasible or not np.isfinite(shares.enough_s)
    return Decision(
        optimizer="bandwidth",
        limits=dict(case.limits),
        devices={
            device: _given(options, case, device, asked, shares, place) for place, device in enumerate(case.names)
        },
        objective=float(shares.objective),
        multiplier=float(shares.multiplier),
        feasible=bool(shares.feasible),
        enough={} if is_enough else {"deadline_s": float(shares.enough_s) / (1 - options.margin)},
    )


def asked_for(options: BandwidthOptions, case: Case) -> Asked:
    """Return what the optimizer is asked at first, when nobody knows the marks."""
    limits = case.limits
    step = np.array(case.column("step_s", np.inf)) * np.array(case.column("compute_error", 1.0))
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    with np.errstate(invalid="ignore"):
        personal_s, warm_up_s, compute_s = (count * step if count else 0 * rate for count in options.iterations(limits))
    bits = np.full(len(rate), options.bits_per_weight * limits["weights_global"])
    threshold_s = (1 - options.margin) * limits["deadline_s"]
    problem = Bandwidth(rate, compute_s, personal_s, warm_up_s, bits, threshold_s, options.most_pruned)
    return Asked(step, rate, compute_s, personal_s + warm_up_s, bits, problem)


def solved(options: BandwidthOptions, solver: Solver, case: Case, asked: Asked) -> tuple[Asked, Shares]:
    """Return the optimum, with the marks in the bits of every device where they count: as many as its ratio needs.

    So with biases, which are never pruned: W_k = q N_u + (marks and biases) / (1 - rho_k), solved again and again.
    """
    shares = solve(asked.problem, solver)
    for _ in range(TURNS if options.marks else 0):
        kept = 1 - shares.pruned
        asked = replace(asked, bits=with_marks(options, case, kept))
        shares = solve(replace(asked.problem, upload_bits=asked.bits), solver)
        if np.abs(1 - shares.pruned - kept).max() < CLOSE:
            break
    if 0 < (total := float(shares.share.sum())) < 1:  # all meet T_th with less: what is left makes them faster
        shares = replace(shares, share=shares.share / total)
    problem = replace(asked.problem, upload_bits=asked.bits)
    whole = options.bits_per_weight * case.limits["weights_global"] + 8 * case.limits.get("dense_bytes", 0.0)
    bits = np.where(shares.pruned > 0, asked.bits, whole)  # who sends all of it need not say what
    return replace(asked, problem=problem, bits=bits if options.marks else asked.bits), shares


def with_marks(options: BandwidthOptions, case: Case, kept: Array) -> Array:
    """Return W_k of devices that keep these shares of the weights."""
    weights = case.limits["weights_global"]
    marks = weights * np.minimum(INDEX_BITS, 1 / np.maximum(kept, 1 / INDEX_BITS))
    marks += 8 * case.limits.get("dense_bytes", 0.0) / np.maximum(kept, LEAST_KEPT)
    bits: Array = options.bits_per_weight * weights + marks
    return bits


def _equal(options: BandwidthOptions, case: Case, asked: Asked, best: Shares) -> tuple[Asked, Shares]:
    """Return the paper's baseline: equal shares, each with the ratio that meets T_th, whatever others could use."""
    kept, gain = kept_at_equal_shares(options, case, asked)
    takes_part = ~np.isin(best.bound, (Bound.OUT, Bound.UNKNOWN))
    bound = np.where(takes_part, np.where(kept < 1, Bound.TIME, Bound.FULL), best.bound).astype(np.int8)
    least = 1 - options.most_pruned
    can = np.isfinite(asked.before_s + asked.compute_s) & (asked.rate > 0)
    needs_s = asked.before_s + least * asked.compute_s
    with np.errstate(all="ignore"):
        needs_s += _sent(options, case, np.full(len(kept), least)) * len(kept) / asked.rate
        bits = np.where(kept > 0, _sent(options, case, kept) / kept, asked.bits)
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


def kept_at_equal_shares(options: BandwidthOptions, case: Case, asked: Asked) -> tuple[Array, Array]:
    """Return what each device can keep within T_th at a share of 1 / K, and what of it one more second would add.

    Seconds are kept c + bits / (R / K), and rise along two straight lines: bits are (q + 32) N kept while places of
    weights go up, q N kept + N where a bitmap does, and biases with both; q N and biases where all is kept.
    """
    weights, rate = case.limits["weights_global"], asked.rate / max(1, len(asked.rate))
    dense = 8 * case.limits.get("dense_bytes", 0.0) if options.marks else 0.0
    bitmap, index = (weights, INDEX_BITS * weights) if options.marks else (0.0, 0.0)
    one, slack_s = options.bits_per_weight * weights, asked.problem.threshold_s - asked.before_s
    with np.errstate(all="ignore"):
        by_bitmap, by_index = asked.compute_s + one / rate, asked.compute_s + (one + index) / rate
        kept = (slack_s - (bitmap + dense) / rate) / by_bitmap
        few = (slack_s - dense / rate) / by_index
        has_few = ~(kept >= 1 / INDEX_BITS)
        kept = np.where(has_few, np.minimum(few, 1 / INDEX_BITS), kept) if options.marks else kept
        kept = np.where(slack_s >= asked.compute_s + (one + dense) / rate, 1.0, kept)
        gain = 1 / np.where(has_few & options.marks, by_index, by_bitmap)
    return np.clip(np.nan_to_num(kept, nan=0.0), 0.0, 1.0), np.nan_to_num(gain, posinf=0.0)


def _sent(options: BandwidthOptions, case: Case, kept: Array) -> Array:
    """Return the bits that go up of devices that keep these shares of the weights."""
    weights = case.limits["weights_global"]
    dense = 8 * case.limits.get("dense_bytes", 0.0)
    marks = np.where(kept < 1, weights * np.minimum(1, INDEX_BITS * kept), 0.0) + np.where(kept > 0, dense, 0.0)
    bits: Array = options.bits_per_weight * weights * kept + (marks if options.marks else 0.0)
    return bits


def _given(options: BandwidthOptions, case: Case, device: str, asked: Asked, shares: Shares, place: int) -> Given:
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
    return Given(
        values=values,
        figures=figures,
        predicted=predicted,
        binding=Bound(int(shares.bound[place])).name.lower(),
        multiplier=gain if np.isfinite(gain) else None,
    )


FEW = 24


def kept_alone(options: BandwidthOptions, case: Case, changed: Case) -> dict[str, float]:
    """Return for each device the share of the shared weights that it would keep with its figures of another case.

    Args:
        options: Of the optimizer.
        case: What was decided from.
        changed: The same devices and limits; the figures that each of them would have.
    """
    if not case.names:
        return {}
    other = asked_for(options, changed)
    if options.equal == "latency":
        return _named(case, kept_at_equal_shares(options, changed, other)[0])
    if options.marks and len(case.names) <= FEW:
        return {device: _again(options, case, changed, place) for place, device in enumerate(case.names)}
    asked, _ = solved(options, "numpy", case, asked_for(options, case))
    return _named(case, _kept(options, changed, asked, other))


def _again(options: BandwidthOptions, case: Case, changed: Case, place: int) -> float:
    """Return what one device would keep, by deciding once more."""
    device = case.names[place]
    case = replace(case, figures={**case.figures, device: changed.figures.get(device, {})})
    _, shares = solved(options, "numpy", case, asked_for(options, case))
    return 1 - float(shares.pruned[place])


def _kept(options: BandwidthOptions, changed: Case, asked: Asked, other: Asked) -> Array:
    given = terms(asked.problem)
    others, bits, before = ramps(given), np.asarray(asked.problem.upload_bits), np.full(len(asked.rate), np.nan)
    for _ in range(1 + TURNS * options.marks):
        moved = _with_floors(given, replace(other.problem, upload_bits=bits))
        kept: Array = 1 - allocation(moved, refill(others, ramps(moved), 1.0), 0.0).pruned
        if np.abs(kept - before).max() < CLOSE:
            break
        bits, before = with_marks(options, changed, kept), kept
    return kept


def _with_floors(given: Terms, problem: Bandwidth) -> Terms:
    """Return the terms of each device's other figures, with its floor where those of the others leave room for it."""
    moved = terms(problem)
    fits = given.floor.sum() - given.floor + moved.wanted <= 1.0
    is_easier = (moved.wanted < given.wanted) | (given.wanted == 0)
    has_floor = (given.floor > 0) | (is_easier & fits)
    return replace(moved, floor=np.where(has_floor, moved.wanted, 0.0))


def _named(case: Case, kept: Array) -> dict[str, float]:
    return dict(zip(case.names, kept.tolist(), strict=True))
