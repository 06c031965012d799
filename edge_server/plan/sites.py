"""The table `[sites]` of a plan: which edge server has which devices, and who mixes models with whom how often.

Rounds of a plan with several sites are edge rounds. Number l*q + r + 1 is edge round r of global round l, both from 0,
where q edge rounds are a global round; people are shown it as `l.r`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from edge_server.plan.sections import Section
from shared.errors import ConfigError
from shared.protocol.topics import check_name

MOST_NAMED = 5
"""Devices in a message."""
ROUND = re.compile("[0-9]{1,9}")


class SitesPlan(Section, frozen=True, kw_only=True):
    """Several edge servers that train together, each with its own devices; absent: one server has all devices.

    Now and then a site mixes its model with its neighbours'. Every `[cohort]`, `[round]` and `[evaluation]` is a
    site's own; of `[budget] joules` each has the share of its devices.

    Attributes:
        clusters: The devices of each site, as patterns of names (`*`, `?`, `[ab]`); the sites are in the order of the
            keys. Every `[[device]]` belongs to one of them.
        edge_rounds: Rounds of a site from one mixing to the next; `rounds` is a multiple of it.
        graph: Who mixes with whom: `ring`: each site with the one before and the one behind it; `full`: all with all;
            `erdos_renyi`: each pair with probability `p`, drawn again until the graph is connected; `edges`: those
            that are listed.
        p: Of `erdos_renyi`: probability of an edge, above 0 and at most 1.
        seed: Of `erdos_renyi`.
        edges: Of `edges`: pairs of sites.
        deadline_s: Time after which a neighbour's model, or word of it, is no longer waited for.
        backhaul_mbit_s: Replay: rate of the link from one site to another, each way; absent for no limit.
        backhaul_delay_s: Replay: its one-way delay.
    """

    clusters: dict[str, tuple[str, ...]]
    edge_rounds: int = 1
    graph: Literal["ring", "full", "erdos_renyi", "edges"] = "ring"
    p: float | None = None
    seed: int = 0
    edges: tuple[tuple[str, str], ...] = ()
    deadline_s: float = 60.0
    backhaul_mbit_s: float | None = 50.0
    backhaul_delay_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a table that is wrong whatever the devices are."""
        if not self.clusters or self.edge_rounds < 1:
            raise ValueError("clusters must name at least one site, edge_rounds must be >= 1")
        is_drawn = self.graph == "erdos_renyi"
        if is_drawn != (self.p is not None) or (self.p is not None and not 0 < self.p <= 1):
            raise ValueError('p must be above 0 and at most 1 with graph = "erdos_renyi", and stands beside no other')
        if self.seed and not is_drawn:
            raise ValueError('seed stands beside graph = "erdos_renyi" alone')
        if bool(self.edges) != (self.graph == "edges" and len(self.clusters) > 1):
            raise ValueError('edges are listed with graph = "edges" and more than one site, and beside no other')
        if not 0 < self.deadline_s < math.inf or not 0 <= self.backhaul_delay_s < math.inf:
            raise ValueError("deadline_s must be > 0, backhaul_delay_s >= 0, and both finite")
        if self.backhaul_mbit_s is not None and not 0 < self.backhaul_mbit_s < math.inf:
            raise ValueError("backhaul_mbit_s must be > 0 and finite; leave it out for the usual rate")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the sites, in their order."""
        return tuple(self.clusters)

    def reordered(self, names: Sequence[str]) -> SitesPlan:
        """Return the same table with its sites in another order; those that are not named come last."""
        clusters = {site: self.clusters[site] for site in (*names, *self.clusters) if site in self.clusters}
        return msgspec.structs.replace(self, clusters=clusters)

    def is_mixed(self, number: int) -> bool:
        """Tell whether a round is the last edge round of its global round, at whose end the sites mix."""
        return number % self.edge_rounds == 0


def restore_site_order(record: Any) -> None:
    """Put the sites of a record's plan, whose keys were sorted when it was written, back into their order; or note it.

    Args:
        record: Has a `plan`, and the names of its `sites`, empty where nobody noted them yet.
    """
    if record.plan.sites:
        sites = record.plan.sites.reordered(record.sites)
        msgspec.structs.force_setattr(record, "plan", msgspec.structs.replace(record.plan, sites=sites))
        msgspec.structs.force_setattr(record, "sites", sites.names)


def devices_by_site(sites: SitesPlan, devices: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the devices of each site, in the order in which the plan has them; one that two claim is in both."""
    return {
        site: tuple(name for name in devices if any(fnmatchcase(name, pattern) for pattern in patterns))
        for site, patterns in sites.clusters.items()
    }


def round_number(global_round: int, edge_round: int, edge_rounds: int) -> int:
    """Return the number, from 1, of edge round r of global round l, both from 0.

    Args:
        edge_round: r, below `edge_rounds`.
        edge_rounds: Of a global round; q.
    """
    return global_round * edge_rounds + edge_round + 1


def round_position(number: int, edge_rounds: int) -> tuple[int, int]:
    """Return global round and edge round, both from 0, of a round's number; the inverse of `round_number`."""
    return divmod(number - 1, edge_rounds)


def round_name(number: int, edge_rounds: int) -> str:
    """Return what people are shown of a round: `l.r`."""
    return "{}.{}".format(*round_position(number, edge_rounds))


def parse_round(text: str, sites: SitesPlan | msgspec.UnsetType) -> int:
    """Return the number of a round that is given as that, or as `l.r` where the plan has sites.

    Raises:
        ConfigError: It is neither, or the edge round is beyond a global one.
    """
    parts = text.split(".")
    if not all(ROUND.fullmatch(part) for part in parts) or len(parts) > (2 if sites else 1):
        forms = "a number from 1, or GLOBAL.EDGE, both from 0" if sites else "a number from 1"
        raise ConfigError(f"round {text!r}: give {forms}")
    if not sites or len(parts) == 1:
        return int(text)
    global_round, edge_round = map(int, parts)
    if edge_round >= sites.edge_rounds:
        raise ConfigError(f"round {text!r}: a global round has the edge rounds 0 to {sites.edge_rounds - 1}")
    return round_number(global_round, edge_round, sites.edge_rounds)


def check_sites(sites: SitesPlan, devices: Sequence[str], rounds: int, least: int, path: Path) -> None:
    """Refuse clusters that do not part the devices, edges between sites that are none, rounds that are cut off.

    Args:
        devices: Names of the plan's devices.
        least: Devices that a site's round waits for.

    Raises:
        ConfigError: As said.
    """
    for name in sites.names:
        check_name(name, f"{path}: sites.clusters")
    by_folded_name: dict[str, str] = {}
    for name in sites.names:
        other = by_folded_name.setdefault(name.casefold(), name)
        if other != name:
            raise ConfigError(
                f"{path}: sites.clusters: {other!r} and {name!r} differ only in case, and their runs could share a "
                "folder; rename one of them"
            )
    if rounds % sites.edge_rounds:
        raise ConfigError(
            f"{path}: rounds: {rounds} edge rounds are no whole number of global rounds of sites.edge_rounds = "
            f"{sites.edge_rounds}; give a multiple"
        )
    for problem in (*_wrong_clusters(sites, devices), *_wrong_edges(sites)):
        raise ConfigError(f"{path}: sites.{problem}")
    for site, those in devices_by_site(sites, devices).items():
        if len(those) < least:
            raise ConfigError(
                f"{path}: cohort.min_devices: site {site} has {len(those)} devices and its rounds wait for {least}; "
                "lower that, or give the site more"
            )


def _wrong_clusters(sites: SitesPlan, devices: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the clusters."""
    if not devices:
        yield "clusters: the plan names no device that could belong to a site; add [[device]] sections"
    clusters = devices_by_site(sites, devices)
    homes = {device: [site for site, those in clusters.items() if device in those] for device in devices}
    for device, sites_of_device in homes.items():
        if len(sites_of_device) > 1:
            names = " and ".join(sites_of_device)
            yield f"clusters: device {device!r} belongs to {names}; let only one pattern match it"
    if homeless := [device for device, sites_of_device in homes.items() if not sites_of_device]:
        some = ", ".join(homeless[:MOST_NAMED]) + ", …" * (len(homeless) > MOST_NAMED)
        yield f"clusters: {len(homeless)} devices belong to no site ({some}); add a pattern that matches them"
    for site, patterns in sites.clusters.items():
        if idle := [repr(pattern) for pattern in patterns if not any(fnmatchcase(name, pattern) for name in devices)]:
            yield f"clusters.{site}: no device matches {', '.join(idle)}; take it out, or correct it"
        elif not patterns:
            yield f"clusters.{site}: it has no pattern, and so no device; add one, or take the site out"


def _wrong_edges(sites: SitesPlan) -> Iterator[str]:
    """Yield what is wrong with the listed edges."""
    listed = set[frozenset[str]]()
    for edge in sites.edges:
        for site in edge:
            if site not in sites.clusters:
                yield f"edges: {site!r} is no site; known: {', '.join(sites.names)}"
        if edge[0] == edge[1]:
            yield f"edges: {edge[0]!r} is no neighbour of itself; take the pair out"
        if frozenset(edge) in listed:
            yield f"edges: {edge[0]!r} and {edge[1]!r} are listed twice; take one pair out"
        listed.add(frozenset(edge))
