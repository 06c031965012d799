"""Joint bandwidth and pruning of Liu et al.: optimality, limits and degenerate inputs."""

import dataclasses
import subprocess  # noqa: TID251 - what an import brings along
import sys

import numpy as np
import pytest

from edge_server.allocation.optimizers.bandwidth import solve
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, derive_terms
from edge_server.allocation.optimizers.base import Bound
from tests.edge_server.allocation.optimizers.instances import BANDWIDTHS, bandwidth

SEEDS = range(6)


def every(*, floors=True):
    return [
        bandwidth(kind, count, seed, floors=floors) for kind in BANDWIDTHS for seed in SEEDS for count in (2, 7, 40)
    ]


def simple(rate, compute=1.0, threshold=2.0, **others):
    return Bandwidth(np.array(rate, float), compute, 0.0, 0.0, 1.0, threshold, **{"most_pruned": 1.0, **others})


def changed(problem, **columns):
    return dataclasses.replace(problem, **columns)


@pytest.mark.parametrize("kind", BANDWIDTHS)
def test_it_is_never_worse_than_the_conic_solver(kind):
    for seed in SEEDS:
        for count in (1, 3, 25):
            problem = bandwidth(kind, count, seed)
            ours, conic = solve(problem), solve(problem, "cvxpy")
            kept, theirs = count - ours.objective, count - conic.objective
            assert kept >= theirs * (1 - 1e-12)
            assert kept - theirs <= 1e-6 * max(theirs, 1e-9)
            if conic.multiplier and ours.bound.tolist().count(Bound.INTERIOR) > 1:
                assert ours.multiplier == pytest.approx(conic.multiplier, rel=1e-3)


def test_the_conditions_of_karush_kuhn_and_tucker_hold():
    for problem in every():
        found, told = solve(problem), derive_terms(problem)
        needs, tall = told.cap > 0, found.multiplier * (1 + 1e-6)
        if not needs.any():
            continue
        assert found.share.sum() <= 1 + 1e-12
        assert np.all(found.share >= told.floor * (1 - 1e-12))
        assert np.all(found.share <= told.cap * (1 + 1e-12))
        worth = (told.slack * told.full / (found.share * told.compute + told.full) ** 2)[needs]
        at_floor, at_cap = (found.share <= told.floor)[needs], (found.share >= told.cap)[needs]
        inside = ~at_floor & ~at_cap
        assert worth[inside] == pytest.approx(np.full(inside.sum(), found.multiplier), rel=1e-6)
        assert np.all(worth[at_floor & ~at_cap] <= tall)
        assert np.all(worth[at_cap & ~at_floor] >= found.multiplier * (1 - 1e-6))
        if found.multiplier:
            assert found.share.sum() == pytest.approx(1)


def test_whoever_is_served_ends_at_the_threshold_warm_up_included():
    for problem in every():
        found = solve(problem)
        served = (found.share > 0) & (found.pruned < 1)
        kept, share = 1 - found.pruned[served], found.share[served]
        before = (problem.personal_s + problem.warm_up_s)[served]
        took = before + kept * (
            problem.compute_s[served] + problem.upload_bits / (share * problem.up_bits_per_s[served])
        )
        assert np.all(took <= problem.threshold_s * (1 + 1e-9))
        pruned = found.pruned[served] > 1e-9
        assert took[pruned] == pytest.approx(np.full(pruned.sum(), problem.threshold_s), rel=1e-9)


def test_it_is_the_papers_closed_form_where_no_clamp_binds():
    rng, seen = np.random.default_rng(0), 0
    for _ in range(20):
        rate, compute = rng.uniform(1, 2, 6), rng.uniform(20, 30, 6)
        problem = Bandwidth(rate, compute, 0.5, 0.25, 1.0, rng.uniform(8, 12), 1.0)
        slack, found = problem.threshold_s - 0.75, solve(problem)
        root = np.sqrt(slack * rate)
        x = (1 + (1 / (rate * compute)).sum()) / (root / (rate * compute)).sum()
        paper = (root * x - 1) / (rate * compute)
        if np.all((paper > 0) & (slack < compute)):
            seen += 1
            assert found.share == pytest.approx(paper, rel=1e-12)
            assert found.multiplier == pytest.approx(x**-2)
    assert seen > 10


def test_the_order_of_devices_does_not_matter():
    for problem in every():
        count = len(problem.up_bits_per_s)
        order = np.random.default_rng(count).permutation(count)
        columns = {
            name: getattr(problem, name)[order] for name in ("up_bits_per_s", "compute_s", "personal_s", "warm_up_s")
        }
        mixed, found = solve(changed(problem, **columns)), solve(problem)
        assert mixed.share == pytest.approx(found.share[order], rel=1e-9, abs=1e-14)
        assert mixed.bound.tolist() == found.bound[order].tolist()


def test_more_time_bandwidth_power_and_clock_prune_less_more_weights_bits_and_cycles_more():
    for problem in every(floors=False):
        told, steps, slower = solve(problem).objective, problem.compute_s, 1.07
        for better in (
            changed(problem, threshold_s=problem.threshold_s * slower),
            changed(problem, up_bits_per_s=problem.up_bits_per_s * slower),
            changed(problem, compute_s=steps / slower, warm_up_s=problem.warm_up_s / slower),
        ):
            assert solve(better).objective <= told + 1e-9
        for worse in (
            changed(problem, upload_bits=problem.upload_bits * slower),
            changed(problem, compute_s=steps * slower, warm_up_s=problem.warm_up_s * slower),
        ):
            assert solve(worse).objective >= told - 1e-9


def test_identical_devices_get_the_same():
    for compute in (0.0, 0.1, 1.0, 10.0):
        assert solve(simple([0.3] * 5, compute)).share == pytest.approx(np.full(5, 0.2), rel=1e-12)


def test_a_share_rises_with_the_rate_up_to_four_lambda_w_over_s_and_falls_beyond():
    rates = np.geomspace(0.5, 500, 4001)
    found = solve(simple(rates, compute=40.0, threshold=20.0))
    turn = 4 * found.multiplier * 1.0 / 20.0
    assert rates[0] < turn < rates[-1]
    served = found.share > 0
    assert np.all(np.diff(found.share[served & (rates < turn)]) > 0)
    assert np.all(np.diff(found.share[rates > turn]) < 0)
    assert np.all(rates[served] >= turn / 4 * (1 - 1e-9))


def test_without_computing_the_best_links_are_served_in_order():
    found = solve(simple([4.0, 1.0, 2.0], compute=0.0, threshold=1.0))
    assert found.share == pytest.approx([0.25, 0.25, 0.5])
    assert found.pruned == pytest.approx([0.0, 0.75, 0.0])
    assert [Bound(code).name for code in found.bound] == ["FULL", "INTERIOR", "FULL"]
    nearly = solve(simple([4.0, 1.0, 2.0], compute=1e-13, threshold=1.0))
    assert nearly.pruned == pytest.approx(found.pruned, abs=1e-9)


def test_nobody_starves_where_floors_fit_and_all_go_without_where_they_do_not():
    problem = simple([10.0, 1.0, 1.0], compute=0.0, threshold=0.1)  # the first can use all of the link
    assert solve(problem).pruned == pytest.approx([0, 1, 1], abs=1e-12)
    floored = solve(changed(problem, most_pruned=0.96))
    assert floored.feasible
    assert floored.share == pytest.approx([0.2, 0.4, 0.4])
    assert floored.pruned == pytest.approx([0.8, 0.96, 0.96])
    short = solve(changed(problem, most_pruned=0.9))  # 0.1 / (rate threshold) each: 0.1 + 1 + 1
    assert not short.feasible
    assert short.share == pytest.approx([1, 0, 0])
    assert short.enough_s == pytest.approx(0.1 * (0.1 + 1 + 1))


def test_one_hopeless_link_costs_nobody_else_its_floor():
    rates, floor = np.array([10.0, 2.0, 2.0, 2.0]), {"compute": 0.0, "threshold": 0.1, "most_pruned": 0.96}
    found = solve(simple([*rates, 0.5], **floor))
    assert not found.feasible
    assert found.pruned[:4] == pytest.approx(solve(simple(rates, **floor)).pruned)
    assert found.pruned[:4].max() <= 0.96 + 1e-12


def test_the_smallest_threshold_that_would_do_does_and_less_does_not():
    seen = 0
    for problem in every():
        found = solve(problem)
        if found.feasible or found.enough_s == 0:
            continue
        seen += 1
        assert found.enough_s > problem.threshold_s
        assert solve(changed(problem, threshold_s=found.enough_s * (1 + 1e-9))).feasible
        assert not solve(changed(problem, threshold_s=found.enough_s * (1 - 1e-9))).feasible
    assert seen > 10


def test_what_cannot_take_part_is_left_out_and_moves_nobody_else():
    nan, inf = np.nan, np.inf
    found = solve(simple([1.0, 0.0, 1.0, nan, -1.0, 1.0], compute=np.array([1, 1, inf, 1, 1, 1.0])))
    names = [Bound(code).name for code in found.bound]
    assert names == ["INTERIOR", "OUT", "OUT", "UNKNOWN", "UNKNOWN", "INTERIOR"]
    alone = solve(simple([1.0, 1.0]))
    assert found.share[[0, 5]].tolist() == alone.share.tolist()
    assert found.pruned[1:5].tolist() == [1.0] * 4
    assert found.share[1:5].tolist() == [0.0] * 4
    assert all(np.isfinite(one).all() for one in (found.gain_per_s, found.gain_per_compute_s, found.share))


@pytest.mark.parametrize("solver", ["numpy", "cvxpy"])
def test_nobody_one_and_none_that_can(solver):
    empty = solve(simple([]), solver)
    assert (len(empty.share), empty.objective, empty.feasible) == (0, 0.0, True)
    one = solve(simple([1.0], compute=0.5, threshold=2.0), solver)
    assert one.share == pytest.approx([1 / 1.5])
    assert one.pruned == pytest.approx([0.0], abs=1e-9)
    hurried = solve(simple([1.0], compute=2.0, threshold=1.0), solver)
    assert hurried.share == pytest.approx([1.0])
    assert hurried.pruned == pytest.approx([1 - 1 / 3])
    none = solve(Bandwidth(np.ones(3), 1.0, 5.0, 1.0, 1.0, 2.0), solver)
    assert none.pruned.tolist() == [1.0] * 3
    assert not none.feasible
    assert none.enough_s > 6
    assert not solve(simple([0.0, 0.0]), solver).share.any()
    assert not solve(simple([1.0], threshold=np.nan), solver).share.any()


def test_with_nothing_to_send_nobody_needs_a_share():
    found = solve(Bandwidth(np.ones(2), np.array([1.0, 4.0]), 0.0, 0.0, 0.0, 2.0))
    assert found.share.tolist() == [0.0, 0.0]
    assert found.pruned.tolist() == [0.0, 0.5]


def test_what_one_more_second_buys_is_what_resolving_finds():
    for seed in SEEDS:
        for kind in ("mixed", "compute", "loose"):
            problem, step = bandwidth(kind, 12, seed), 1e-6
            found = solve(problem)
            for index in range(12):
                more = problem.personal_s.copy()
                more[index] -= step * problem.threshold_s
                bought = found.objective - solve(changed(problem, personal_s=more)).objective
                less = problem.compute_s.copy()
                less[index] -= step * problem.compute_s[index]
                saved = found.objective - solve(changed(problem, compute_s=less)).objective
                assert bought / (step * problem.threshold_s) == pytest.approx(
                    found.gain_per_s[index], rel=1e-2, abs=1e-6
                )
                told = found.gain_per_compute_s[index]
                assert saved / (step * problem.compute_s[index]) == pytest.approx(told, rel=1e-2, abs=1e-6)


def test_the_server_does_not_load_the_conic_solver():
    names = ("bandwidth", "hcef", "hcef_joint", "keep_ratio")
    loads = ";".join(f"import edge_server.allocation.optimizers.{name}" for name in names)
    code = f"import sys;{loads};sys.exit('cvxpy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603 - ours


def test_an_upload_that_vanishes_beside_the_steps_still_has_an_answer():
    """1e-14 s of upload beside 1e10 s of steps: less than rounding tells."""
    with np.errstate(all="raise"):
        found = solve(Bandwidth(np.array([1e14, 1e6]), 1.0, 1e10, 0.0, 1.0, 1.0))
    assert not found.feasible
    assert found.enough_s == pytest.approx(1e10)
