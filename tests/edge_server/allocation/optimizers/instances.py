"""Random problems of every kind that a fleet can pose, each from one seed; the benchmarks solve the same."""

from __future__ import annotations

import numpy as np

from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth
from edge_server.allocation.optimizers.hcef_problem import Hcef

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
