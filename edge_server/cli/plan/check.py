"""`edge-server plan check`: validate a plan, read its data, summarise both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import devices
from edge_server.plan.sites import SitesPlan, devices_by_site
from edge_server.rounds.check_data import DataCheck, check_data
from edge_server.rounds.check_plan import load
from edge_server.sites.graph import graph_edges, neighbours_of
from edge_server.sites.matrix import mixing_rows, zeta
from shared.errors import ConfigError
from shared.runtime.text_table import TextColumn, TextTable

MOST_NAMED = 6
"""Devices of a site listed in a table."""


class SiteCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one site.

    Attributes:
        devices: Names of its devices.
        neighbours: Sites that it mixes models with.
        weights: Weight of each site's model in the mix, including its own; the sum is 1.
    """

    site: str
    devices: tuple[str, ...]
    neighbours: tuple[str, ...]
    weights: dict[str, float]


class PlanCheck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Summary of a valid plan.

    Attributes:
        devices: Number of devices that it names.
        graph: Topology of the sites; absent without sites.
        edge_rounds: Rounds between two mixing steps.
        zeta: Upper bound of the factor by which one mixing step reduces the disagreement of the sites.
    """

    plan: str
    rounds: int
    algorithm: str
    devices: int
    graph: str = ""
    edge_rounds: int = 0
    zeta: float = 0.0
    sites: tuple[SiteCheck, ...] = ()
    data: tuple[DataCheck, ...] = ()


def check_plan(path: Path, data_root: Path) -> PlanCheck:
    """Read a plan, and a part of those of its data sets that are on this machine; return a summary.

    Raises:
        ConfigError: It is invalid, or its data cannot be read or do not fit the network; the message has the remedy.
    """
    plan = load(path, data_root, several_sites=True)
    fleet = devices(plan, plan.local) if plan.local else expand_devices(plan.device)
    names = [device.name for device in expand_devices(plan.device)]
    result = PlanCheck(plan=plan.name, rounds=plan.rounds, algorithm=plan.algorithm.name, devices=len(names))
    try:
        result = msgspec.structs.replace(result, data=tuple(check_data(plan, fleet)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
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


def format_check(result: PlanCheck) -> Iterator[TextTable | str]:
    """Yield the summary's lines and table."""
    yield f"{result.plan} is valid: {result.rounds} rounds of {result.algorithm}, {result.devices} devices named"
    for data in result.data:
        yield f"{data.section}: {data.finding}"
        yield from (f"{data.section}: warning: {note}" for note in data.notes)
    if not result.sites:
        return
    after = "every round" if result.edge_rounds == 1 else f"every {result.edge_rounds} edge rounds"
    columns = [TextColumn("site"), TextColumn("devices", least=16), TextColumn("weights", least=16)]
    title = f"{len(result.sites)} sites, graph {result.graph}: mixing after {after}, zeta {result.zeta:.4f}"
    yield TextTable(columns, [(site.site, _devices(site), _weights(site)) for site in result.sites], title=title)


def _devices(site: SiteCheck) -> str:
    more = ", …" if len(site.devices) > MOST_NAMED else ""
    return f"{len(site.devices)}: {', '.join(site.devices[:MOST_NAMED])}{more}"


def _weights(check: SiteCheck) -> str:
    return ", ".join(f"{site} {weight:.4f}" for site, weight in check.weights.items())
