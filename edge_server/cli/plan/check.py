"""`edge-server plan check`: whether a plan can be run, and what follows from its table `[sites]`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_server.plan.devices import expanded
from edge_server.plan.sites import SitesPlan, devices_by_site
from edge_server.rounds.check_plan import load
from edge_server.sites.graph import graph_edges, neighbours_of
from edge_server.sites.matrix import mixing_rows, zeta
from shared.runtime.text_table import TextColumn, TextTable

MOST_NAMED = 6
"""Devices of a site in a table."""


class SiteCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One site.

    Attributes:
        devices: Those that belong to it.
        neighbours: Sites that it mixes with.
        weights: What it takes of each model, its own among them; they sum to 1.
    """

    site: str
    devices: tuple[str, ...]
    neighbours: tuple[str, ...]
    weights: dict[str, float]


class PlanCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is found of a plan that can be run.

    Attributes:
        rounds: How many it has.
        devices: How many it names.
        graph: Of its sites; absent where it has none.
        edge_rounds: From one mixing to the next.
        zeta: Factor by which a mixing step shrinks the disagreement of the sites at the least.
    """

    plan: str
    rounds: int
    algorithm: str
    devices: int
    graph: str = ""
    edge_rounds: int = 0
    zeta: float = 0.0
    sites: tuple[SiteCheck, ...] = ()


def check_plan(path: Path, data_root: Path) -> PlanCheck:
    """Read a plan and return what is found.

    Raises:
        ConfigError: It cannot be run; the message says where and what to do.
    """
    plan = load(path, data_root, several_sites=True)
    names = [device.name for device in expanded(plan.device)]
    result = PlanCheck(plan=plan.name, rounds=plan.rounds, algorithm=plan.algorithm.name, devices=len(names))
    return _with_sites(result, plan.sites, names) if plan.sites else result


def _with_sites(result: PlanCheck, sites: SitesPlan, names: list[str]) -> PlanCheck:
    clusters, edges = devices_by_site(sites, names), graph_edges(sites)
    sizes = {site: len(devices) for site, devices in clusters.items()}
    rows = mixing_rows(sizes, edges)
    each = tuple(
        SiteCheck(
            site=site,
            devices=devices,
            neighbours=neighbours_of(site, edges),
            weights={other: float(weight) for other, weight in rows[site].items()},
        )
        for site, devices in clusters.items()
    )
    factor = zeta(sizes, rows)
    return msgspec.structs.replace(result, graph=sites.graph, edge_rounds=sites.edge_rounds, zeta=factor, sites=each)


def check_parts(result: PlanCheck) -> Iterator[TextTable | str]:
    """Yield what is shown of a plan that can be run."""
    yield f"{result.plan} is a plan: {result.rounds} rounds of {result.algorithm}, {result.devices} devices named"
    if not result.sites:
        return
    after = "every round" if result.edge_rounds == 1 else f"every {result.edge_rounds} edge rounds"
    columns = [TextColumn("site"), TextColumn("devices", least=16), TextColumn("weights", least=16)]
    title = f"{len(result.sites)} sites, graph {result.graph}: they mix after {after}, zeta {result.zeta:.4f}"
    yield TextTable(columns, [(site.site, _devices(site), _weights(site)) for site in result.sites], title=title)


def _devices(site: SiteCheck) -> str:
    more = ", …" if len(site.devices) > MOST_NAMED else ""
    return f"{len(site.devices)}: {', '.join(site.devices[:MOST_NAMED])}{more}"


def _weights(check: SiteCheck) -> str:
    return ", ".join(f"{site} {weight:.4f}" for site, weight in check.weights.items())
