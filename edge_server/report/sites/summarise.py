"""Multi-site digest: summarise the sites of a plan from their journals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from edge_server.journal.budget import Ledger
from edge_server.journal.compared import measured_rounds
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.decision import Coordinated, TermBegan
from edge_server.journal.outcome import refused_models
from edge_server.journal.records import AnyRecord, Gossiped, RoundOpened, select, valid_records
from edge_server.journal.runs import make_round_namer
from edge_server.plan.plan import Plan
from edge_server.plan.sites import SitesPlan
from edge_server.record.amounts import NONE, Amount, amount_or_unknown, quantile, share_or_none, sum_known
from edge_server.record.index import RunRecord
from edge_server.report.digest import Digest, RoundDigest
from edge_server.report.sites.digest import Coordinating, EdgeDigest, MixingDigest, SiteDigest, SitesDigest, Spread
from edge_server.sites.graph import graph_edges, sizes_of
from edge_server.sites.link import encode_plan
from edge_server.sites.matrix import mixing_rows, zeta
from edge_server.sites.overview import find_site
from edge_server.sites.sketch import disagreement, mean, unpack_sketch

HEARD = "heard"
"""Cause of a term at a site that only heard of it."""


@dataclass(frozen=True)
class SiteRun:
    """A site's run: digest and journal."""

    site: str
    digest: Digest
    records: Sequence[AnyRecord]

    @cached_property
    def gossips(self) -> dict[int, Gossiped]:
        """Gossips by round; of one repeated after a restart, the last."""
        return RunRecord(self.records).gossips

    @cached_property
    def openings(self) -> list[RoundOpened]:
        """Openings of training rounds."""
        openings = valid_records(self.records, RoundOpened)
        return [opening for opening in openings if opening.round <= self.digest.plan.rounds]

    @cached_property
    def rounds(self) -> dict[int, RoundDigest]:
        """Ended rounds by number."""
        return {round_.round: round_ for round_ in self.digest.rounds}


class Sites(dict[str, SiteRun]):
    """Runs of one plan by site, at least one."""

    @property
    def first(self) -> SiteRun:
        """Any of the runs."""
        return next(iter(self.values()))

    @property
    def plan(self) -> Plan:
        """Plan of all runs."""
        return self.first.digest.plan

    @property
    def table(self) -> SitesPlan:
        """The plan's sites."""
        assert self.plan.sites
        return self.plan.sites

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Number of devices of every site."""
        return sizes_of(self.plan)

    @cached_property
    def name(self) -> Callable[[int], str]:
        """Return the name of a round."""
        return make_round_namer(self.first.records)

    def can_join(self, run: SiteRun) -> bool:
        """Check that a run is of the same plan, and of a site without a run."""
        first = self.first.digest
        same = first.live == run.digest.live and encode_plan(first.plan) == encode_plan(run.digest.plan)
        return same and run.site not in self


def digest_sites(runs: Sequence[tuple[Digest, Sequence[AnyRecord]]]) -> list[SitesDigest]:
    """Return the digests of runs with sites, grouped by plan; a second run of a site starts a new group.

    Args:
        runs: Digests with the journals they come from.
    """
    groups: list[Sites] = []
    for digest, records in runs:
        if digest.plan.sites:
            run = SiteRun(find_site(records, digest.run), digest, records)
            group = next((group for group in groups if group.can_join(run)), None)
            if group is None:
                groups.append(group := Sites())
            group[run.site] = run
    return [_digest(Sites((site, group[site]) for site in group.table.names if site in group)) for group in groups]


def _digest(group: Sites) -> SitesDigest:
    plan, table, edges = group.plan, group.table, graph_edges(group.table)
    base = {run.digest.run.removesuffix(f"-{site}") for site, run in group.items()}
    mixed_rounds = {number for run in group.values() for number in run.rounds if table.is_mixed(number)}
    return SitesDigest(
        name=f"{base.pop() if len(base) == 1 else plan.name} (all sites)",
        live=group.first.digest.live,
        plan=plan.name,
        compared=group.first.digest.compared,
        graph=table.graph,
        edge_rounds=table.edge_rounds,
        rounds=plan.rounds,
        zeta=zeta(group.sizes, mixing_rows(group.sizes, edges)),
        missing=[site for site in table.names if site not in group],
        time_s=plan.budget.time_s,
        joules=plan.budget.joules,
        sites=[_site(run, group) for run in group.values()],
        mixings=[_mixing(group, number) for number in sorted(mixed_rounds)],
        edges=[_edge(group, pair) for pair in edges if set(pair) & group.keys()],
        coordinated=_coordination(group),
        given=_value_spreads(group),
    )


def _site(run: SiteRun, group: Sites) -> SiteDigest:
    ledger, gossips, plan, sizes = Ledger(), run.gossips.values(), group.plan, group.sizes
    ledger.take(run.records)
    spending = ledger.spending()
    measured, metric = measured_rounds(run.records)[-1:], run.digest.metric
    value = measured[0][0] if measured else None
    coordinated = select(run.records, Coordinated)
    rounds = {entry.round for entry in coordinated if entry.decision and entry.sites.keys() - {run.site}}
    return SiteDigest(
        site=run.site,
        run=run.digest.run,
        devices=sizes[run.site],
        outcome=run.digest.outcome,
        rounds=len(run.digest.rounds),
        accuracy=share_or_none(value) if metric == ACCURACY else None,
        value=msgspec.UNSET if metric == ACCURACY else amount_or_unknown(value).value,
        measured=group.name(measured[0][1]) if measured else "",
        seconds=spending.seconds,
        joules=NONE if spending.joules is None else Amount(value=spending.joules, whole=spending.is_whole),
        share_joules=None if plan.budget.joules is None else plan.budget.joules * sizes[run.site] / sum(sizes.values()),
        moved_joules=spending.moved,
        gossip_s=math.fsum(gossip.seconds for gossip in gossips),
        transfer_s=math.fsum(max(gossip.transfer_s.values(), default=0.0) for gossip in gossips),
        bytes_up=sum(sum(gossip.bytes_up.values()) for gossip in gossips),
        bytes_down=sum(sum(gossip.bytes_down.values()) for gossip in gossips),
        decided=len(rounds),
        refused=dict(sorted(sum((Counter(gossip.refused) for gossip in gossips), Counter[str]()).items())),
        refused_models=refused_models(run.records),
    )


def _mixing(group: Sites, number: int) -> MixingDigest:
    gossips = {site: run.gossips[number] for site, run in group.items() if number in run.gossips}
    ends = {site: run.rounds[number] for site, run in group.items() if number in run.rounds}
    accuracy = {site: value for site, end in ends.items() if (value := end.metric_value()) is not None}
    off = [
        f"{first} - {other}"
        for first, other in graph_edges(group.table)
        if any(end in gossips and neighbour in gossips[end].off for end, neighbour in ((first, other), (other, first)))
    ]
    budget, part, is_whole = group.plan.budget, number / group.plan.rounds, len(ends) == len(group)
    joules = {site: sum_known([group[site].digest.measuring, end.until.joules]) for site, end in ends.items()}
    return MixingDigest(
        round=number,
        named=group.name(number),
        accuracy=accuracy,
        mean=math.fsum(accuracy.values()) / len(accuracy) if accuracy else None,
        of=len(accuracy),
        **_measure_disagreement(group.sizes, gossips),
        seconds={site: gossip.seconds for site, gossip in gossips.items()},
        off=off,
        spent_s={site: end.until.seconds.value or 0.0 for site, end in ends.items()},
        whole_s=_slowest_s(group, number) if is_whole else None,
        spent_joules=joules,
        whole_joules=sum_known(joules.values()) if is_whole else NONE,
        allowed_s=None if budget.time_s is None else budget.time_s * part,
        allowed_joules=None if budget.joules is None else budget.joules * part,
    )


def _measure_disagreement(sizes: Mapping[str, int], gossips: Mapping[str, Gossiped]) -> dict[str, float]:
    """Return the disagreement around a gossip and the mean's move, from sketches; nothing unless all sites have one."""
    before = {site: sketch for site, gossip in gossips.items() if (sketch := unpack_sketch(gossip.before)) is not None}
    after = {site: sketch for site, gossip in gossips.items() if (sketch := unpack_sketch(gossip.after)) is not None}
    if before.keys() != sizes.keys() or after.keys() != sizes.keys():
        return {}
    distance = float(((mean(after, sizes) - mean(before, sizes)) ** 2).sum() ** 0.5)
    return {"before": disagreement(before, sizes), "after": disagreement(after, sizes), "moved": distance}


def _slowest_s(group: Sites, number: int) -> float:
    """Return (8): the slowest site's seconds of each global round up to this edge round, summed."""
    q = group.table.edge_rounds
    return math.fsum(
        max(
            math.fsum(run.rounds[edge].seconds for edge in range(first, first + q) if edge in run.rounds)
            for run in group.values()
        )
        for first in range(1, number + 1, q)
    )


def _edge(group: Sites, pair: tuple[str, str]) -> EdgeDigest:
    directions = [(group[site].gossips, neighbour) for site, neighbour in (pair, pair[::-1]) if site in group]
    on, off, causes = set[int](), set[int](), Counter[str]()
    for gossips, neighbour in directions:
        on |= {number for number, gossip in gossips.items() if neighbour in gossip.on}
        missed = {number: gossip.off[neighbour] for number, gossip in gossips.items() if neighbour in gossip.off}
        off |= missed.keys()
        causes.update(missed.values())
    ways = ("bytes_down",) if len(directions) > 1 else ("bytes_down", "bytes_up")
    counted = (
        getattr(gossip, way).get(neighbour, 0)
        for gossips, neighbour in directions
        for gossip in gossips.values()
        for way in ways
    )
    return EdgeDigest(
        one=pair[0],
        other=pair[1],
        on=len(on - off),
        off=len(off),
        causes=dict(sorted(causes.items())),
        rounds=[group.name(number) for number in sorted(off)],
        unlike=[group.name(number) for number in sorted(off & on)],
        bytes=sum(counted),
    )


def _coordination(group: Sites) -> list[Coordinating]:
    sites: dict[tuple[int, int, str], list[str]] = {}
    for site, run in group.items():
        for opening in run.openings:
            if opening.decision and opening.decision.coordinator:
                key = opening.round, opening.decision.term, opening.decision.coordinator
                sites.setdefault(key, []).append(site)
    stretches: dict[tuple[int, str, tuple[str, ...]], list[list[int]]] = {}
    for (number, term, coordinator), decided_sites in sorted(sites.items()):
        numbers = stretches.setdefault((term, coordinator, tuple(decided_sites)), [])
        if numbers and numbers[-1][-1] == number - 1:
            numbers[-1].append(number)
        else:
            numbers.append([number])
    terms = [record for run in group.values() for record in select(run.records, TermBegan)]
    terms.sort(key=lambda record: record.cause != HEARD)  # the site that began it knows the cause
    causes = {record.term: record.cause for record in terms}
    return [
        Coordinating(
            coordinator=coordinator,
            term=term,
            sites=list(decided_sites),
            first=group.name(numbers[0]),
            last=group.name(numbers[-1]),
            rounds=len(numbers),
            cause=causes.get(term, ""),
        )
        for numbers, (term, coordinator, decided_sites) in sorted(
            (numbers, key) for key, of_key in stretches.items() for numbers in of_key
        )
    ]


def _value_spreads(group: Sites) -> dict[str, list[Spread]]:
    """Return the range of each numeric value that the devices of a site were assigned, by name."""
    spreads = defaultdict[str, list[Spread]](list)
    for site, run in group.items():
        for opening in run.openings:
            by_name = defaultdict[str, list[float]](list)
            for assignment in opening.decision.devices.values() if opening.decision else ():
                for name, value in assignment.values.items():
                    if isinstance(value, int | float):
                        by_name[name].append(float(value))
            for name, values in by_name.items():
                values.sort()
                least, median, most = values[0], quantile(values, 0.5), values[-1]
                spreads[name].append(Spread(round=opening.round, site=site, least=least, median=median, most=most))
    return dict(spreads)
