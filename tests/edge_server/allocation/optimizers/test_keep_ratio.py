"""The largest model a device can train: what each limit allows, and what is told of it."""

import dataclasses

import numpy as np
import pytest

from edge_server.allocation.optimizers.base import Bound
from edge_server.allocation.optimizers.keep_ratio import KeepRatio, solve

LADDER = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
BYTES = 1e6 * LADDER**2


def problem(**others):
    columns = {
        "step_s": np.array([1.0, 1.0]),
        "steps": 10,
        "up_bits_per_s": 8e5,
        "ratios": LADDER,
        "up_bytes": BYTES,
        "step_joules": 2.0,
        "tx_w": 1.0,
        "memory_bytes": 1e8 * LADDER,
    }
    return KeepRatio(**{**columns, **others})


def seconds(p):
    return 10 * (2 + p**2) / 3 + 8 * 1e6 * p**2 / 8e5


@pytest.mark.parametrize("continuous", [False, True])
def test_without_limits_the_whole_model_is_kept(continuous):
    found = solve(problem(continuous=continuous))
    assert found.keep.tolist() == [1.0, 1.0]
    assert [Bound(code).name for code in found.bound] == ["FULL"] * 2
    assert found.feasible
    assert found.seconds == pytest.approx([20.0, 20.0])
    assert found.joules == pytest.approx([20 + 10, 20 + 10])


def test_each_limit_binds_by_itself():
    found = solve(problem(deadline_s=np.array([seconds(0.6), seconds(0.6) - 1e-9])))
    assert found.keep.tolist() == [0.6, 0.4]
    assert [Bound(code).name for code in found.bound] == ["TIME"] * 2
    assert found.gain_per_s[0] == pytest.approx(0.2 / (seconds(0.8) - seconds(0.6)))
    joules = 20 * (2 + 0.8**2) / 3 + 8 * 1e6 * 0.8**2 / 8e5
    found = solve(problem(energy_joules=joules * (1 + 1e-12)))
    assert found.keep.tolist() == [0.8] * 2
    assert found.bound.tolist() == [Bound.ENERGY] * 2
    assert found.joules == pytest.approx([joules] * 2)
    found = solve(problem(memory_limit_bytes=np.array([5e7, 1e9])))
    assert found.keep.tolist() == [0.4, 1.0]
    assert [Bound(code).name for code in found.bound] == ["MEMORY", "FULL"]
    assert found.gain_per_byte == pytest.approx([0.2 / 2e7, 0.0])


def test_between_the_candidates_the_limit_is_met_exactly_and_on_the_safe_side():
    rng = np.random.default_rng(0)
    limits = seconds(rng.uniform(0.2, 1, 2))
    found = solve(problem(deadline_s=limits, continuous=True))
    assert found.seconds == pytest.approx(limits)
    assert np.all(seconds(found.keep) <= limits)
    fine = np.linspace(0.01, 1, 1000)
    found = solve(problem(deadline_s=limits, continuous=True, ratios=fine, up_bytes=1e6 * fine**2, memory_bytes=0.0))
    assert seconds(found.keep) == pytest.approx(limits, rel=1e-5)


def test_it_is_the_largest_candidate_within_all_limits():
    rng = np.random.default_rng(2)
    for _ in range(50):
        count = 8
        one = problem(
            step_s=rng.uniform(0.1, 2, count),
            up_bits_per_s=10 ** rng.uniform(5, 7, count),
            deadline_s=rng.uniform(5, 40, count),
            energy_joules=rng.uniform(5, 60, count),
            memory_limit_bytes=rng.uniform(1e7, 2e8, count),
            down_bytes=BYTES,
            down_bits_per_s=1e6,
            curve=LADDER,
        )
        found = solve(one)
        for k in range(count):
            sending = 8 * BYTES / one.up_bits_per_s[k]
            took = 10 * one.step_s[k] * LADDER + sending + 8 * BYTES / 1e6
            fits = (took <= one.deadline_s[k]) & (20 * LADDER + sending <= one.energy_joules[k])
            fits &= one.memory_bytes <= one.memory_limit_bytes[k]
            assert found.keep[k] == (LADDER[fits].max() if fits.any() else 0.2)
            assert found.fits[k] == fits.any()


def test_what_nothing_fits_gets_the_smallest_and_is_told_what_would_do():
    found = solve(problem(deadline_s=1.0))
    assert found.keep.tolist() == [0.2] * 2
    assert not found.feasible
    assert found.enough_s == pytest.approx([seconds(0.2)] * 2)
    assert solve(problem(deadline_s=float(found.enough_s[0]))).feasible


def test_no_link_no_clock_no_number_and_nobody():
    found = solve(problem(step_s=np.array([np.inf, np.nan, 1.0, 1.0]), up_bits_per_s=np.array([1e6, 1e6, 0.0, 1e6])))
    assert [Bound(code).name for code in found.bound] == ["OUT", "UNKNOWN", "OUT", "FULL"]
    assert found.keep.tolist() == [0.2, 0.2, 0.2, 1.0]
    assert not found.feasible
    assert found.fits.tolist() == [False, False, False, True]
    assert solve(problem(step_s=np.empty(0))).feasible
    assert solve(dataclasses.replace(problem(), ratios=np.ones(1), up_bytes=1e6, memory_bytes=1e8)).keep.tolist() == [
        1,
        1,
    ]


def test_more_of_anything_never_keeps_less():
    rng = np.random.default_rng(4)
    for continuous in (False, True):
        base = problem(deadline_s=rng.uniform(8, 20, 2), energy_joules=25.0, continuous=continuous)
        keep = solve(base).keep
        for more in ({"deadline_s": base.deadline_s * 1.2}, {"energy_joules": 30.0}, {"up_bits_per_s": 1e6}):
            assert np.all(solve(dataclasses.replace(base, **more)).keep >= keep)
