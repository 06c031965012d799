"""The coordinator's optimizers: gaps to a conic solver and to a grid, certified gaps, and seconds of a solve.

`make bench NAME=optimizers`, some minutes; INSTANCES=... of every kind, 1000 unless told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np
from measure import Figure

from edge_server.allocation.allocators.hcef_figures import HcefOptions
from edge_server.allocation.coordinator import decide
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers import bandwidth, bandwidth_problem, hcef, hcef_cvxpy, hcef_joint
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, Shares
from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef_problem import (
    HcefTerms,
    derive_terms,
    objective_terms,
    steps_cap,
    total_joules,
)
from edge_server.journal.decision import Figure as Told
from edge_server.journal.decision import predicted_joules
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.sites import pledges
from edge_server.sites.cases import merge_cases, pack_case, read_case, restrict_decision
from shared.protocol.plausible import FIGURES
from tests.edge_server.allocation.optimizers import instances

INSTANCES = int(os.environ.get("INSTANCES", "1000"))
QUICK_INSTANCES = 3
COUNTS = (1, 3, 10, 32, 64)
FEW, MANY, MOST = 64, 10_000, 1_000_000
FLEET, SITES = 1000, 50
LEVELS, GRID = 2001, 300
CERTIFIED = 1e-3


@dataclass
class Worst:
    """The largest of each figure so far."""

    gap: float = 0.0
    lost: float = 0.0
    residual: float = 0.0

    def take(self, ours: float, conic: float, scale: float) -> None:
        """Take a minimum that we found, and the one that the conic solver found."""
        self.gap = max(self.gap, abs(ours - conic) / max(scale, 1e-9))
        self.lost = max(self.lost, (ours - conic) / max(scale, 1e-9))

    def told(self, name: str) -> Iterator[Figure]:
        """Yield its figures."""
        yield Figure(f"{name}: largest gap to the conic solver", self.gap, "", "<= 1e-6")
        yield Figure(f"{name}: most that the conic solver is better", self.lost, "", "<= 1e-12")
        yield Figure(f"{name}: largest KKT residual", self.residual, "", "<= 1e-6")


def run(*, quick: bool = False) -> list[Figure]:
    """Study gaps, then seconds."""
    many = QUICK_INSTANCES if quick else INSTANCES
    figures = [
        *gaps_of_bandwidth(many),
        *gaps_of_blocks(many),
        *joint(many),
        *equal_boards(max(1, many // 10)),
        *by_grid(many, (2, 5) if quick else (2, 5, 9)),
    ]
    return [*figures, *seconds((FEW, MANY) if quick else (FEW, MANY, MOST))]


def gaps_of_bandwidth(many: int) -> Iterator[Figure]:
    """Compare the shares of Liu et al.; the gap is relative to what is kept of all models."""
    for kind in instances.BANDWIDTHS:
        worst = Worst()
        for seed in range(many):
            count = COUNTS[seed % len(COUNTS)]
            problem = instances.bandwidth(kind, count, seed)
            ours, conic = bandwidth.solve(problem), bandwidth.solve(problem, "cvxpy")
            worst.take(ours.objective, conic.objective, count - conic.objective)
            worst.residual = max(worst.residual, residual(problem, ours))
        yield from worst.told(f"bandwidth, {kind}")


def residual(problem: Bandwidth, found: Shares) -> float:
    """Return by how much a served device's marginal misses the multiplier, as a share of the larger of both."""
    given = bandwidth_problem.derive_terms(problem)
    needs = given.cap > 0
    worth = given.slack * given.full / (found.share * given.compute + np.where(needs, given.full, 1.0)) ** 2
    off = (worth - found.multiplier) / np.maximum(np.maximum(worth, found.multiplier), 1e-300)
    at_floor, at_cap = found.share <= given.floor, found.share >= given.cap
    off = np.where(at_floor & at_cap, 0.0, np.where(at_floor, off, np.where(at_cap, -off, np.abs(off))))
    return max(0.0, float(np.max(off[needs], initial=0.0)), float(found.share.sum()) - 1)


def gaps_of_blocks(many: int) -> Iterator[Figure]:
    """Compare HCEF's P2.1 and P2.2."""
    for kind in instances.CONTROLS:
        sent_worst, steps_worst = Worst(), Worst()
        for seed in range(many):
            given = derive_terms(instances.control(kind, COUNTS[seed % len(COUNTS)], seed))
            steps = hcef.start_steps(given, np.random.default_rng(seed).random())
            sent, price = hcef.solve_sent(given, steps)
            conic = hcef_cvxpy.solve_sent(given, steps)[0]
            ours, theirs = (float(objective_terms(given, (steps, one)).sum()) for one in (sent, conic))
            sent_worst.take(ours, theirs, theirs)
            slope = price * given.send_joules - given.noise * steps
            box = given.least[1], hcef.sent_cap(given, steps)
            sent_worst.residual = max(sent_worst.residual, stationary(slope, sent, box, given.noise))
            steps, price = hcef.solve_steps(given, sent)
            conic = hcef_cvxpy.solve_steps(given, sent)[0]
            ours, theirs = (float(objective_terms(given, (one, sent)).sum()) for one in (steps, conic))
            steps_worst.take(ours, theirs, theirs)
            slope = 2 * given.bend * (steps - 1) + (2 - sent) * given.noise + price * given.step_joules
            box = given.least[0], hcef.steps_cap(given, sent)
            steps_worst.residual = max(steps_worst.residual, stationary(slope, steps, box, given.noise + given.bend))
        yield from sent_worst.told(f"P2.1, {kind}")
        yield from steps_worst.told(f"P2.2, {kind}")


def stationary(slope: Array, x: Array, box: tuple[float, Array], scale: float) -> float:
    """Return the largest slope that a bound does not explain."""
    at_floor, at_cap = x <= box[0] * (1 + 1e-9), x >= box[1] * (1 - 1e-9)
    off = np.where(at_floor & at_cap, 0.0, np.where(at_floor, -slope, np.where(at_cap, slope, np.abs(slope))))
    return max(0.0, float(np.max(off / np.maximum(scale, np.abs(slope)), initial=0.0)))


def joint(many: int) -> Iterator[Figure]:
    """Certify the joint solver's gaps, and compare it with alternation from ten starts."""
    for kind in instances.CONTROLS:
        gaps, won, lost, times = [], [], {3: -np.inf, 8: -np.inf, FEW: -np.inf}, 0
        for seed in range(max(1, many // 5)):
            for count in (3, 8, FEW):
                problem = instances.control(kind, count, seed)
                found, ends = hcef_joint.solve(problem), alternations(derive_terms(problem), seed)
                worse = found.objective / min(ends) - 1
                lost[count], times = max(lost[count], worse), times + (worse > 1e-9)
                won.append(median(ends) / found.objective - 1)
                if count == FEW:
                    gaps.append(found.gap or 0.0)
        yield Figure(f"joint, {kind}, N = 64: certified gap, median", 100 * median(gaps), "%", "<= 0.1")
        yield Figure(f"joint, {kind}, N = 64: certified gap, largest", 100 * max(gaps), "%")
        for count, worse in lost.items():
            name = f"joint, {kind}, N = {count}: most that the best of ten alternations is better"
            yield Figure(name, 100 * worse, "%", "<= 1e-7")
        yield Figure(f"joint, {kind}: how often it is", times, f"of {len(won)}")
        yield Figure(f"joint, {kind}: alternation is above it, median", 100 * median(won), "%")


def equal_boards(many: int) -> Iterator[Figure]:
    """Certify the joint solver's gaps on fleets of one to five kinds of boards and of many; count what is missed."""
    for count in (8, 30, FEW, 200, 1000):
        gaps, worse = [], []
        for kinds in (1, 2, 3, 5, 0):
            for seed in range(many):
                problem = instances.fleet(kinds, count, seed)
                found = hcef_joint.solve(problem)
                gaps.append(found.gap or 0.0)
                worse.append(found.objective / min(alternations(derive_terms(problem), seed)) - 1)
        above = 100 * sum(gap > CERTIFIED for gap in gaps) / len(gaps)
        yield Figure(f"joint, equal boards, N = {count}: certified gaps above 0.1 %", above, "%", "<= 1")
        name = f"joint, equal boards, N = {count}: most that the best of ten alternations is better"
        yield Figure(name, 100 * max(worse), "%", "<= 1e-7")


def alternations(given: HcefTerms, seed: int) -> list[float]:
    """Return where alternation from ten starts ends: five shares of the room, five random ones."""
    rng, count = np.random.default_rng(seed), len(given.step_s)
    cap = steps_cap(given, np.full(count, given.least[1]))
    starts = [hcef.start_steps(given, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    starts += [np.clip(rng.random(count), given.least[0], cap) for _ in range(5)]
    ends = [hcef.alternate(given, start) for start in starts]
    most = given.energy_joules * (1 + 1e-12)
    return [end.objective for end in ends if total_joules(given, (end.steps, end.sent)) <= most]


def by_grid(many: int, counts: Sequence[int]) -> Iterator[Figure]:
    """Compare the joint solver with brute force: every device's rho and theta on a grid, joules in 2000 steps."""
    worst = -np.inf
    for kind in ("balanced", "energy", "link"):
        for count in counts:
            for seed in range(max(1, many // 200)):
                problem = instances.control(kind, count, seed)
                worst = max(worst, hcef_joint.solve(problem).objective / brute(derive_terms(problem)) - 1)
    yield Figure("joint, fewer than ten devices: above a fine grid by at most", 100 * worst, "%", "<= 0.5")


def brute(given: HcefTerms) -> float:
    """Return the best of the grid; a device's joules are rounded up, so that every sum is allowed."""
    floors = given.least[0] * given.step_joules + given.least[1] * given.send_joules
    unit = (given.energy_joules - float(floors.sum())) / (LEVELS - 1)
    rho, theta = (np.linspace(least, 1, GRID) for least in given.least)
    steps, sent = (one.ravel() for one in np.meshgrid(rho, theta))
    worth = (2 - sent) * steps * given.noise + given.bend * (1 - steps) ** 2
    total, apart = np.zeros(LEVELS), np.arange(LEVELS)[:, None] - np.arange(LEVELS)
    for n, floor in enumerate(floors):
        spent = np.ceil((steps * given.step_joules[n] + sent * given.send_joules[n] - floor) / unit - 1e-9)
        fits = (steps * given.step_s[n] + sent * given.send_s[n] <= given.deadline_s[n]) & (spent < LEVELS)
        best = np.full(LEVELS, np.inf)
        np.minimum.at(best, np.maximum(spent[fits], 0).astype(int), worth[fits])
        best = np.minimum.accumulate(best)
        total = np.where(apart >= 0, total[np.maximum(apart, 0)] + best, np.inf).min(axis=1)
    return float(total[-1])


def seconds(counts: Sequence[int]) -> Iterator[Figure]:
    """Time solves: of every kind the median, of those the slowest."""
    limits = {FEW: 0.5, MANY: 5.0, MOST: 1000.0}
    slowest: dict[tuple[str, int], float] = {}
    for count in counts:
        limit = limits[count]
        for name, one_kind in (("bandwidth", _share), ("one alternation", _turn)):
            kinds = instances.BANDWIDTHS if name == "bandwidth" else instances.CONTROLS
            slowest[name, count] = took = max(timed(one_kind(kind, count), count) for kind in kinds)
            yield Figure(f"{name}, N = {count}", 1e3 * took, "ms", f"<= {limit:g}")
        if count < MOST:
            took = max(timed(_joint(kind, count), count) for kind in instances.CONTROLS)
            yield Figure(f"joint, N = {count}", 1e3 * took, "ms", f"<= {10 if count == FEW else 100}")
    for joint in (False, True):
        took = max(timed(_decision(kind, FLEET, joint=joint), MANY) for kind in instances.CONTROLS)
        how = "both at once" if joint else "in turn"
        yield Figure(f"hcef, N = {FLEET}, a whole decision, {how}", 1e3 * took, "ms", "" if joint else "<= 50")
    took = max(timed(_of_sites(kind, FLEET), MANY) for kind in instances.CONTROLS)
    yield Figure(f"hcef, N = {FLEET} at {SITES} sites, from cases that came to answers", 1e3 * took, "ms", "<= 50")
    took = conic_s(instances.bandwidth("mixed", FEW, 1))
    yield Figure(f"bandwidth, N = {FEW}, conic solver", 1e3 * took, "ms")
    if MOST not in counts:
        return
    growth = MOST * np.log(MOST) / (MANY * np.log(MANY))
    for name in ("bandwidth", "one alternation"):
        times = slowest[name, MOST] / slowest[name, MANY] / growth
        yield Figure(f"{name}, N = {MANY} to {MOST}: growth beside N log N", float(times), "", "<= 1.5")


def _share(kind: str, count: int) -> Callable[[], object]:
    problem = instances.bandwidth(kind, count, 1)
    return lambda: bandwidth.solve(problem)


def _turn(kind: str, count: int) -> Callable[[], object]:
    given = derive_terms(instances.control(kind, count, 1))
    steps = hcef.start_steps(given, 0.5)
    return lambda: hcef.solve_steps(given, hcef.solve_sent(given, steps)[0])


def _joint(kind: str, count: int) -> Callable[[], object]:
    problem = instances.control(kind, count, 1)
    return lambda: hcef_joint.solve(problem)


def _decision(kind: str, count: int, *, joint: bool) -> Callable[[], object]:
    """Return HCEF's coordinator at work on devices' figures: columns, solver, bytes, and what each device is given."""
    case, table = _case(kind, count), OptimizerPlan(name="hcef", options={"joint": joint})
    return lambda: decide(table, case)


def _of_sites(kind: str, count: int) -> Callable[[], object]:
    """Return a coordinator at work on the cases of many sites, as they come, to the answers, as they go.

    Besides joules, which sites pledge evenly, every site has a deadline of its own.
    """
    whole, table = _case(kind, count), OptimizerPlan(name="hcef")
    told, pledge = {}, whole.limits["round_joules"] / SITES
    for place in range(SITES):
        names = tuple(whole.names)[place::SITES]
        limits = {**whole.limits, "deadline_s": whole.limits["deadline_s"] * (1 - 0.2 * place / SITES)}
        limits["round_joules"] = pledge
        figures = {name: dict(whole.figures[name]) for name in names}
        told[f"s{place}"] = pack_case(Case(names, limits, figures, whole.ladder))
    put = dict.fromkeys(told, pledge)

    def settle() -> list[bytes]:
        cases = {site: read_case(data, whole.names) for site, data in told.items()}
        decision = decide(table, merge_cases("s0", cases, sum(put.values())))
        each = predicted_joules(decision)
        pledges.share_out(put, {site: sum(each.get(one, 0.0) for one in case.names) for site, case in cases.items()})
        return [msgspec.msgpack.encode(restrict_decision(decision, case.names)) for case in cases.values()]

    return settle


def _case(kind: str, count: int) -> Case:
    """Return what is known of devices, by the figures of an instance, and the limits of their round."""
    problem = instances.control(kind, count, 1)
    weights = 269_722
    columns = {
        "step_s": problem.mu_s,
        "step_joules": problem.alpha_joules,
        "upload_w": problem.tx_w,
        "up_bits_per_s": 32 * weights / np.asarray(problem.nu_s),
    }
    figures = {
        f"d{place}": {
            name: Told(float(column[place]), "measured")
            for name, column in columns.items()
            if is_reportable(name, column[place])
        }
        | {"sigma2": Told(problem.sigma2, "measured"), "g2": Told(problem.g2, "measured")}
        for place in range(count)
    }
    limits = {"deadline_s": float(np.max(problem.deadline_s)), "round_joules": problem.energy_joules}
    limits |= {"local_steps": float(problem.tau), "gradients": 4.0, "model_bytes": 4.0 * weights}
    ladder = tuple((share, round(4 * weights * min(1.0, 1.3 * share))) for share in HcefOptions().levels())
    return Case(tuple(figures), limits, figures, ladder)


def is_reportable(name: str, value: float) -> bool:
    """Return whether a device can report the figure; infinite and unknown ones it cannot."""
    low, high = FIGURES[name]
    return low <= value <= high


def conic_s(problem: Bandwidth) -> float:
    """Return what the conic solver takes, compiled already."""
    bandwidth.solve(problem, "cvxpy")
    return timed(lambda: bandwidth.solve(problem, "cvxpy"), MANY)


def timed(call: Callable[[], object], count: int) -> float:
    """Return the median seconds of a call, the first left out."""
    call()
    found = []
    for _ in range(max(3, min(41, 4 * MANY // count))):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return median(found)
