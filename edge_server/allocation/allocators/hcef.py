"""Allocator `hcef`: local steps and compression of one round (P2), with baselines.

P2 takes the bytes of an update to be in proportion to theta. In reality an entry of a sparse change costs more the
fewer there are, because its position travels too. With beta(theta), the share of the whole model's bytes that an update
really takes, and o = beta(theta) / theta at the theta of the last turn, the decision uses o nu_n in place of nu_n,
starting with the largest o. The device finally sends the largest theta whose bytes fit into the seconds of the last
turn. Deadlines and joules therefore hold for real bytes.

    CEF: rho = theta = 1.   CEF-F: theta = 1, P2.2.   CEF-C: rho = 1, P2.1.   MLL-SGD: theta = 1, rho_n = min mu / mu_n

(T. Castiglia, A. Das, S. Patterson, "Multi-Level Local SGD", ICLR 2021, https://arxiv.org/abs/2007.13819; HCEF's own
formula for it adds up to one over all devices, and follows joules in place of seconds.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from edge_server.allocation.allocators.hcef_figures import (
    MOMENTS,
    HcefOptions,
    capped_mean,
)
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers import hcef, hcef_joint
from edge_server.allocation.optimizers.base import Array, Bound, Solver
from edge_server.allocation.optimizers.hcef_problem import TIGHT, Control, Hcef, build_control, derive_terms
from edge_server.allocation.task_joules import add_joules, scale_figure
from edge_server.journal.decision import Decision, DeviceDecision
from shared.protocol.measurements import Cost

STEPS, SENT = "steps", "sent"
"""Names of the values rho and theta."""
TURNS = 3
"""Number of decisions, each with the bytes of the previous one."""
NAMES = {Bound.INTERIOR: "round_joules", Bound.FLOOR: "least"}
"""Names of bounds whose default names refer to bandwidth."""


@dataclass(frozen=True)
class HcefColumns:
    """Input of a round in columns, one entry per device; seconds, joules, watts.

    Attributes:
        step_s: mu_n.
        whole_s: nu_n, seconds to upload all of the model.
        step_joules: alpha_n.
        upload_w: p_n.
        room_s: D_n minus `besides_s`.
        besides_s, besides_joules: Costs that no decision changes: the download and the gradients for estimates.
        round_joules: E minus `besides_joules` of all devices.
        shares: Values of theta with known update bytes, ascending; the last is 1.
        sizes: Update bytes at `shares`, not decreasing.
        tau: Local steps of a round at rho = 1.
        gradients: M, gradients per estimate.
        moments: sigma^2 and G^2, averaged over the devices that reported them.
    """

    step_s: Array
    whole_s: Array
    step_joules: Array
    upload_w: Array
    room_s: Array
    besides_s: Array
    besides_joules: Array
    download_s: Array
    round_joules: float
    shares: Array
    sizes: Array
    tau: int
    gradients: int
    moments: tuple[float, float]

    def byte_share(self, sent: Array) -> Array:
        """Return beta(theta), the share of a whole update's bytes."""
        share: Array = np.interp(sent, self.shares, self.sizes / self.sizes[-1])
        return share

    def sent_in(self, byte_share: Array) -> Array:
        """Return the largest theta whose update fits into a share of a whole update's bytes."""
        rises = np.append(True, np.diff(self.sizes) > 0)
        share: Array = np.interp(byte_share, self.sizes[rises] / self.sizes[-1], self.shares[rises])
        return np.where(byte_share >= 1, 1.0, share)


def decide(options: HcefOptions, solver: Solver, case: Case) -> Decision:
    """Decide rho and theta of every device, by HCEF or one of its baselines."""
    if not case.names:
        return Decision()
    columns = round_columns(options, case)
    control, sent = _solve_with_overhead(options, solver, columns)
    noise, bend = sum(columns.moments), options.w_add * columns.moments[1]
    least_s, least_joules = _floor_costs(options, columns, control)
    is_met = ~np.isfinite(least_s) | (least_s <= columns.room_s)
    feasible = bool(is_met.all()) and float(least_joules.sum()) <= columns.round_joules
    return Decision(
        devices=dict(_device_decisions(options, case, columns, control, sent)),
        objective=float(((2 - sent) * control.steps * noise + bend * (1 - control.steps) ** 2).sum()),
        multiplier=control.multiplier,
        feasible=feasible,
        enough={} if feasible else _sufficient_limits(case, columns, least_s, least_joules),
    )


def round_columns(options: HcefOptions, case: Case) -> HcefColumns:
    """Build a round's columns from its case."""
    limits, gradients = case.limits, case.limits["gradients"]
    shares, sizes = (np.array(part, np.float64) for part in zip(*case.ladder, strict=True))
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    down = np.array(case.column("down_bits_per_s", math.inf))
    step_s, step_joules = np.array(case.column("step_s", math.inf)), np.array(case.column("step_joules", 0.0))
    with np.errstate(all="ignore"):
        whole_s, download_s = 8 * sizes[-1] / rate, 8 * limits.get("download_bytes", limits["model_bytes"]) / down
        besides_s = download_s + (gradients * step_s if gradients else 0.0)
        room_s = np.array(case.column("deadline_s", limits["deadline_s"])) - besides_s
        besides_joules = _zero_if_invalid(gradients * step_joules + np.array(case.column("download_joules", 0.0)))
    return HcefColumns(
        step_s=step_s,
        whole_s=whole_s,
        step_joules=step_joules,
        upload_w=np.array(case.column("upload_w", 0.0)),
        room_s=np.where(np.isnan(room_s), 0.0, room_s),
        besides_s=besides_s,
        besides_joules=besides_joules,
        download_s=download_s,
        round_joules=limits.get("round_joules", math.inf) - float(besides_joules.sum()),
        shares=shares,
        sizes=sizes,
        tau=int(limits["local_steps"]),
        gradients=int(gradients),
        moments=_pool_moments(options, case),
    )


def _zero_if_invalid(column: Array) -> Array:
    """Replace invalid amounts by zero, so that no report makes a decision fail."""
    return np.where(np.isfinite(column) & (column > 0), column, 0.0)


def _pool_moments(options: HcefOptions, case: Case) -> tuple[float, float]:
    """Return sigma^2 and G^2 averaged over the devices that reported both; those of the options if there are none."""
    reported = [[case.figures.get(device, {}).get(name) for name in MOMENTS] for device in case.names]
    pairs = [(sigma2.value, g2.value) for sigma2, g2 in reported if sigma2 and g2]
    valid = [pair for pair in pairs if all(0 <= moment < math.inf for moment in pair)]
    if not valid:
        return options.sigma2, options.g2
    sigma2, g2 = (capped_mean(moment) for moment in zip(*valid, strict=True))
    return sigma2, g2


def build_problem(options: HcefOptions, columns: HcefColumns, overhead: Array) -> Hcef:
    """Build P2; `overhead` scales nu_n to the real bytes per entry."""
    all_sent = options.baseline in ("cef", "cef_f", "mll_sgd") or columns.sizes[0] >= columns.sizes[-1]
    return Hcef(
        mu_s=columns.step_s,
        nu_s=columns.whole_s * overhead,
        alpha_joules=columns.step_joules,
        tx_w=columns.upload_w,
        deadline_s=np.maximum(columns.room_s, 0.0),
        energy_joules=columns.round_joules * (1 - TIGHT),  # rounding must not exceed a budget
        tau=columns.tau,
        sigma2=columns.moments[0],
        g2=columns.moments[1],
        least_steps=_least_steps(options, columns.tau),
        least_sent=1.0 if all_sent else options.theta_min,
        weight_add=options.w_add,
    )


def _least_steps(options: HcefOptions, tau: int) -> float:
    if options.baseline in ("cef", "cef_c"):
        return 1.0
    return max(options.rho_min, 1 / tau) if options.whole_steps else options.rho_min


def _solve_with_overhead(options: HcefOptions, solver: Solver, columns: HcefColumns) -> tuple[Control, Array]:
    """Return the allocation, and theta for the real bytes."""
    overhead = np.full(len(columns.step_s), columns.sizes[0] / columns.sizes[-1] / columns.shares[0])
    problem = build_problem(options, columns, overhead)
    if problem.least_sent == 1:
        control = _solve(options, solver, build_problem(options, columns, np.ones(len(overhead))))
        return control, control.sent
    for _ in range(TURNS):
        control = _solve(options, solver, replace(problem, nu_s=columns.whole_s * overhead))
        sent = np.maximum(columns.sent_in(control.sent * overhead), options.theta_min)
        overhead = columns.byte_share(sent) / sent
    return control, sent


def _solve(options: HcefOptions, solver: Solver, problem: Hcef) -> Control:
    if options.baseline == "mll_sgd":
        fastest = float(np.min(problem.mu_s[np.isfinite(problem.mu_s)], initial=math.inf))
        with np.errstate(all="ignore"):
            steps = np.where(problem.mu_s > 0, fastest / problem.mu_s, 1.0)
        steps = np.clip(np.nan_to_num(steps, nan=0.0), problem.least_steps, 1.0)
        return build_control(derive_terms(problem), (steps, np.ones(len(steps))), 0.0)
    if options.joint is not False and options.baseline == "hcef" and solver == "numpy" and problem.least_sent < 1:
        control = hcef_joint.solve(problem)
    else:
        control = hcef.solve(problem, options.start, solver)
    return hcef.round_steps(derive_terms(problem), problem.tau, control) if options.whole_steps else control


def _floor_costs(options: HcefOptions, columns: HcefColumns, control: Control) -> tuple[Array, Array]:
    """Return the seconds and joules of the smallest allowed values; fixed values count in full."""
    problem = build_problem(options, columns, np.ones(len(columns.step_s)))
    steps = control.steps if options.baseline == "mll_sgd" else np.full(len(control.steps), problem.least_steps)
    upload_s = columns.byte_share(np.full(len(steps), problem.least_sent)) * columns.whole_s
    with np.errstate(all="ignore"):
        least_s = columns.tau * steps * columns.step_s + upload_s
        joules = _zero_if_invalid(columns.tau * steps * columns.step_joules + upload_s * columns.upload_w)
    return least_s, joules


def _sufficient_limits(case: Case, columns: HcefColumns, least_s: Array, least_joules: Array) -> dict[str, float]:
    """Return the smallest sufficient value of each limit that is too low, and of the budget behind it.

    A budget pays for estimates only in the rounds that have them.
    """
    limits, is_short = case.limits, float(least_joules.sum()) > columns.round_joules
    late = (columns.room_s < least_s) & np.isfinite(least_s)
    rounds_left, gradients_left = limits.get("rounds_left", 1.0), limits.get("gradients_left", 0.0)
    with np.errstate(all="ignore"):
        run_s = rounds_left * (least_s + columns.download_s) + (
            gradients_left * columns.step_s if gradients_left else 0.0
        )
    estimate_joules = _zero_if_invalid(columns.gradients * columns.step_joules)
    every_joules = least_joules + columns.besides_joules - estimate_joules
    run_joules = rounds_left * every_joules + gradients_left * _zero_if_invalid(columns.step_joules)
    sufficient = dict[str, float]()
    for name, enough, spent_name, budget, run in (
        (
            "deadline_s",
            np.max((least_s + columns.besides_s)[late], initial=0.0),
            "spent_s",
            "budget.time_s",
            run_s[late],
        ),
        (
            "round_joules",
            (least_joules + columns.besides_joules).sum() if is_short else 0.0,
            "spent_joules",
            "budget.joules",
            run_joules.sum(),
        ),
    ):
        if enough:
            sufficient[name] = float(enough) * (1 + TIGHT)
            if spent_name in limits:
                sufficient[budget] = limits[spent_name] + float(np.max(run)) * (1 + TIGHT)
    return sufficient


def _device_decisions(
    options: HcefOptions, case: Case, columns: HcefColumns, control: Control, sent: Array
) -> Iterator[tuple[str, DeviceDecision]]:
    """Yield each device's decision with its predicted cost; loops over plain floats for speed."""
    share, count = columns.byte_share(sent), control.steps * columns.tau + columns.gradients
    with np.errstate(all="ignore"):
        cost_columns = (count * columns.step_s, share * columns.whole_s, columns.download_s)
    seconds = zip(*(column.tolist() for column in cost_columns), strict=True)
    values = zip(*(column.tolist() for column in (control.steps, sent, count, share * columns.sizes[-1])), strict=True)
    bounds = zip(control.bound.tolist(), control.gain_per_s.tolist(), strict=True)
    is_decided = options.baseline not in ("cef", "mll_sgd")
    for device, parts, (steps, theta, gradients, size), (code, gain) in zip(
        case.names, seconds, values, bounds, strict=True
    ):
        compute_s, upload_s, download_s = (part_s if math.isfinite(part_s) else None for part_s in parts)
        figures, bound = case.figures_of(device), Bound(code)
        download = figures.get("download_joules")
        predicted = add_joules(
            Cost(compute_s=compute_s, upload_s=upload_s, download_s=download_s, bytes_up=round(size)),
            figures,
            scale_figure(figures.get("step_joules"), gradients),
            download.value if download else None,
        )
        multiplier = {Bound.TIME: gain, Bound.INTERIOR: control.multiplier}.get(bound)
        yield (
            device,
            DeviceDecision(
                values={STEPS: steps, SENT: theta},
                figures=figures,
                predicted=predicted,
                binding=NAMES.get(bound, bound.name.lower()) if is_decided else "baseline",
                multiplier=multiplier if is_decided else None,
            ),
        )
