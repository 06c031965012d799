"""Graph of a plan's edge servers: edges, neighbours, connectivity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from random import Random

from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.plan.sites import SitesPlan, devices_by_site
from edge_server.sites.matrix import Edge
from shared.errors import ConfigError

MOST_DRAWS = 1000
"""Most draws of an Erdős-Rényi graph until one is connected."""


def graph_edges(sites: SitesPlan) -> tuple[Edge, ...]:
    """Return the edges of a plan's graph, each once and ordered as the plan's sites.

    Erdős-Rényi: each pair is an edge with probability p, independently; the whole graph is drawn again until it is
    connected (P. Erdős, A. Rényi, "On Random Graphs I", Publicationes Mathematicae 6, 1959). The draw depends on the
    plan's table alone: every site gets the same graph.

    Raises:
        ConfigError: The graph is not connected, or no draw is.
    """
    names, place = sites.names, {name: index for index, name in enumerate(sites.names)}
    match sites.graph:
        case "full":
            edges = set(combinations(names, 2))
        case "ring":
            edges = {_order_edge(place, name, names[index - 1]) for index, name in enumerate(names) if len(names) > 1}
        case "edges":
            edges = {_order_edge(place, site, other) for site, other in sites.edges}
        case "erdos_renyi":
            assert sites.p is not None
            edges = _draw_connected(names, sites.p, sites.seed)
    if parts := connected_components(names, edges)[1:]:
        raise ConfigError(
            f"sites.edges: the graph is not connected, {', '.join(parts[0])} cannot reach {names[0]}; "
            "add an edge between them"
        )
    return tuple(sorted(edges, key=lambda edge: (place[edge[0]], place[edge[1]])))


def _order_edge(place: dict[str, int], site: str, other: str) -> Edge:
    return (site, other) if place[site] < place[other] else (other, site)


def _draw_connected(names: Sequence[str], p: float, seed: int) -> set[Edge]:
    """Return the first connected graph among `MOST_DRAWS` draws."""
    for draw in range(MOST_DRAWS):
        random = Random(f"{seed}/{draw}")  # noqa: S311 - a draw, not a secret
        edges = {pair for pair in combinations(names, 2) if random.random() < p}
        if len(connected_components(names, edges)) == 1:
            return edges
    raise ConfigError(
        f"sites.p: none of {MOST_DRAWS} graphs of {len(names)} sites with p = {p:g} is connected; raise p"
    )


def connected_components(names: Sequence[str], edges: Iterable[Edge]) -> list[list[str]]:
    """Return the connected components of a graph, sorted, with their sites sorted."""
    leader = {name: name for name in names}
    for site, other in edges:
        before, now = leader[other], leader[site]
        leader = {name: now if first == before else first for name, first in leader.items()}
    components: dict[str, list[str]] = {}
    for name in names:
        components.setdefault(leader[name], []).append(name)
    return list(components.values())


def neighbours_of(site: str, edges: Iterable[Edge]) -> tuple[str, ...]:
    """Return the neighbours of a site, in the order of the edges."""
    return tuple(other if first == site else first for first, other in edges if site in (first, other))


def devices_of_sites(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the devices of each site of a plan, in its order."""
    assert plan.sites
    clusters = devices_by_site(plan.sites, [device.name for device in expand_devices(plan.device)])
    return {site: tuple(devices) for site, devices in clusters.items()}


def sizes_of(plan: Plan) -> dict[str, int]:
    """Return the number of devices of each site, in the plan's order."""
    return {site: len(devices) for site, devices in devices_of_sites(plan).items()}


def edges_of(plan: Plan) -> tuple[Edge, ...]:
    """Return the edges of a plan's graph."""
    assert plan.sites
    return graph_edges(plan.sites)
