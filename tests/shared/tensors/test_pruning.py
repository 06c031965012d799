"""Importance, schedule and mask, against the paper's formulas, a full sort, and numbers done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tensors.pruning import (
    IMPORTANCE,
    apply_mask,
    find_smallest,
    magnitude_importance,
    max_prunable,
    select_mask,
    sparsity,
    taylor_importance,
)


def test_the_schedule_by_hand():
    """rho_f (1 - (1 - t/T)^3): nothing at first, 7/8 of it halfway, all at the end."""
    assert [sparsity(step, 2, 0.8) for step in (0, 1, 2)] == pytest.approx([0.0, 0.7, 0.8])


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(2, 500), st.floats(0.01, 0.99))
def test_the_schedule_rises_less_and_less_to_its_end(total, final):
    """rho_0 = 0, rho_T = rho_f, strictly increasing, concave, and rho_f (T - (T - 1)^2 / 4T) in all."""
    rho = np.array([sparsity(step, total, final) for step in range(total + 1)])
    assert (rho[0], rho[-1]) == (0.0, final)
    assert (np.diff(rho) > 0).all()
    assert (np.diff(rho, 2) < 1e-12).all()
    assert rho[1:].sum() == pytest.approx(final * (total - (total - 1) ** 2 / (4 * total)))


def test_half_the_sparsity_is_reached_after_a_fifth_of_the_run():
    """At t/T = 1 - 2^(-1/3) = 0.206."""
    assert sparsity(2063, 10_000, 0.6) == pytest.approx(0.3, rel=1e-3)


def test_importance_by_hand():
    """|w g| number by number: no inner product, in which -6 and 6 would cancel. Nothing given is changed."""
    weights, gradient = torch.tensor([2.0, -3.0, 0.0]), torch.tensor([-3.0, -2.0, 5.0])
    assert taylor_importance(weights, gradient).tolist() == [6.0, 6.0, 0.0]
    assert magnitude_importance(weights, gradient).tolist() == [2.0, 3.0, 0.0]
    assert weights.tolist() == [2.0, -3.0, 0.0]
    assert set(IMPORTANCE) == {"taylor", "magnitude"}


def test_importance_is_the_first_order_change_of_the_loss():
    """Of a quadratic with curvature h, setting w_j to zero changes the loss by w_j g_j, but for at most h w_j^2 / 2."""
    generator = torch.Generator().manual_seed(2)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    curvature, weights = root @ root.T, torch.randn(5, generator=generator, dtype=torch.float64)
    slope = torch.randn(5, generator=generator, dtype=torch.float64)

    def loss(w):
        return slope @ w + w @ curvature @ w / 2

    gradient = slope + curvature @ weights
    for j in range(5):
        without = weights.clone()
        without[j] = 0
        change = (loss(without) - loss(weights)).abs()
        bound = curvature[j, j] * weights[j] ** 2 / 2
        assert (change - taylor_importance(weights, gradient)[j]).abs() <= bound + 1e-12


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_the_threshold_is_that_of_a_full_sort(count, data):
    """Of any values, many equal among them, and for any place."""
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    values = generator.normal(size=count).astype(np.float32).round(data.draw(st.integers(0, 6)))
    place = data.draw(st.integers(1, count))
    assert find_smallest(values, place) == np.sort(values)[place - 1]


@pytest.mark.parametrize("arrange", [np.sort, lambda values: np.sort(values)[::-1], np.abs], ids=["up", "down", "abs"])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.35, 0.9999, 1.0])
def test_the_threshold_of_many_values(arrange, share):
    """Of more than a chunk of them, in orders that a sample could be misled by."""
    values = arrange(np.random.default_rng(1).normal(size=600_000).astype(np.float32))
    place = max(1, int(share * len(values)))
    assert find_smallest(values, place) == np.sort(values)[place - 1]


def test_a_sample_that_misleads_costs_time_and_nothing_else():
    """Every value that is looked at is small, all others are large."""
    values = np.full(100_000, 9.0, np.float32) + np.arange(100_000, dtype=np.float32) / 100_000
    values[::101] = 0.0
    assert find_smallest(values, 50_000) == np.sort(values)[49_999]


def test_a_mask_by_hand():
    """Two channels of three: the three least go, but the second channel keeps its best, so that 3 goes instead."""
    importance = torch.tensor([5.0, 3.0, 4.0, 0.1, 0.2, 0.3])
    mask = select_mask(importance, torch.ones(6), 3, [(2, 3)])
    assert mask.tolist() == [True, False, True, False, False, True]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4),
    st.floats(0, 1),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_exactly_so_many_go_and_every_channel_keeps_one(layers, share, seed, dead):
    """Whatever is equal, and where gradients are zero; with unguarded channels, those that go are the least."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(channels * weights for channels, weights in layers)
    importance = torch.randn(count, generator=generator).abs().mul(4).round()
    importance[: count // 2] *= not dead
    weights = torch.randn(count, generator=generator)
    wanted = int(share * max_prunable(layers))
    mask = select_mask(importance.clone(), weights, wanted, layers)
    assert int((~mask).sum()) == wanted
    start = 0
    for channels, each in layers:
        assert mask[start : start + channels * each].view(channels, each).any(1).all()
        start += channels * each
    if wanted and [each for _, each in layers] == [each for _, each in layers if each > wanted]:
        assert importance[~mask].max() <= importance[mask].min()


def test_most_leaves_one_weight_a_channel():
    """64 filters of 3 x 3 x 3 and 10 of 5: all but 74."""
    layers = [(64, 27), (10, 5)]
    assert max_prunable(layers) == 64 * 27 + 50 - 74
    mask = select_mask(torch.rand(1778), torch.rand(1778), max_prunable(layers), layers)
    assert int(mask.sum()) == 74


def test_zeros_go_first_among_equals():
    """Where nothing has importance, what is zero already goes, then the smaller: masks are nested even there."""
    weights = torch.tensor([0.3, 0.0, -0.1, 0.0, 0.2, 0.1])
    assert select_mask(torch.zeros(6), weights, 2, [(1, 6)]).tolist() == [True, False, True, False, True, True]
    assert select_mask(torch.zeros(6), weights, 3, [(1, 6)]).tolist() == [True, False, False, False, True, True]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0.0, 0.5))
def test_masks_are_nested(seed, dead):
    """A zero has no importance: what one mask left out, no later one brings back, whatever gradients come."""
    generator = torch.Generator().manual_seed(seed)
    weights, layers = torch.randn(120, generator=generator), [(4, 10), (8, 10)]
    before = torch.ones(120, dtype=torch.bool)
    for step in range(1, 11):
        gradient = torch.randn(120, generator=generator) * (torch.rand(120, generator=generator) >= dead)
        wanted = min(math.floor(sparsity(step, 10, 0.9) * 120), max_prunable(layers))
        mask = select_mask(taylor_importance(weights, gradient), weights, wanted, layers)
        assert int((~mask).sum()) == wanted
        assert not (mask & ~before).any()
        apply_mask(weights, mask)
        assert torch.equal(weights != 0, mask)
        before = mask


def test_nothing_to_prune():
    """A count of zero keeps all; so does a network of which nothing may go."""
    assert select_mask(torch.rand(4), torch.rand(4), 0, [(2, 2)]).all()
    assert max_prunable([(5, 1)]) == 0


def test_pruning_is_in_place():
    values = torch.tensor([1.0, -2.0, 3.0])
    apply_mask(values, torch.tensor([True, False, True]))
    assert values.tolist() == [1.0, 0.0, 3.0]
