"""From the runs of a plan's sites to what they came to together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from edge_server.journal.budget import Ledger
from edge_server.journal.decision import Coordinated, TermBegan
from edge_server.journal.outcome import refused_models
from edge_server.journal.records import AnyRecord, Gossiped, RoundOpened, measured_rounds, valid
from edge_server.journal.runs import name_rounds
from edge_server.plan.plan import Plan
from edge_server.plan.sites import SitesPlan
from edge_server.report.digest import NONE, Amount, Digest, RoundDigest, quantile, share_or_none, sum_known
from edge_server.report.sites.digest import Coordinating, EdgeDigest, MixingDigest, SiteDigest, SitesDigest, Spread
from edge_server.sites.graph import graph_edges, sizes_of
from edge_server.sites.link import plan_bytes
from edge_server.sites.matrix import mixing_rows, zeta
from edge_server.sites.overview import site_of
from edge_server.sites.sketch import disagreement, mean, unpacked

HEARD = "heard"
"""Cause of a term at a site that only heard of it."""


@dataclass(frozen=True)
class SiteRun:
    """A run of one site, as its journal and its digest have it."""

    site: str
    digest: Digest
    records: Sequence[AnyRecord]

    @cached_property
    def gossips(self) -> dict[int, Gossiped]:
        """The gossips by round; of one that was done again after a restart, the last."""
        return {one.round: one for one in self.records if isinstance(one, Gossiped)}

    @cached_property
    def opened(self) -> list[RoundOpened]:
        """The beginnings of its training rounds."""
        rounds = self.digest.plan.rounds
        return [one for one in valid(self.records) if isinstance(one, RoundOpened) and one.round <= rounds]

    @cached_property
    def ended(self) -> dict[int, RoundDigest]:
        """The rounds that have ended, by number."""
        return {one.round: one for one in self.digest.rounds}


def digest_sites(runs: Sequence[tuple[Digest, Sequence[AnyRecord]]]) -> list[SitesDigest]:
    """Return what the runs with sites came to, those of one plan together; a second run of a site begins anew.

    Args:
        runs: Digests, and the journals that they are of.
    """
    groups: list[dict[str, SiteRun]] = []
    for digest, records in runs:
        if digest.plan.sites:
            one = SiteRun(site_of(records, digest.run), digest, records)
            group = next((those for those in groups if _takes(those, one)), None)
            if group is None:
                groups.append(group := {})
            group[one.site] = one
    return [_digest({site: those[site] for site in _table(those).names if site in those}) for those in groups]


def _takes(group: Mapping[str, SiteRun], one: SiteRun) -> bool:
    first = next(iter(group.values())).digest
    same = first.live == one.digest.live and plan_bytes(first.plan) == plan_bytes(one.digest.plan)
    return same and one.site not in group


def _plan(group: Mapping[str, SiteRun]) -> Plan:
    return next(iter(group.values())).digest.plan


def _table(group: Mapping[str, SiteRun]) -> SitesPlan:
    table = _plan(group).sites
    assert table
    return table


def _digest(group: Mapping[str, SiteRun]) -> SitesDigest:
    plan, table = _plan(group), _table(group)
    sizes, edges = sizes_of(plan), graph_edges(table)
    name = name_rounds(next(iter(group.values())).records)
    base = {one.digest.run.removesuffix(f"-{site}") for site, one in group.items()}
    return SitesDigest(
        name=f"{base.pop() if len(base) == 1 else plan.name} (all sites)",
        live=next(iter(group.values())).digest.live,
        plan=plan.name,
        graph=table.graph,
        edge_rounds=table.edge_rounds,
        rounds=plan.rounds,
        zeta=zeta(sizes, mixing_rows(sizes, edges)),
        missing=[site for site in table.names if site not in group],
        time_s=plan.budget.time_s,
        joules=plan.budget.joules,
        sites=[_site(one, sizes, name) for one in group.values()],
        mixings=[_mixing(group, number, name) for number in _mixed_rounds(group)],
        edges=[_edge(group, pair, name) for pair in edges if set(pair) & group.keys()],
        coordinated=_coordinated(group, name),
        given=_given(group),
    )


def _mixed_rounds(group: Mapping[str, SiteRun]) -> list[int]:
    """Return the global rounds' last edge rounds that any site has ended."""
    table = _table(group)
    return sorted({number for one in group.values() for number in one.ended if table.is_mixed(number)})


def _site(one: SiteRun, sizes: Mapping[str, int], name: Callable[[int], str]) -> SiteDigest:
    ledger, gossips, plan = Ledger(), one.gossips.values(), one.digest.plan
    ledger.take(one.records)
    spent = ledger.spending()
    measured = measured_rounds(one.records)[-1:]
    joules = NONE if spent.joules is None else Amount(value=spent.joules, whole=spent.is_whole)
    share = None if plan.budget.joules is None else plan.budget.joules * sizes[one.site] / sum(sizes.values())
    others = [
        record
        for record in one.records
        if isinstance(record, Coordinated) and record.decision and record.sites.keys() - {one.site}
    ]
    return SiteDigest(
        site=one.site,
        run=one.digest.run,
        devices=sizes[one.site],
        outcome=one.digest.outcome,
        rounds=len(one.digest.rounds),
        accuracy=share_or_none(measured[0][0]) if measured else None,
        measured=name(measured[0][1]) if measured else "",
        seconds=spent.seconds,
        joules=joules,
        share_joules=share,
        moved_joules=spent.moved,
        gossip_s=math.fsum(gossip.seconds for gossip in gossips),
        transfer_s=math.fsum(max(gossip.transfer_s.values(), default=0.0) for gossip in gossips),
        bytes_up=sum(sum(gossip.bytes_up.values()) for gossip in gossips),
        bytes_down=sum(sum(gossip.bytes_down.values()) for gossip in gossips),
        decided=len({record.round for record in others}),
        refused=dict(sorted(sum((Counter(gossip.refused) for gossip in gossips), Counter[str]()).items())),
        refused_models=refused_models(one.records),
    )


def _mixing(group: Mapping[str, SiteRun], number: int, name: Callable[[int], str]) -> MixingDigest:
    gossips = {site: one.gossips[number] for site, one in group.items() if number in one.gossips}
    ends = {site: one.ended[number] for site, one in group.items() if number in one.ended}
    accuracy = {site: end.accuracy for site, end in ends.items() if end.accuracy is not None}
    apart = _apart(group, gossips)
    budget, part = _plan(group).budget, number / _plan(group).rounds
    joules = {site: sum_known([group[site].digest.measuring, end.until.joules]) for site, end in ends.items()}
    return MixingDigest(
        round=number,
        named=name(number),
        accuracy=accuracy,
        mean=math.fsum(accuracy.values()) / len(accuracy) if accuracy else None,
        of=len(accuracy),
        before=apart[0],
        after=apart[1],
        moved=apart[2],
        seconds={site: gossip.seconds for site, gossip in gossips.items()},
        off=[f"{one} - {other}" for one, other in graph_edges(_table(group)) if _is_off(gossips, one, other)],
        spent_s={site: end.until.seconds.value or 0.0 for site, end in ends.items()},
        whole_s=_slowest_s(group, number) if len(ends) == len(group) else None,
        spent_joules=joules,
        whole_joules=sum_known(joules.values()) if len(ends) == len(group) else NONE,
        allowed_s=None if budget.time_s is None else budget.time_s * part,
        allowed_joules=None if budget.joules is None else budget.joules * part,
    )


def _is_off(gossips: Mapping[str, Gossiped], one: str, other: str) -> bool:
    return any(there in gossips[here].off for here, there in ((one, other), (other, one)) if here in gossips)


def _apart(
    group: Mapping[str, SiteRun], gossips: Mapping[str, Gossiped]
) -> tuple[float | None, float | None, float | None]:
    """Return how far apart the models of all sites were before and after a gossip, and how far their mean moved."""
    sizes = sizes_of(_plan(group))
    sketches = {site: (unpacked(one.before), unpacked(one.after)) for site, one in gossips.items()}
    found = [{site: one for site, both in sketches.items() if (one := both[place]) is not None} for place in (0, 1)]
    if any(those.keys() != sizes.keys() for those in found):
        return None, None, None
    before, after = found
    moved = float(((mean(after, sizes) - mean(before, sizes)) ** 2).sum() ** 0.5)
    return disagreement(before, sizes), disagreement(after, sizes), moved


def _slowest_s(group: Mapping[str, SiteRun], number: int) -> float:
    """Return (8): of each global round up to this edge round the seconds of the slowest site, summed up."""
    q = _table(group).edge_rounds
    return math.fsum(
        max(
            math.fsum(one.ended[edge].seconds for edge in range(first, first + q) if edge in one.ended)
            for one in group.values()
        )
        for first in range(1, number + 1, q)
    )


def _edge(group: Mapping[str, SiteRun], pair: tuple[str, str], name: Callable[[int], str]) -> EdgeDigest:
    """Return how often an edge was on, by the journals of both ends or of the one that is here."""
    ways = [(group[here], there) for here, there in (pair, pair[::-1]) if here in group]
    on = [{number for number, one in run.gossips.items() if there in one.on} for run, there in ways]
    off = [{number: one.off[there] for number, one in run.gossips.items() if there in one.off} for run, there in ways]
    either = set[int]().union(*off)
    came = sum(one.bytes_down.get(there, 0) for run, there in ways for one in run.gossips.values())
    went = (
        sum(one.bytes_up.get(there, 0) for run, there in ways for one in run.gossips.values()) if ways[1:] == [] else 0
    )
    return EdgeDigest(
        one=pair[0],
        other=pair[1],
        on=len(set[int]().union(*on) - either),
        off=len(either),
        causes=dict(sorted(Counter(cause for those in off for cause in those.values()).items())),
        rounds=[name(number) for number in sorted(either)],
        unlike=[name(number) for number in sorted(either & set[int]().union(*on))],
        bytes=came + went,
    )


def _coordinated(group: Mapping[str, SiteRun], name: Callable[[int], str]) -> list[Coordinating]:
    """Return who decided for whom, rounds in a row together, in their order."""
    sites: dict[tuple[int, int, str], list[str]] = {}
    for site, run in group.items():
        for opened in run.opened:
            if opened.decision and opened.decision.coordinator:
                key = opened.round, opened.decision.term, opened.decision.coordinator
                sites.setdefault(key, []).append(site)
    rows: dict[tuple[int, str, tuple[str, ...]], list[list[int]]] = {}
    for (number, term, coordinator), those in sorted(sites.items()):
        stretches = rows.setdefault((term, coordinator, tuple(those)), [])
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
            sites=list(those),
            first=name(numbers[0]),
            last=name(numbers[-1]),
            rounds=len(numbers),
            cause=causes.get(term, ""),
        )
        for numbers, term, coordinator, those in sorted(flat)
    ]


def _causes(runs: Iterable[SiteRun]) -> dict[int, str]:
    """Return why each term began, by who began it; who only heard of it does not know."""
    begun = [one for run in runs for one in run.records if isinstance(one, TermBegan)]
    ordered = sorted(begun, key=lambda one: one.cause != HEARD)
    return {one.term: one.cause for one in ordered}


def _given(group: Mapping[str, SiteRun]) -> dict[str, list[Spread]]:
    """Return what the devices of each site were given in each round, of figures that differ at all."""
    found: dict[str, list[Spread]] = {}
    for site, run in group.items():
        for one in run.opened:
            by_name: dict[str, list[float]] = {}
            for given in one.decision.devices.values() if one.decision else ():
                for name, value in given.values.items():
                    if isinstance(value, int | float):
                        by_name.setdefault(name, []).append(float(value))
            for name, values in by_name.items():
                few = sorted(values)
                spread = Spread(round=one.round, site=site, least=few[0], median=quantile(few, 0.5), most=few[-1])
                found.setdefault(name, []).append(spread)
    return found
