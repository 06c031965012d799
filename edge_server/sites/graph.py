"""The graph of a plan's edge servers: its edges, who is whose neighbour, whether it is connected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from random import Random

from edge_server.plan.devices import expanded
from edge_server.plan.plan import Plan
from edge_server.plan.sites import SitesPlan, devices_by_site
from edge_server.sites.matrix import Edge
from shared.errors import ConfigError

MOST_DRAWS = 1000
"""Of one Erdős-Rényi graph, until one is connected."""


def graph_edges(sites: SitesPlan) -> tuple[Edge, ...]:
    """Return the edges of a plan's graph, each once, the site that is first in the plan's order before the other.

    Erdős-Rényi: each pair is an edge with probability p, independently; the whole graph is drawn again until it is
    connected (P. Erdős, A. Rényi, "On Random Graphs I", Publicationes Mathematicae 6, 1959). The draw is a function of
    the table alone: every site finds the same graph.

    Raises:
        ConfigError: The graph is not connected, or no draw of that many is.
    """
    names, place = sites.names, {name: index for index, name in enumerate(sites.names)}
    match sites.graph:
        case "full":
            found = set(combinations(names, 2))
        case "ring":
            found = {_ordered(place, one, names[index - 1]) for index, one in enumerate(names) if len(names) > 1}
        case "edges":
            found = {_ordered(place, *edge) for edge in sites.edges}
        case "erdos_renyi":
            assert sites.p is not None
            found = _drawn(names, sites.p, sites.seed)
    if parts := parts_of(names, found)[1:]:
        raise ConfigError(
            f"sites.edges: the graph is not connected, {', '.join(parts[0])} would never hear of {names[0]}; "
            "add an edge between them"
        )
    return tuple(sorted(found, key=lambda edge: (place[edge[0]], place[edge[1]])))


def _ordered(place: dict[str, int], one: str, other: str) -> Edge:
    return (one, other) if place[one] < place[other] else (other, one)


def _drawn(names: Sequence[str], p: float, seed: int) -> set[Edge]:
    """Return the first connected graph of as many draws as are made."""
    for draw in range(MOST_DRAWS):
        random = Random(f"{seed}/{draw}")  # noqa: S311 - a draw, not a secret
        edges = {pair for pair in combinations(names, 2) if random.random() < p}
        if len(parts_of(names, edges)) == 1:
            return edges
    raise ConfigError(
        f"sites.p: none of {MOST_DRAWS} graphs of {len(names)} sites with p = {p:g} is connected; raise p"
    )


def parts_of(names: Sequence[str], edges: Iterable[Edge]) -> list[list[str]]:
    """Return the connected components of a graph, sorted, the sites of each sorted."""
    leader = {name: name for name in names}
    for one, other in edges:
        before, now = leader[other], leader[one]
        leader = {name: now if first == before else first for name, first in leader.items()}
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(leader[name], []).append(name)
    return list(found.values())


def neighbours_of(site: str, edges: Iterable[Edge]) -> tuple[str, ...]:
    """Return the sites that an edge joins to one, in the order of the edges."""
    return tuple(other if one == site else one for one, other in edges if site in (one, other))


def devices_of_sites(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the devices of each site of a plan, in its order."""
    assert plan.sites
    clusters = devices_by_site(plan.sites, [one.name for one in expanded(plan.device)])
    return {site: tuple(devices) for site, devices in clusters.items()}


def sizes_of(plan: Plan) -> dict[str, int]:
    """Return how many devices each site of a plan has, in its order."""
    return {site: len(devices) for site, devices in devices_of_sites(plan).items()}


def edges_of(plan: Plan) -> tuple[Edge, ...]:
    """Return the edges of a plan's graph."""
    assert plan.sites
    return graph_edges(plan.sites)
