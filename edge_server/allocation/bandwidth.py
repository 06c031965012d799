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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from edge_server.allocation.allocator import Allocator, WhatIf
from edge_server.allocation.figures import (
    DeviceFacts,
    Estimate,
    choose_figures,
    error_estimates,
    link_estimates,
    planned_step_s,
    planned_task_s,
)
from edge_server.allocation.inputs import Case, RoundSetting, task_limits
from edge_server.allocation.optimizers.bandwidth import allocation, ramps, solve
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, BandwidthTerms, Shares, terms
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.optimizers.refilling import refill
from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.decision import Decision, Figure, Given
from shared.protocol.measurements import Cost
from shared.protocol.messages import Allocated, Scalar, Value

INDEX_BITS = 32
TURNS, CLOSE, LEAST_KEPT = 20, 1e-9, 1e-3


class BandwidthOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Of `bandwidth`: pruning ratios and shares of the bandwidth of paper 004.

    Attributes:
        most_pruned: rho_max, which no device goes beyond where all can keep to it; 1 for no such bound.
        bits_per_weight: q, bits of a weight in an upload.
        equal: The paper's baseline, every device with an equal share: `latency`: with the ratio that meets the
            deadline; `ratio`: with the ratio that it would have with its best share.
        compute: How the seconds of an iteration depend on its weights: `paper`: in proportion to those that it trains;
            `dense`: not at all, as it is where masks save bytes and no work.
        marks: Whether what goes up beside the weights counts: which they are (a bit of each, or 32 of each that is
            held), and biases, which are never pruned.
        margin: Share of the deadline that is kept for what is not counted.
        step_s: Time of a local iteration on a device that has measured nothing.
    """

    most_pruned: float = 0.95
    bits_per_weight: float = 32.0
    compute: Literal["paper", "dense"] = "paper"
    marks: bool = True
    margin: float = 0.0
    equal: Literal["", "latency", "ratio"] = ""
    step_s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bits_per_weight=self.bits_per_weight, step_s=self.step_s)
        self.require(below=1.0, most_pruned=self.most_pruned)
        if not 0 <= self.margin < 1:
            raise ValueError("options.margin must be in [0, 1)")

    def iterations(self, limits: Mapping[str, float], kept: float = 0.5) -> tuple[float, float, float]:
        """Return the iterations of the personal part, of the warm-up and of the global part, in whole networks.

        Who keeps all of the global part needs no warm-up, who keeps nothing of it takes no steps on it.
        """
        part = limits["weights_global"] / limits["weights"]
        personal, ours = limits["personal_steps"], limits["global_steps"] if kept > 0 else 0.0
        warm = limits["warmup_steps"] if 0 < kept < 1 else 0.0
        if self.compute == "dense":
            both = min(personal, ours) if limits.get("updates_at_once") else 0.0
            return personal + warm + ours - both, 0.0, 0.0
        return personal * (1 - part), warm * part, ours * part


STEPS: Mapping[str, int] = {"personal_steps": 5, "global_steps": 5, "warmup_steps": 1, "updates_at_once": 0}
"""Of paper 004's method, where the plan's algorithm does not say: tau_v, tau_u, those of the warm-up; and whether steps
on both parts are the same ones."""

LEAST = 1e-9
"""Iterations of a task that has none."""


def limits(options: BandwidthOptions, setting: RoundSetting) -> dict[str, float]:
    """Return seconds of a task, the sizes of the model's parts, and the iterations on each."""
    sizes = setting.sizes
    told = {**setting.plan.algorithm.options, **sizes.facts}
    iterations = {name: _count(told.get(name), usual) for name, usual in STEPS.items()}
    parts = {"weights_global": float(sizes.shared), "dense_bytes": float(sizes.dense_bytes)}
    return task_limits(setting, options.deadline_s) | iterations | parts


def _count(told: Scalar | None, usual: int) -> float:
    return float(told) if isinstance(told, int | float) and told >= 0 else float(usual)


def figures(options: BandwidthOptions, device: DeviceFacts, limits: Mapping[str, float]) -> dict[str, Figure]:
    """Return a device's link and what a local iteration costs it.

    Args:
        options: Of the optimizer.
        device: What is known of it.
        limits: Of the round.
    """
    estimates = link_estimates(device, options)
    estimates["step_s"] = _step_estimate(device, options, limits)
    if options.calibrated:
        estimates |= error_estimates(device, steps=True)
    return choose_figures(estimates, device.last, options)


def _step_estimate(device: DeviceFacts, options: BandwidthOptions, limits: Mapping[str, float]) -> Estimate:
    """Return what is known of one local iteration; a task's seconds are divided among its iterations."""
    known, task = device.known, device.task
    measured = known.mu_s
    if measured is None and known.cycles_per_weight and known.f_hertz and known.weights:
        measured = known.cycles_per_weight * known.weights / known.f_hertz
    if measured is None and task and task.cost.compute_s:
        pruned = Allocated.of(task.given.values).prune if task.given else None
        kept = 1 - (pruned or 0.0)
        before, warm, masked = options.iterations(limits, kept)
        measured = task.cost.compute_s / max(LEAST, before + warm + kept * masked)
    task_s, whole = planned_task_s(device), max(LEAST, sum(options.iterations(limits)))
    profile = task_s / whole if task_s else planned_step_s(device, limits["weights"])
    return Estimate(measured, profile=profile, default=options.step_s)


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
        options: Of the optimizer.
        solver: Ours, or the conic one.
        case: What it is decided from.
    """
    if not case.names:
        return Decision()
    asked, shares = solve_with_marks(options, solver, case, round_columns(options, case))
    if options.equal == "ratio":
        share = np.full(len(asked.rate), 1 / len(asked.rate))
        shares = replace(shares, share=share, multiplier=0.0)
    elif options.equal:
        asked, shares = _equal_shares(options, case, asked, shares)
    is_enough = shares.feasible or not np.isfinite(shares.enough_s)
    return Decision(
        devices={
            device: _given(options, case, device, asked, shares, place) for place, device in enumerate(case.names)
        },
        objective=float(shares.objective),
        multiplier=float(shares.multiplier),
        feasible=bool(shares.feasible),
        enough={} if is_enough else {"deadline_s": float(shares.enough_s) / (1 - options.margin)},
    )


def round_columns(options: BandwidthOptions, case: Case) -> Columns:
    """Return what the optimizer is asked at first, when nobody knows the marks."""
    limits = case.limits
    step = np.array(case.column("step_s", np.inf)) * np.array(case.column("compute_error", 1.0))
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    with np.errstate(invalid="ignore"):
        personal_s, warm_up_s, compute_s = (count * step if count else 0 * rate for count in options.iterations(limits))
    bits = np.full(len(rate), options.bits_per_weight * limits["weights_global"])
    threshold_s = (1 - options.margin) * limits["deadline_s"]
    problem = Bandwidth(rate, compute_s, personal_s, warm_up_s, bits, threshold_s, options.most_pruned)
    return Columns(step, rate, compute_s, personal_s + warm_up_s, bits, problem)


def solve_with_marks(options: BandwidthOptions, solver: Solver, case: Case, asked: Columns) -> tuple[Columns, Shares]:
    """Return the optimum, with the marks in the bits of every device where they count: as many as its ratio needs.

    So with biases, which are never pruned: W_k = q N_u + (marks and biases) / (1 - rho_k), solved again and again.

    Args:
        options: Of the optimizer.
        solver: Ours, or the conic one.
        case: What it is decided from.
        asked: The problem without marks.
    """
    shares = solve(asked.problem, solver)
    for _ in range(TURNS if options.marks else 0):
        kept = 1 - shares.pruned
        asked = replace(asked, bits=marked_bits(options, case, kept))
        shares = solve(replace(asked.problem, upload_bits=asked.bits), solver)
        if np.abs(1 - shares.pruned - kept).max() < CLOSE:
            break
    if 0 < (total := float(shares.share.sum())) < 1:  # all meet T_th with less: what is left makes them faster
        shares = replace(shares, share=shares.share / total)
    problem = replace(asked.problem, upload_bits=asked.bits)
    whole = options.bits_per_weight * case.limits["weights_global"] + 8 * case.limits.get("dense_bytes", 0.0)
    bits = np.where(shares.pruned > 0, asked.bits, whole)  # who sends all of it need not say what
    return replace(asked, problem=problem, bits=bits if options.marks else asked.bits), shares


def marked_bits(options: BandwidthOptions, case: Case, kept: Array) -> Array:
    """Return W_k of devices that keep these shares of the weights.

    Args:
        options: Of the optimizer.
        case: What it is decided from.
        kept: 1 - rho_k, a column.
    """
    weights = case.limits["weights_global"]
    marks = weights * np.minimum(INDEX_BITS, 1 / np.maximum(kept, 1 / INDEX_BITS))
    marks += 8 * case.limits.get("dense_bytes", 0.0) / np.maximum(kept, LEAST_KEPT)
    bits: Array = options.bits_per_weight * weights + marks
    return bits


def _equal_shares(options: BandwidthOptions, case: Case, asked: Columns, best: Shares) -> tuple[Columns, Shares]:
    """Return the paper's baseline: equal shares, each with the ratio that meets T_th, whatever others could use."""
    kept, gain = kept_at_equal_shares(options, case, asked)
    takes_part = ~np.isin(best.bound, (Bound.OUT, Bound.UNKNOWN))
    bound = np.where(takes_part, np.where(kept < 1, Bound.TIME, Bound.FULL), best.bound).astype(np.int8)
    least = 1 - options.most_pruned
    can = np.isfinite(asked.before_s + asked.compute_s) & (asked.rate > 0)
    needs_s = asked.before_s + least * asked.compute_s
    with np.errstate(all="ignore"):
        needs_s += _sent_bits(options, case, np.full(len(kept), least)) * len(kept) / asked.rate
        bits = np.where(kept > 0, _sent_bits(options, case, kept) / kept, asked.bits)
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


def kept_at_equal_shares(options: BandwidthOptions, case: Case, asked: Columns) -> tuple[Array, Array]:
    """Return what each device can keep within T_th at a share of 1 / K, and what of it one more second would add.

    Seconds are kept c + bits / (R / K), and rise along two straight lines: bits are (q + 32) N kept while places of
    weights go up, q N kept + N where a bitmap does, and biases with both; q N and biases where all is kept.

    Args:
        options: Of the optimizer.
        case: What it is decided from.
        asked: The problem in columns.
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


def _sent_bits(options: BandwidthOptions, case: Case, kept: Array) -> Array:
    """Return the bits that go up of devices that keep these shares of the weights."""
    weights = case.limits["weights_global"]
    dense = 8 * case.limits.get("dense_bytes", 0.0)
    marks = np.where(kept < 1, weights * np.minimum(1, INDEX_BITS * kept), 0.0) + np.where(kept > 0, dense, 0.0)
    bits: Array = options.bits_per_weight * weights * kept + (marks if options.marks else 0.0)
    return bits


def _given(options: BandwidthOptions, case: Case, device: str, asked: Columns, shares: Shares, place: int) -> Given:
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
    other = round_columns(options, changed)
    if options.equal == "latency":
        return _named(case, kept_at_equal_shares(options, changed, other)[0])
    if options.marks and len(case.names) <= FEW:
        return {device: _decided_again(options, case, changed, place) for place, device in enumerate(case.names)}
    asked, _ = solve_with_marks(options, "numpy", case, round_columns(options, case))
    return _named(case, _refilled(options, changed, asked, other))


def _decided_again(options: BandwidthOptions, case: Case, changed: Case, place: int) -> float:
    """Return what one device would keep, by deciding once more."""
    device = case.names[place]
    case = replace(case, figures={**case.figures, device: changed.figures.get(device, {})})
    _, shares = solve_with_marks(options, "numpy", case, round_columns(options, case))
    return 1 - float(shares.pruned[place])


def _refilled(options: BandwidthOptions, changed: Case, asked: Columns, other: Columns) -> Array:
    given = terms(asked.problem)
    others, bits, before = ramps(given), np.asarray(asked.problem.upload_bits), np.full(len(asked.rate), np.nan)
    for _ in range(1 + TURNS * options.marks):
        moved = _with_floors(given, replace(other.problem, upload_bits=bits))
        kept: Array = 1 - allocation(moved, refill(others, ramps(moved), 1.0), 0.0).pruned
        if np.abs(kept - before).max() < CLOSE:
            break
        bits, before = marked_bits(options, changed, kept), kept
    return kept


def _with_floors(given: BandwidthTerms, problem: Bandwidth) -> BandwidthTerms:
    """Return the terms of each device's other figures, with its floor where those of the others leave room for it."""
    moved = terms(problem)
    fits = given.floor.sum() - given.floor + moved.wanted <= 1.0
    is_easier = (moved.wanted < given.wanted) | (given.wanted == 0)
    has_floor = (given.floor > 0) | (is_easier & fits)
    return replace(moved, floor=np.where(has_floor, moved.wanted, 0.0))


def _named(case: Case, kept: Array) -> dict[str, float]:
    return dict(zip(case.names, kept.tolist(), strict=True))


BANDWIDTH = Allocator(
    options=BandwidthOptions,
    decides=("prune", "share", "up_bits_per_s"),
    decide=decide,
    limits=limits,
    figures=figures,
    what_if=WhatIf(clock="step_s", kept=kept_alone),
    solvers=("numpy", "cvxpy"),
)
