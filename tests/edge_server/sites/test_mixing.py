"""Properties (h) 8 of HCEF's mixing: stochastic, of the graph's pattern, mean kept, disagreement shrunk by zeta."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from random import Random

import pytest
import torch

from edge_server.sites.graph import connected_components
from edge_server.sites.matrix import mixing_rows, row_without, zeta
from edge_server.sites.mixing import mix_trees

CASES = [(seed, sites, unequal) for seed in range(3) for sites in (1, 2, 5, 8) for unequal in (False, True)]


def instance(seed: int, count: int, *, unequal: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return sizes and edges of a random graph, which need not be connected."""
    random = Random(seed)
    names = [f"s{index}" for index in range(count)]
    sizes = {name: random.randint(1, 20) if unequal else 4 for name in names}
    return sizes, [pair for pair in combinations(names, 2) if random.random() < 0.5]


@pytest.mark.parametrize(("seed", "count", "unequal"), CASES)
def test_rows_sum_to_one_and_the_mean_over_devices_is_kept(seed, count, unequal):
    """Exactly, in fractions: W 1 = 1 and N^T W = N^T; symmetric where all have as many devices."""
    sizes, edges = instance(seed, count, unequal=unequal)
    rows = mixing_rows(sizes, edges)
    assert all(sum(row.values()) == 1 and min(row.values()) > 0 for row in rows.values())
    for site in sizes:
        assert sum(size * rows[one].get(site, Fraction()) for one, size in sizes.items()) == sizes[site]
    if not unequal:
        assert all(weight == rows[other][one] for one, row in rows.items() for other, weight in row.items())


@pytest.mark.parametrize(("seed", "count", "unequal"), CASES)
def test_the_pattern_is_the_graph_and_the_diagonal(seed, count, unequal):
    sizes, edges = instance(seed, count, unequal=unequal)
    places = {(one, other) for one, row in mixing_rows(sizes, edges).items() for other in row}
    assert places == {*edges, *((other, one) for one, other in edges), *((name, name) for name in sizes)}


@pytest.mark.parametrize(("seed", "count", "unequal"), CASES)
def test_zeta_is_below_one_exactly_where_the_graph_is_connected(seed, count, unequal):
    sizes, edges = instance(seed, count, unequal=unequal)
    factor = zeta(sizes, mixing_rows(sizes, edges))
    if len(connected_components(list(sizes), edges)) == 1:
        assert 0 <= factor < 1 - 1e-9
    else:
        assert factor == pytest.approx(1.0)


@pytest.mark.parametrize(("seed", "count", "unequal"), CASES)
def test_a_step_keeps_the_mean_and_shrinks_disagreement_by_zeta_at_the_least(seed, count, unequal):
    """Of random models in float32; the mean is weighted by devices, and so is disagreement."""
    sizes, edges = instance(seed, count, unequal=unequal)
    rows, draws = mixing_rows(sizes, edges), torch.Generator().manual_seed(seed)
    before = {site: {"w": torch.randn(50, generator=draws)} for site in sizes}
    after = {site: mix_trees(rows[site], {one: before[one] for one in rows[site]}) for site in sizes}
    means = [weighted_mean(sizes, trees) for trees in (before, after)]
    torch.testing.assert_close(means[1], means[0], rtol=0, atol=1e-6)
    ratio = zeta(sizes, rows)
    assert disagreement(sizes, after) <= ratio * disagreement(sizes, before) * (1 + 1e-6) + 1e-6


def weighted_mean(sizes, trees):
    return sum(size * trees[site]["w"].double() for site, size in sizes.items()) / sum(sizes.values())


def disagreement(sizes, trees):
    mean = weighted_mean(sizes, trees)
    return math.sqrt(sum(size * float((trees[site]["w"] - mean).square().sum()) for site, size in sizes.items()))


def test_a_ring_of_eight_is_that_of_the_paper():
    """Metropolis weights 1/3, and zeta 0.8047 (spec (b) 11)."""
    sizes = {f"s{index}": 8 for index in range(8)}
    rows = mixing_rows(sizes, [(f"s{index}", f"s{index + 1}") for index in range(7)] + [("s0", "s7")])
    assert {weight for row in rows.values() for weight in row.values()} == {Fraction(1, 3)}
    assert zeta(sizes, rows) == pytest.approx((1 + 2 * math.cos(math.pi / 4)) / 3)
    assert zeta(sizes, rows) == pytest.approx(0.8047, abs=5e-5)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_complete_graph_agrees_in_one_step_to_the_last_bit(count):
    """Weights 1/m, also 1/3 and 1/7, which no float is."""
    sizes = {f"s{index}": 5 for index in range(count)}
    rows = mixing_rows(sizes, combinations(sizes, 2))
    assert zeta(sizes, rows) == pytest.approx(0.0, abs=1e-12)
    draws = torch.Generator().manual_seed(1)
    trees = {site: {"w": torch.randn(1000, generator=draws) * 1e3} for site in sizes}
    first, *others = [mix_trees(rows[site], trees)["w"] for site in sizes]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("seed", "count", "unequal"), CASES)
def test_the_weight_of_an_edge_that_is_off_goes_to_both_diagonals(seed, count, unequal):
    """Rows still sum to 1 and the mean over devices is still kept, whichever edges are off."""
    sizes, edges = instance(seed, count, unequal=unequal)
    rows = mixing_rows(sizes, edges)
    off = [edge for edge in edges if Random(f"{seed}/{edge}").random() < 0.5]
    cut = {}
    for site, row in rows.items():
        absent = {other for edge in off for other in edge if site in edge and other != site}
        cut[site] = row_without(row, site, absent)
        assert list(cut[site]) == [other for other in row if other not in absent], "in the plan's order"
    assert all(sum(row.values()) == 1 for row in cut.values())
    for site in sizes:
        assert sum(size * cut[one].get(site, Fraction()) for one, size in sizes.items()) == sizes[site]
    assert row_without(rows["s0"], "s0", set(sizes)) == {"s0": 1}, "alone, a site keeps its model"


def test_leaves_keep_their_type():
    """Integers, as BatchNorm's counter, are rounded; 16 bits are summed in 64."""
    row = {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    trees = {
        "a": {"n": torch.tensor(3), "h": torch.tensor([1.0], dtype=torch.float16), "f": torch.zeros(2, 2)},
        "b": {"n": torch.tensor(4), "h": torch.tensor([4.0], dtype=torch.float16), "f": torch.ones(2, 2)},
    }
    mixed = mix_trees(row, trees)
    assert mixed["n"].dtype == torch.int64
    assert int(mixed["n"]) == 4
    assert mixed["h"].dtype == torch.float16
    assert float(mixed["h"]) == 3.0
    torch.testing.assert_close(mixed["f"], torch.full((2, 2), 2 / 3))
    assert float(trees["a"]["f"].sum()) == 0.0, "what came is left as it was"
