"""Multi-site digest: summarise the sites of a plan from their journals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from edge_server.journal.budget import Ledger
from edge_server.journal.compared import measured_rounds
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.decision import Coordinated, TermBegan
from edge_server.journal.outcome import refused_models
from edge_server.journal.records import AnyRecord, Gossiped, RoundOpened, valid_records
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


@dataclass(frozen=True)
class Disagreement:
    """Distances between edge models around a gossip, estimated from sketches; None unless all sites have one."""

    before: float | None = None
    after: float | None = None
    mean_moved: float | None = None


def digest_sites(runs: Sequence[tuple[Digest, Sequence[AnyRecord]]]) -> list[SitesDigest]:
    """Return the digests of runs with sites, grouped by plan; a second run of a site starts a new group.

    Args:
        runs: Digests with the journals they come from.
    """
    groups: list[dict[str, SiteRun]] = []
    for digest, records in runs:
        if digest.plan.sites:
            run = SiteRun(find_site(records, digest.run), digest, records)
            group = next((group for group in groups if _can_join(group, run)), None)
            if group is None:
                groups.append(group := {})
            group[run.site] = run
    return [_digest({site: group[site] for site in _table(group).names if site in group}) for group in groups]


def _can_join(group: Mapping[str, SiteRun], run: SiteRun) -> bool:
    first = next(iter(group.values())).digest
    same = first.live == run.digest.live and encode_plan(first.plan) == encode_plan(run.digest.plan)
    return same and run.site not in group


def _plan(group: Mapping[str, SiteRun]) -> Plan:
    return next(iter(group.values())).digest.plan


def _table(group: Mapping[str, SiteRun]) -> SitesPlan:
    table = _plan(group).sites
    assert table
    return table


def _digest(group: Mapping[str, SiteRun]) -> SitesDigest:
    plan, table = _plan(group), _table(group)
    sizes, edges = sizes_of(plan), graph_edges(table)
    name = make_round_namer(next(iter(group.values())).records)
    base = {run.digest.run.removesuffix(f"-{site}") for site, run in group.items()}
    return SitesDigest(
        name=f"{base.pop() if len(base) == 1 else plan.name} (all sites)",
        live=next(iter(group.values())).digest.live,
        plan=plan.name,
        compared=next(iter(group.values())).digest.compared,
        graph=table.graph,
        edge_rounds=table.edge_rounds,
        rounds=plan.rounds,
        zeta=zeta(sizes, mixing_rows(sizes, edges)),
        missing=[site for site in table.names if site not in group],
        time_s=plan.budget.time_s,
        joules=plan.budget.joules,
        sites=[_site(run, sizes, name) for run in group.values()],
        mixings=[_mixing(group, number, name) for number in _mixed_rounds(group)],
        edges=[_edge(group, pair, name) for pair in edges if set(pair) & group.keys()],
        coordinated=_coordination(group, name),
        given=_value_spreads(group),
    )


def _mixed_rounds(group: Mapping[str, SiteRun]) -> list[int]:
    """Return the last edge round of each global round that any site has ended."""
    table = _table(group)
    return sorted({number for run in group.values() for number in run.rounds if table.is_mixed(number)})


def _site(run: SiteRun, sizes: Mapping[str, int], name: Callable[[int], str]) -> SiteDigest:
    ledger, gossips, plan = Ledger(), run.gossips.values(), run.digest.plan
    ledger.take(run.records)
    spending = ledger.spending()
    measured, metric = measured_rounds(run.records)[-1:], run.digest.metric
    value = measured[0][0] if measured else None
    joules = NONE if spending.joules is None else Amount(value=spending.joules, whole=spending.is_whole)
    share = None if plan.budget.joules is None else plan.budget.joules * sizes[run.site] / sum(sizes.values())
    others = [
        record
        for record in run.records
        if isinstance(record, Coordinated) and record.decision and record.sites.keys() - {run.site}
    ]
    return SiteDigest(
        site=run.site,
        run=run.digest.run,
        devices=sizes[run.site],
        outcome=run.digest.outcome,
        rounds=len(run.digest.rounds),
        accuracy=share_or_none(value) if metric == ACCURACY else None,
        value=msgspec.UNSET if metric == ACCURACY else amount_or_unknown(value).value,
        measured=name(measured[0][1]) if measured else "",
        seconds=spending.seconds,
        joules=joules,
        share_joules=share,
        moved_joules=spending.moved,
        gossip_s=math.fsum(gossip.seconds for gossip in gossips),
        transfer_s=math.fsum(max(gossip.transfer_s.values(), default=0.0) for gossip in gossips),
        bytes_up=sum(sum(gossip.bytes_up.values()) for gossip in gossips),
        bytes_down=sum(sum(gossip.bytes_down.values()) for gossip in gossips),
        decided=len({record.round for record in others}),
        refused=dict(sorted(sum((Counter(gossip.refused) for gossip in gossips), Counter[str]()).items())),
        refused_models=refused_models(run.records),
    )


def _mixing(group: Mapping[str, SiteRun], number: int, name: Callable[[int], str]) -> MixingDigest:
    gossips = {site: run.gossips[number] for site, run in group.items() if number in run.gossips}
    ends = {site: run.rounds[number] for site, run in group.items() if number in run.rounds}
    accuracy = {site: value for site, end in ends.items() if (value := end.metric_value()) is not None}
    distances = _measure_disagreement(group, gossips)
    budget, part = _plan(group).budget, number / _plan(group).rounds
    joules = {site: sum_known([group[site].digest.measuring, end.until.joules]) for site, end in ends.items()}
    return MixingDigest(
        round=number,
        named=name(number),
        accuracy=accuracy,
        mean=math.fsum(accuracy.values()) / len(accuracy) if accuracy else None,
        of=len(accuracy),
        before=distances.before,
        after=distances.after,
        moved=distances.mean_moved,
        seconds={site: gossip.seconds for site, gossip in gossips.items()},
        off=[f"{first} - {other}" for first, other in graph_edges(_table(group)) if _is_off(gossips, first, other)],
        spent_s={site: end.until.seconds.value or 0.0 for site, end in ends.items()},
        whole_s=_slowest_s(group, number) if len(ends) == len(group) else None,
        spent_joules=joules,
        whole_joules=sum_known(joules.values()) if len(ends) == len(group) else NONE,
        allowed_s=None if budget.time_s is None else budget.time_s * part,
        allowed_joules=None if budget.joules is None else budget.joules * part,
    )


def _is_off(gossips: Mapping[str, Gossiped], first: str, other: str) -> bool:
    return any(
        neighbour in gossips[site].off for site, neighbour in ((first, other), (other, first)) if site in gossips
    )


def _measure_disagreement(group: Mapping[str, SiteRun], gossips: Mapping[str, Gossiped]) -> Disagreement:
    """Return the disagreement of all sites' models before and after a gossip, and the distance their mean moved."""
    sizes = sizes_of(_plan(group))
    before = {site: sketch for site, gossip in gossips.items() if (sketch := unpack_sketch(gossip.before)) is not None}
    after = {site: sketch for site, gossip in gossips.items() if (sketch := unpack_sketch(gossip.after)) is not None}
    if before.keys() != sizes.keys() or after.keys() != sizes.keys():
        return Disagreement()
    mean_moved = float(((mean(after, sizes) - mean(before, sizes)) ** 2).sum() ** 0.5)
    return Disagreement(disagreement(before, sizes), disagreement(after, sizes), mean_moved)


def _slowest_s(group: Mapping[str, SiteRun], number: int) -> float:
    """Return (8): the slowest site's seconds of each global round up to this edge round, summed."""
    q = _table(group).edge_rounds
    return math.fsum(
        max(
            math.fsum(run.rounds[edge].seconds for edge in range(first, first + q) if edge in run.rounds)
            for run in group.values()
        )
        for first in range(1, number + 1, q)
    )


def _edge(group: Mapping[str, SiteRun], pair: tuple[str, str], name: Callable[[int], str]) -> EdgeDigest:
    directions = [(group[site], neighbour) for site, neighbour in (pair, pair[::-1]) if site in group]
    on = [{number for number, gossip in run.gossips.items() if neighbour in gossip.on} for run, neighbour in directions]
    off = [
        {number: gossip.off[neighbour] for number, gossip in run.gossips.items() if neighbour in gossip.off}
        for run, neighbour in directions
    ]
    off_rounds = set[int]().union(*off)
    received_bytes = sum(
        gossip.bytes_down.get(neighbour, 0) for run, neighbour in directions for gossip in run.gossips.values()
    )
    sent_bytes = (
        sum(gossip.bytes_up.get(neighbour, 0) for run, neighbour in directions for gossip in run.gossips.values())
        if directions[1:] == []
        else 0
    )
    return EdgeDigest(
        one=pair[0],
        other=pair[1],
        on=len(set[int]().union(*on) - off_rounds),
        off=len(off_rounds),
        causes=dict(sorted(Counter(cause for causes in off for cause in causes.values()).items())),
        rounds=[name(number) for number in sorted(off_rounds)],
        unlike=[name(number) for number in sorted(off_rounds & set[int]().union(*on))],
        bytes=received_bytes + sent_bytes,
    )


def _coordination(group: Mapping[str, SiteRun], name: Callable[[int], str]) -> list[Coordinating]:
    sites: dict[tuple[int, int, str], list[str]] = {}
    for site, run in group.items():
        for opening in run.openings:
            if opening.decision and opening.decision.coordinator:
                key = opening.round, opening.decision.term, opening.decision.coordinator
                sites.setdefault(key, []).append(site)
    rows: dict[tuple[int, str, tuple[str, ...]], list[list[int]]] = {}
    for (number, term, coordinator), decided_sites in sorted(sites.items()):
        stretches = rows.setdefault((term, coordinator, tuple(decided_sites)), [])
        if stretches and stretches[-1][-1] == number - 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    causes = _causes(group.values())
    flat = [(numbers, *key) for key, stretches in rows.items() for numbers in stretches]
    return [
        Coordinating(
            coordinator=coordinator,
            term=term,
            sites=list(decided_sites),
            first=name(numbers[0]),
            last=name(numbers[-1]),
            rounds=len(numbers),
            cause=causes.get(term, ""),
        )
        for numbers, term, coordinator, decided_sites in sorted(flat)
    ]


def _causes(runs: Iterable[SiteRun]) -> dict[int, str]:
    """Return the cause of each term, preferably from the site that began it; others only record having heard of it."""
    terms = [record for run in runs for record in run.records if isinstance(record, TermBegan)]
    ordered = sorted(terms, key=lambda record: record.cause != HEARD)
    return {record.term: record.cause for record in ordered}


def _value_spreads(group: Mapping[str, SiteRun]) -> dict[str, list[Spread]]:
    """Return the range of each numeric value that the devices of a site were assigned, by name."""
    spreads: dict[str, list[Spread]] = {}
    for site, run in group.items():
        for opening in run.openings:
            by_name: dict[str, list[float]] = {}
            for assignment in opening.decision.devices.values() if opening.decision else ():
                for name, value in assignment.values.items():
                    if isinstance(value, int | float):
                        by_name.setdefault(name, []).append(float(value))
            for name, values in by_name.items():
                ordered = sorted(values)
                spread = Spread(
                    round=opening.round, site=site, least=ordered[0], median=quantile(ordered, 0.5), most=ordered[-1]
                )
                spreads.setdefault(name, []).append(spread)
    return spreads
