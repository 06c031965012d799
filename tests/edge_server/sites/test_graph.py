"""Graphs of sites: their edges in the plan's order, random ones the same for everybody, connected or refused."""

from __future__ import annotations

from itertools import combinations

import pytest

from edge_server.plan.sites import SitesPlan
from edge_server.sites.graph import connected_components, graph_edges, neighbours_of
from shared.errors import ConfigError
from tests.naming import naming


def sites_of(count: int, **keys: object) -> SitesPlan:
    return SitesPlan(clusters={f"s{index}": (f"s{index}-*",) for index in range(count)}, **keys)


@pytest.mark.parametrize(
    ("count", "edges"),
    [
        (1, []),
        (2, [("s0", "s1")]),
        (3, [("s0", "s1"), ("s0", "s2"), ("s1", "s2")]),
        (4, [("s0", "s1"), ("s0", "s3"), ("s1", "s2"), ("s2", "s3")]),
    ],
)
def test_rings(count, edges):
    """Each edge once, the site that is first in the plan's order first: it owns the edge."""
    assert list(graph_edges(sites_of(count))) == edges


@pytest.mark.parametrize("count", [1, 2, 5])
def test_full_graphs(count):
    assert list(graph_edges(sites_of(count, graph="full"))) == list(
        combinations([f"s{index}" for index in range(count)], 2)
    )


def test_listed_edges_take_the_plans_order():
    found = graph_edges(sites_of(3, graph="edges", edges=(("s2", "s0"), ("s1", "s2"))))
    assert found == (("s0", "s2"), ("s1", "s2"))
    assert neighbours_of("s2", found) == ("s0", "s1")
    assert neighbours_of("s0", found) == ("s2",)


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_are_connected_and_the_same_for_everybody(seed):
    table = sites_of(8, graph="erdos_renyi", p=0.25, seed=seed)
    edges = graph_edges(table)
    assert edges == graph_edges(table)
    assert len(connected_components(table.names, edges)) == 1
    assert set(edges) <= set(combinations(table.names, 2))


def test_random_graphs_differ_with_the_seed_and_grow_with_p():
    tables = [sites_of(8, graph="erdos_renyi", p=0.5, seed=seed) for seed in range(20)]
    graphs = {graph_edges(table) for table in tables}
    assert len(graphs) == 20
    assert 10 < sum(map(len, graphs)) / 20 < 20, "28 pairs, of which each is one in half of the draws"
    assert len(graph_edges(sites_of(8, graph="erdos_renyi", p=1.0))) == 28


def test_a_graph_that_is_not_connected_is_refused():
    with pytest.raises(ConfigError, match=naming("sites.edges", "s2, s3", "s0")):
        graph_edges(sites_of(4, graph="edges", edges=(("s0", "s1"), ("s2", "s3"))))
    with pytest.raises(ConfigError, match=naming("sites.p", 0.001)):
        graph_edges(sites_of(12, graph="erdos_renyi", p=0.001))
