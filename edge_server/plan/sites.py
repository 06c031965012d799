"""Plan table `[sites]`: clusters of devices, mixing graph, and edge round numbers.

Rounds of a plan with several sites are edge rounds. Number l*q + r + 1 is edge round r of global round l, both from 0,
with q edge rounds per global round; users see it as `l.r`.
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
"""Maximum number of device names in a message."""
ROUND = re.compile("[0-9]{1,9}")


class SitesPlan(Section, frozen=True, kw_only=True):
    """Several edge servers that train together, each with a cluster of devices; absent: one server has all devices.

    A site mixes its model with its neighbours' after every `edge_rounds` rounds. `[cohort]`, `[round]` and
    `[evaluation]` apply to each site separately; of `[budget] joules` each has the share of its devices.

    Attributes:
        clusters: Devices of each site, as name patterns (`*`, `?`, `[ab]`); the sites are in the order of the keys.
            Every `[[device]]` belongs to exactly one site.
        edge_rounds: Rounds of a site from one mixing to the next; `rounds` is a multiple of it.
        graph: Neighbours of a site: `ring`: the previous and the next site; `full`: all others; `erdos_renyi`: each
            pair with probability `p`, drawn again until the graph is connected; `edges`: the listed pairs.
        p: Probability of an edge, above 0 and at most 1, for `erdos_renyi`.
        seed: Seed of the graph, for `erdos_renyi`.
        edges: Pairs of sites, for `edges`.
        deadline_s: Time to wait for a neighbour's model, or for a sign of it.
        backhaul_mbit_s: Replay: rate of a link between sites, in each direction; absent for no limit.
        backhaul_delay_s: Replay: one-way delay of a link between sites.
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
        """Reject values that are wrong for any set of devices."""
        if not self.clusters or self.edge_rounds < 1:
            raise ValueError("clusters must name at least one site, edge_rounds must be >= 1")
        is_drawn = self.graph == "erdos_renyi"
        if is_drawn != (self.p is not None) or (self.p is not None and not 0 < self.p <= 1):
            raise ValueError('p must be above 0 and at most 1, and set only with graph = "erdos_renyi"')
        if self.seed and not is_drawn:
            raise ValueError('seed is set; use it only with graph = "erdos_renyi"')
        if bool(self.edges) != (self.graph == "edges" and len(self.clusters) > 1):
            raise ValueError('edges must be set with graph = "edges" and more than one site, and only then')
        if not 0 < self.deadline_s < math.inf or not 0 <= self.backhaul_delay_s < math.inf:
            raise ValueError("deadline_s must be > 0, backhaul_delay_s >= 0, and both finite")
        if self.backhaul_mbit_s is not None and not 0 < self.backhaul_mbit_s < math.inf:
            raise ValueError("backhaul_mbit_s must be > 0 and finite; remove it for the default rate")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites, in the order of `clusters`."""
        return tuple(self.clusters)

    def order_sites(self, names: Sequence[str]) -> SitesPlan:
        """Return the table with its sites in the order of `names`; other sites come last."""
        clusters = {site: self.clusters[site] for site in (*names, *self.clusters) if site in self.clusters}
        return msgspec.structs.replace(self, clusters=clusters)

    def is_mixed(self, number: int) -> bool:
        """True for the last edge round of a global round, after which the sites mix."""
        return number % self.edge_rounds == 0


def restore_site_order(record: Any) -> None:
    """Restore the site order of a record's plan, whose keys were sorted when it was written.

    Args:
        record: Has a `plan`, and its site names as `sites`; if these are empty, they are set from the plan.
    """
    if record.plan.sites:
        sites = record.plan.sites.order_sites(record.sites)
        msgspec.structs.force_setattr(record, "plan", msgspec.structs.replace(record.plan, sites=sites))
        msgspec.structs.force_setattr(record, "sites", sites.names)


def devices_by_site(sites: SitesPlan, devices: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the devices of each site, in the plan's order; a device that matches two sites is in both."""
    return {
        site: tuple(name for name in devices if any(fnmatchcase(name, pattern) for pattern in patterns))
        for site, patterns in sites.clusters.items()
    }


def round_number(global_round: int, edge_round: int, edge_rounds: int) -> int:
    """Return the number, from 1, of an edge round r (`edge_round`, from 0) of global round l (from 0).

    Args:
        edge_rounds: q, edge rounds per global round.
    """
    return global_round * edge_rounds + edge_round + 1


def round_position(number: int, edge_rounds: int) -> tuple[int, int]:
    """Return (global round, edge round), both from 0; the inverse of `round_number`."""
    return divmod(number - 1, edge_rounds)


def round_name(number: int, edge_rounds: int) -> str:
    """Return the display name of a round: `l.r`."""
    return "{}.{}".format(*round_position(number, edge_rounds))


def parse_round(text: str, sites: SitesPlan | msgspec.UnsetType) -> int:
    """Parse a round number, or `l.r` if the plan has sites.

    Raises:
        ConfigError: The text is neither, or the edge round is out of range.
    """
    parts = text.split(".")
    if not all(ROUND.fullmatch(part) for part in parts) or len(parts) > (2 if sites else 1):
        forms = "a number from 1, or GLOBAL.EDGE, both from 0" if sites else "a number from 1"
        raise ConfigError(f"round {text!r} is invalid; give {forms}")
    if not sites or len(parts) == 1:
        return int(text)
    global_round, edge_round = map(int, parts)
    if edge_round >= sites.edge_rounds:
        raise ConfigError(f"round {text!r}: edge rounds of a global round are 0 to {sites.edge_rounds - 1}")
    return round_number(global_round, edge_round, sites.edge_rounds)


def check_sites(sites: SitesPlan, devices: Sequence[str], rounds: int, least: int, path: Path) -> None:
    """Check that clusters partition the devices, edges connect sites, and rounds fill global rounds.

    Args:
        devices: Names of the plan's devices.

    Raises:
        ConfigError: A check failed.
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
            f"{path}: rounds: {rounds} edge rounds are not a multiple of sites.edge_rounds = "
            f"{sites.edge_rounds}; use a multiple"
        )
    for problem in (*_cluster_problems(sites, devices), *_edge_problems(sites)):
        raise ConfigError(f"{path}: sites.{problem}")
    for site, those in devices_by_site(sites, devices).items():
        if len(those) < least:
            raise ConfigError(
                f"{path}: cohort.min_devices: site {site} has {len(those)} devices and its rounds wait for {least}; "
                "lower that, or give the site more"
            )


def _cluster_problems(sites: SitesPlan, devices: Sequence[str]) -> Iterator[str]:
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
            yield f"clusters.{site}: no device matches {', '.join(idle)}; correct or remove it"
        elif not patterns:
            yield f"clusters.{site}: it has no pattern, and thus no device; add one, or remove the site"


def _edge_problems(sites: SitesPlan) -> Iterator[str]:
    listed = set[frozenset[str]]()
    for edge in sites.edges:
        for site in edge:
            if site not in sites.clusters:
                yield f"edges: {site!r} is not a site; known: {', '.join(sites.names)}"
        if edge[0] == edge[1]:
            yield f"edges: {edge[0]!r} is paired with itself; remove the pair"
        if frozenset(edge) in listed:
            yield f"edges: {edge[0]!r} and {edge[1]!r} are listed twice; remove one pair"
        listed.add(frozenset(edge))
