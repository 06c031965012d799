"""`edge-server plan check`: validate a plan, read its data, summarise both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_server.plan.data import planned_data, test_data
from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.plan.sites import SitesPlan, devices_by_site
from edge_server.rounds.check_plan import load
from edge_server.sites.graph import graph_edges, neighbours_of
from edge_server.sites.matrix import mixing_rows, zeta
from shared.data.load import as_examples
from shared.data.sources.read import read_part
from shared.data.spec import NONE, Data
from shared.data.summary import summarise_part
from shared.errors import ConfigError
from shared.models.base import Model
from shared.models.build import build_initial
from shared.models.evaluate import require_matching_examples
from shared.objectives.training import build_training_objective
from shared.runtime.text_table import TextColumn, TextTable

MOST_VALUES = 1 << 20
"""Input values to read of each data set, which takes about a second for the slowest source."""
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


class DataCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a data set of the plan, of which a bounded part was read.

    Attributes:
        section: Section of the plan, or `test data`.
        finding: Examples, classes or targets, shape and values; or why nothing was read.
    """

    section: str
    finding: str
    notes: tuple[str, ...] = ()


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
    names = [device.name for device in expand_devices(plan.device)]
    result = PlanCheck(plan=plan.name, rounds=plan.rounds, algorithm=plan.algorithm.name, devices=len(names))
    try:
        result = msgspec.structs.replace(result, data=tuple(_check_data(plan)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return _with_sites(result, plan.sites, names) if plan.sites else result


def _check_data(plan: Plan) -> Iterator[DataCheck]:
    """Read a part of each data set that exists on this machine.

    Raises:
        ConfigError: It cannot be read, or does not fit the network or the task.
    """
    sections = {"data": planned_data(plan)} if plan.data else {}
    if plan.data and plan.evaluation.every:
        sections["test data"] = test_data(plan)
    if plan.server_data:
        sections["server_data"] = plan.server_data
    model = build_initial(plan.model, plan.seed) if sections else None
    for section, data in sections.items():
        if data.source == NONE or model is None:
            continue
        if data.path and not Path(data.path).exists():
            yield DataCheck(section=section, finding=f"{data.path} is not on this machine, and was not read")
            continue
        try:
            yield _read_data(plan, section, data, model)
        except ConfigError as error:
            if data.path or not data.is_custom:
                raise ConfigError(f"{section}: {error}") from error
            yield DataCheck(section=section, finding="not read", notes=(str(error),))  # may exist on boards alone


def _read_data(plan: Plan, section: str, data: Data, model: Model) -> DataCheck:
    part = read_part(data, MOST_VALUES)
    summary = summarise_part(data, part, MOST_VALUES)
    examples = as_examples(part.arrays, data)
    require_matching_examples(model.layers, {}, examples, section, build_training_objective(plan.objective))
    return DataCheck(section=section, finding=summary.finding, notes=summary.notes)


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
