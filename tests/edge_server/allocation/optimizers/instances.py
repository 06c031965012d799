"""Random problems of every kind that a fleet can pose, each from one seed; the benchmarks solve the same.

HCEF's P2 by another way: how many devices of each kind take which of many points, as an integer programme for HiGHS.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag, csr_array, vstack

from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth
from edge_server.allocation.optimizers.hcef import alternate, start_steps
from edge_server.allocation.optimizers.hcef_problem import Hcef, HcefTerms, objective_terms, steps_cap, total_joules

STEPS, BETWEEN, LEVELS = 401, 21, 400
COLUMNS = ("step_s", "send_s", "step_joules", "send_joules", "deadline_s")
BANDWIDTHS = ("link", "compute", "mixed", "tight", "loose", "partly")
CONTROLS = ("balanced", "time", "energy", "loose", "link", "partly")


def bandwidth(kind: str, count: int, seed: int, *, floors: bool = True) -> Bandwidth:
    """Link-bound, compute-bound, both, little time, much time, or some devices that cannot take part."""
    rng = np.random.default_rng([seed, count, BANDWIDTHS.index(kind)])
    rate, bits = 10 ** rng.uniform(5.5, 7.5, count), 8 * 10 ** rng.uniform(5, 7)
    balance = {"link": 1e-3, "compute": 30.0}.get(kind, 1.0)
    whole = bits / rate * count
    compute = whole * balance * 10 ** rng.uniform(-1, 1, count) / 3
    typical = float(np.median(whole + compute))
    personal, warm = rng.uniform(0, 0.2, count) * typical, 0.1 * compute
    room = {"tight": (-2.0, -1.0), "loose": (0.7, 2.0)}.get(kind, (-1.2, 0.6))
    threshold = float(np.median(personal + warm)) + typical * 10 ** rng.uniform(*room)
    if kind != "partly":
        threshold = max(threshold, 1.02 * float((personal + warm).max()))
    else:
        rate[rng.random(count) < 0.1] = 0.0
        compute[rng.random(count) < 0.1] = np.inf
        personal[rng.random(count) < 0.1] = np.nan
        compute[rng.random(count) < 0.2] = 0.0
    most = float(rng.choice([1.0, 0.95, 0.8])) if floors else 1.0
    return Bandwidth(rate, compute, personal, warm, bits, threshold, most)


def control(kind: str, count: int, seed: int) -> Hcef:
    """The paper's devices: both budgets, little time, few joules, plenty, slow links, or budgets below floors."""
    rng = np.random.default_rng([seed, count, CONTROLS.index(kind)])
    clock = rng.uniform(1, 2, count)
    mu, alpha, weights = 150 / clock, 1.5 * clock**2, 269_722
    if kind == "link":
        mu, weights = mu / 20, 50 * weights
    rate = rng.uniform(1, 5, count) * 1e6 * np.maximum(rng.exponential(1, count), 0.02)
    nu, watts, tau = 32 * weights / rate, rng.uniform(0.1, 1, count), 5
    slow = {"balanced": 0.6, "time": 0.35, "energy": 1.5, "loose": 3.0, "link": 0.5, "partly": 0.06}[kind]
    poor = {"balanced": 0.6, "time": 1.2, "energy": 0.35, "loose": 3.0, "link": 0.5, "partly": 0.2}[kind]
    whole = tau * mu + nu
    deadline = slow * float(np.quantile(whole, 0.8)) * rng.uniform(0.8, 1.2) * np.ones(count)
    energy = poor * float((tau * alpha + watts * nu).sum()) * rng.uniform(0.8, 1.2)
    if kind == "partly":
        nu[rng.random(count) < 0.1] = np.inf
        mu[rng.random(count) < 0.1] = np.inf
        alpha[rng.random(count) < 0.1] = np.nan
        watts[rng.random(count) < 0.2] = 0.0
    return Hcef(mu, nu, alpha, watts, deadline, energy, tau, sigma2=10 ** rng.uniform(-1.5, 0.3), g2=1.0)


def fleet(kinds: int, count: int, seed: int, *, kind: str | None = None) -> Hcef:
    """So many devices of a few kinds of boards, equal but for that; of no kinds, half are of one and half differ."""
    rng = np.random.default_rng([seed, count, kinds])
    kind = kind or str(rng.choice([one for one in CONTROLS if one != "partly"]))
    boards = control(kind, kinds or max(1, count // 2), seed)
    each = rng.integers(kinds, size=count) if kinds else np.maximum(0, np.arange(count) - (count - count // 2))
    whole = boards.tau * boards.alpha_joules + boards.tx_w * boards.nu_s
    return Hcef(
        *(getattr(boards, name)[each] for name in ("mu_s", "nu_s", "alpha_joules", "tx_w", "deadline_s")),
        float(boards.energy_joules * whole[each].sum() / whole.sum()),
        boards.tau,
        boards.sigma2,
        boards.g2,
    )


def by_integers(given: HcefTerms, seconds: float = 20.0) -> float:
    """Return the objective of the best allocation of points on a grid; no better one is missed but for the grid."""
    kinds, many = np.unique(np.stack([getattr(given, name) for name in COLUMNS]), axis=1, return_counts=True)
    tables = [points(given, kind) for kind in kinds.T]
    worth, joules = (np.concatenate([table[part] for table in tables]) for part in (0, 1))
    of_each = block_diag([np.ones((1, len(table[0]))) for table in tables])
    rows = vstack([csr_array(of_each), csr_array(joules[None])])
    least, most = np.append(many, -np.inf), np.append(many, given.energy_joules)
    found = milp(
        worth,
        integrality=np.ones(len(worth)),
        bounds=Bounds(0, np.inf),
        constraints=LinearConstraint(rows, least, most),
        options={"time_limit": seconds, "mip_rel_gap": 1e-7},
    )
    return np.inf if found.x is None else float(worth @ np.round(found.x))


def points(given: HcefTerms, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the objective and the joules of points of one device; of those with about the same joules the best."""
    step_s, send_s, step_joules, send_joules, deadline = kind
    rho, theta = given.least
    with np.errstate(all="ignore"):
        last = min(1.0, (deadline - theta * send_s) / step_s) if step_s > 0 else 1.0
    steps = np.linspace(rho, max(rho, last), STEPS)
    full = np.clip((deadline - send_s) / step_s, rho, max(rho, last)) if step_s > 0 else rho
    steps = np.append(steps, full)[:, None]
    most = np.clip((deadline - steps * step_s) / send_s, theta, 1.0) if send_s > 0 else np.ones_like(steps)
    sent = theta + np.linspace(0, 1, BETWEEN) * (most - theta)
    steps = np.broadcast_to(steps, sent.shape)
    worth, joules = objective_terms(given, (steps, sent)).ravel(), (steps * step_joules + sent * send_joules).ravel()
    order = np.lexsort((worth, joules))
    worth, joules = worth[order], joules[order]
    better = np.append(True, worth[1:] < np.minimum.accumulate(worth)[:-1])
    worth, joules = worth[better], joules[better]
    if len(worth) > LEVELS:
        bins = np.floor((joules - joules[0]) / (np.ptp(joules) or 1.0) * LEVELS)
        first = np.flatnonzero(np.append(True, np.diff(bins) > 0))
        last_of_bin = np.append(first[1:] - 1, len(bins) - 1)
        keep = np.unique(np.concatenate((first, last_of_bin)))
        worth, joules = worth[keep], joules[keep]
    return worth, joules


def best_of_ten(given: HcefTerms, rng: np.random.Generator) -> float:
    """Return the best of where alternation ends within E, from five shares of the room and five random starts."""
    starts = [start_steps(given, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    count = len(given.step_s)
    cap = steps_cap(given, np.full(count, given.least[1]))
    starts += [np.clip(rng.random(count), given.least[0], cap) for _ in range(5)]
    ends = [alternate(given, start) for start in starts]
    within_e = [e for e in ends if total_joules(given, (e.steps, e.sent)) <= given.energy_joules * (1 + 1e-12)]
    return min(end.objective for end in within_e)
