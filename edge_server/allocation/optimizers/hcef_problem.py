"""HCEF's problem P2: input, terms, caps, objective and result of its solvers.

The formulas are in `hcef`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from edge_server.allocation.optimizers.base import MOST, Array, Bound, Codes, Mask, clip_figure, column, mask_valid

TIGHT = 1e-9


@dataclass(frozen=True)
class Hcef:
    """Input of one edge round; a column has one entry per device, and a single value applies to all.

    Attributes:
        mu_s: mu_n, seconds of a local iteration; infinite for no clock.
        nu_s: nu_n, seconds to upload the full model; infinite for no link.
        alpha_joules: alpha_n, joules of a local iteration.
        tx_w: p_n, watts while sending.
        deadline_s: D_n, in seconds.
        energy_joules: E, joules of all devices together.
        tau: Local iterations of a round at rho = 1.
        sigma2: sigma^2, variance of the minibatch gradients.
        g2: G^2, squared norm of the gradient.
        least_steps: rho_min, in (0, 1].
        least_sent: theta_min, in (0, 1].
        weight_add: w, 3 as printed; Appendix D yields 1.
    """

    mu_s: Array
    nu_s: ArrayLike
    alpha_joules: ArrayLike
    tx_w: ArrayLike
    deadline_s: ArrayLike
    energy_joules: float
    tau: int
    sigma2: float
    g2: float
    least_steps: float = 0.05
    least_sent: float = 1e-3
    weight_add: float = 3.0


@dataclass(frozen=True)
class Control:
    """Allocation: result of P2.

    Attributes:
        steps: rho_n, share of the tau local iterations.
        sent: theta_n, share of the change's coordinates.
        bound: `Bound` of each device.
        multiplier: lambda, decrease of the objective per additional joule of E.
        gain_per_s: Decrease of the objective per additional second of a device's deadline; joules cost lambda.
        objective: Value of (15a).
        least_objective: Lower bound of (15a); None for alternation, which gives none.
        feasible: Whether all floors fit their deadlines and E.
        enough_s: Seconds of each device's floors.
        enough_joules: Joules of all floors.
    """

    steps: Array
    sent: Array
    bound: Codes
    multiplier: float
    gain_per_s: Array
    objective: float
    least_objective: float | None
    feasible: bool
    enough_s: Array
    enough_joules: float
    sweeps: int = 0

    @property
    def gap(self) -> float | None:
        """Maximum distance from the optimum, as a share of the objective; None without a lower bound."""
        if self.least_objective is None:
            return None
        return max(0.0, self.objective - self.least_objective) / max(abs(self.objective), 1e-300)


@dataclass(frozen=True)
class HcefTerms:
    """P2 in the symbols of `hcef`; devices that cannot take part cost nothing and have their floors.

    Attributes:
        step_s: tau mu_n, seconds of all steps.
        send_s: nu_n, seconds of a full upload.
        step_joules: tau alpha_n, joules of all steps.
        send_joules: p_n nu_n, joules of a full upload.
        deadline_s: D_n, raised to the seconds of the floors.
        energy_joules: E, raised to `floor_joules`.
        noise: sigma^2 + G^2.
        bend: w G^2.
        least: (rho_min, theta_min).
        valid: Devices with valid figures.
        able: Devices with a link and a clock.
        on_time: Devices whose floors fit their deadlines.
        dear: Devices whose floors take more than an equal part of E, if all floors together exceed E: they get only
            their floors, and are charged that part, so that the others keep theirs.
        floor_joules: Joules charged for all floors.
        enough_s, enough_joules: See `Control`.
    """

    step_s: Array
    send_s: Array
    step_joules: Array
    send_joules: Array
    deadline_s: Array
    energy_joules: float
    noise: float
    bend: float
    least: tuple[float, float]
    valid: Mask
    able: Mask
    on_time: Mask
    dear: Mask
    floor_joules: float
    enough_s: Array
    enough_joules: float


Point: TypeAlias = tuple[Array, Array]
"""(rho, theta), one column each."""


def derive_terms(problem: Hcef) -> HcefTerms:
    """Derive validity, floors and scaled costs of the devices."""
    count = len(problem.mu_s)
    told_columns = (problem.mu_s, problem.nu_s, problem.alpha_joules, problem.tx_w, problem.deadline_s)
    mu, nu, alpha, tx, deadline = (column(x, count) for x in told_columns)
    valid = mask_valid(mu, nu, alpha, tx) & ~np.isnan(deadline)
    able = valid & np.isfinite(mu) & np.isfinite(nu) & np.isfinite(alpha) & np.isfinite(tx)
    mu, nu, alpha, tx = (np.where(able, x, 0.0) for x in (mu, nu, alpha, tx))
    rho, theta, budget = problem.least_steps, problem.least_sent, clip_figure(problem.energy_joules)
    step_s, send_s = np.where(able, problem.tau * mu, 1.0), np.where(able, nu, 1.0)
    step_joules, send_joules = problem.tau * alpha, tx * nu
    least_s = rho * step_s + theta * send_s
    on_time = able & (least_s <= deadline)
    floors = rho * step_joules + theta * send_joules
    enough = float(floors.sum())
    affordable = enough <= budget
    part = budget / max(1, count) if budget > 0 else 0.0
    dear = (floors > part) & (not affordable)
    charged = np.where(dear, part / np.where(dear, floors, 1.0), 1.0)
    step_joules, send_joules = charged * step_joules, charged * send_joules
    planned = float((charged * floors).sum())
    sigma2, g2 = _scale_moments(problem.sigma2, problem.g2)
    return HcefTerms(
        step_s=step_s,
        send_s=send_s,
        step_joules=step_joules,
        send_joules=send_joules,
        deadline_s=np.where(on_time & ~dear, deadline, least_s),
        energy_joules=max(planned, budget),
        noise=sigma2 + g2,
        bend=problem.weight_add * g2,
        least=(rho, theta),
        valid=valid,
        able=able,
        on_time=on_time,
        dear=dear,
        floor_joules=planned,
        enough_s=np.where(able, least_s, np.inf),
        enough_joules=enough,
    )


def _scale_moments(*moments: float) -> tuple[float, ...]:
    """Clip moments to non-negative values; if one exceeds `MOST`, scale all down by the same factor."""
    finite = [min(max(0.0, moment), sys.float_info.max) for moment in moments]
    largest = max(finite)
    return tuple(clip_figure(moment / largest * MOST if largest > MOST else moment) for moment in finite)


def sent_cap(terms: HcefTerms, steps: Array) -> Array:
    """Return the largest theta in time for given rho."""
    return _cap(terms.deadline_s - steps * terms.step_s, terms.send_s, terms.least[1])


def steps_cap(terms: HcefTerms, sent: Array) -> Array:
    """Return the largest rho in time for given theta."""
    return _cap(terms.deadline_s - sent * terms.send_s, terms.step_s, terms.least[0])


def _cap(available: Array, full: Array, least: float) -> Array:
    with np.errstate(all="ignore"):
        return np.where(full > 0, np.clip(available / full, least, 1.0), 1.0)


def objective_terms(terms: HcefTerms, point: Point) -> Array:
    """Return each device's term of (15a)."""
    steps, sent = point
    return (2 - sent) * steps * terms.noise + terms.bend * (1 - steps) ** 2


def total_joules(terms: HcefTerms, point: Point) -> float:
    """Return the joules of all devices."""
    return float((point[0] * terms.step_joules + point[1] * terms.send_joules).sum())


def build_control(
    terms: HcefTerms, point: Point, multiplier: float, *, least_objective: float | None = None, sweeps: int = 0
) -> Control:
    """Complete a point and multiplier lambda to an allocation: bounds, gains, objective."""
    steps, sent = point
    took = steps * terms.step_s + sent * terms.send_s
    in_time = took >= terms.deadline_s * (1 - TIGHT)
    at_floor = (steps <= terms.least[0]) & (sent <= terms.least[1])
    all_of_it = (steps >= 1) & (sent >= 1)
    bound = np.select(
        [~terms.valid, ~terms.able, terms.dear, all_of_it, in_time, at_floor],
        [Bound.UNKNOWN, Bound.OUT, Bound.ENERGY, Bound.FULL, Bound.TIME, Bound.FLOOR],
        Bound.INTERIOR if multiplier > 0 else Bound.FULL,
    ).astype(np.int8)
    by_steps = 2 * terms.bend * (1 - steps) - (2 - sent) * terms.noise - multiplier * terms.step_joules
    by_sent = steps * terms.noise - multiplier * terms.send_joules
    with np.errstate(all="ignore"):
        by_steps = np.where((steps < 1) & (terms.step_s > 0), by_steps / terms.step_s, 0.0)
        by_sent = np.where((sent < 1) & (terms.send_s > 0), by_sent / terms.send_s, 0.0)
    gain = np.where(terms.able & ~terms.dear & in_time, np.maximum(0.0, np.maximum(by_steps, by_sent)), 0.0)
    return Control(
        steps=steps,
        sent=sent,
        bound=bound,
        multiplier=multiplier,
        gain_per_s=gain,
        objective=float(objective_terms(terms, point).sum()),
        least_objective=least_objective,
        feasible=not terms.dear.any() and bool(np.all(terms.on_time | ~terms.able)),
        enough_s=terms.enough_s,
        enough_joules=terms.enough_joules,
        sweeps=sweeps,
    )
