"""A site's exchange with its peer sites in one run, from the site's journal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from edge_server.journal.compared import compared_metric, measured_rounds
from edge_server.journal.decision import TermBegan
from edge_server.journal.outcome import RefusedModels, refused_models
from edge_server.journal.records import (
    AnyRecord,
    Gossiped,
    Joined,
    RoundClosed,
    RoundOpened,
    RunOpened,
)
from edge_server.journal.runs import make_round_namer
from edge_server.plan.sites import devices_by_site, round_name
from shared.errors import ConfigError, Unwritable
from shared.protocol.units import BYTES, SECONDS, choose_unit
from shared.runtime.durable import replace_file
from shared.runtime.text_table import TextColumn, TextTable

HEARD = "peers/heard.json"
"""File in a live run's folder: the round that each peer has announced."""


class PeerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """State of one peer.

    Attributes:
        round: The round that it last announced, as `global.edge`; empty if none.
        mixed: Number of gossips in which the edge to it was on.
        missed: Number of gossips in which the edge to it was off.
        last: Round of the last mix with it, as `global.edge`; empty if none.
        cause: Why the edge was off in the last gossip, as a single word; empty if it was on.
        bytes_up, bytes_down: Bytes of models sent to it and received from it.
    """

    site: str
    round: str
    mixed: int
    missed: int
    last: str
    cause: str
    bytes_up: int
    bytes_down: int


class SitesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """State of one site of a run.

    Attributes:
        sites: All sites, in the plan's order.
        round: The last opened round, as `global.edge`; empty before the first.
        rounds: Closed rounds, and rounds of the plan.
        gossip_s: Seconds of all gossips together.
        coordinator: Coordinator of the last decision; empty without decisions.
        term: The last known term.
        refused: Counts of peers' invalid messages, by reason.
        refused_models: Neighbours whose models were refused.
    """

    run: str
    sites: tuple[str, ...]
    round: str
    rounds: tuple[int, int]
    gossip_s: float
    coordinator: str
    term: int
    peers: list[PeerSummary]
    refused: dict[str, int]
    refused_models: list[RefusedModels] = []


def write_rounds(folder: Path, rounds: Mapping[str, int]) -> None:
    """Write the rounds that peers have begun; a failure is ignored, since the file is for people only."""
    path = folder / HEARD
    with suppress(OSError, Unwritable):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(rounds), durable=False)


def read_rounds(folder: Path) -> dict[str, int]:
    """Return the rounds that peers have begun; empty without a readable file."""
    try:
        return msgspec.json.decode((folder / HEARD).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}


def summarise_sites(records: Sequence[AnyRecord], peer_rounds: Mapping[str, int] | None = None) -> SitesSummary:
    """Return the summary of a site.

    Args:
        peer_rounds: Round that each peer has begun.

    Raises:
        ConfigError: The run has a single site, or was not begun.
    """
    begun = next((record for record in records if isinstance(record, RunOpened)), None)
    if begun is None or not begun.plan.sites:
        raise ConfigError("the run's plan has no [sites], so its server has no peers")
    edge_rounds = begun.plan.sites.edge_rounds
    gossips = {record.round: record for record in records if isinstance(record, Gossiped)}
    openings = [record for record in records if isinstance(record, RoundOpened) and record.round <= begun.plan.rounds]
    closed = {record.round for record in records if isinstance(record, RoundClosed)}
    closed = {number for number in closed if number <= begun.plan.rounds}
    decisions = [record.decision for record in openings if record.decision and record.decision.coordinator]
    refused: dict[str, int] = {}
    for gossip in gossips.values():
        for reason, count in gossip.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    name, begun_there = make_round_namer(records), peer_rounds or {}
    peers = dict.fromkeys(peer for gossip in gossips.values() for peer in (*gossip.on, *gossip.off))
    peers |= dict.fromkeys(begun_there)
    return SitesSummary(
        run=begun.run,
        sites=begun.plan.sites.names,
        round=round_name(openings[-1].round, edge_rounds) if openings else "",
        rounds=(len(closed), begun.plan.rounds),
        gossip_s=sum(gossip.seconds for gossip in gossips.values()),
        coordinator=decisions[-1].coordinator if decisions else "",
        term=max((record.term for record in records if isinstance(record, TermBegan)), default=0),
        peers=[
            _summarise_peer(site, name(begun_there[site]) if site in begun_there else "", list(gossips.values()), name)
            for site in peers
        ],
        refused=dict(sorted(refused.items())),
        refused_models=refused_models(records),
    )


def _summarise_peer(site: str, begun: str, gossips: Sequence[Gossiped], name: Callable[[int], str]) -> PeerSummary:
    on = [gossip.round for gossip in gossips if site in gossip.on]
    return PeerSummary(
        site=site,
        round=begun,
        mixed=len(on),
        missed=sum(site in gossip.off for gossip in gossips),
        last=name(on[-1]) if on else "",
        cause=gossips[-1].off.get(site, "") if gossips else "",
        bytes_up=sum(gossip.bytes_up.get(site, 0) for gossip in gossips),
        bytes_down=sum(gossip.bytes_down.get(site, 0) for gossip in gossips),
    )


def sites_table(summary: SitesSummary) -> tuple[TextTable, list[str]]:
    """Return a table of the peers, and lines about the site itself."""
    columns = [
        TextColumn(name)
        for name in ("peer", "in round", "mixed", "missed", "last", "bytes up", "bytes down", "edge off")
    ]
    rows = [
        [
            peer.site,
            peer.round,
            str(peer.mixed),
            str(peer.missed),
            peer.last,
            _bytes(peer.bytes_up),
            _bytes(peer.bytes_down),
            peer.cause,
        ]
        for peer in summary.peers
    ]
    unit, (closed, planned) = choose_unit(summary.gossip_s, SECONDS), summary.rounds
    lines = [
        f"run {summary.run}: {closed} of {planned} rounds, in {summary.round or 'none yet'} (global.edge)",
        f"sites {', '.join(summary.sites)}; gossip took {summary.gossip_s / unit.size:.3g} {unit.name} in all",
    ]
    if summary.coordinator:
        lines.append(f"site {summary.coordinator} coordinates, term {summary.term}")
    if summary.refused:
        lines.append(f"refused of peers: {_counts(summary.refused.items())}")
    lines += [model.line for model in summary.refused_models]
    return TextTable(columns, rows), lines


def find_site(records: Sequence[AnyRecord], run: str = "") -> str:
    """Return the site of a run, by its devices or, without any, by the end of its name.

    Args:
        run: The run's name, if it differs from the journal's.

    Raises:
        ConfigError: Neither identifies a site.
    """
    begun = next((record for record in records if isinstance(record, RunOpened)), None)
    if begun is None or not begun.plan.sites:
        raise ConfigError("the run's plan has no [sites]")
    openings = (record for record in records if isinstance(record, RoundOpened))
    devices = next((list(opening.assignments) for opening in openings if opening.assignments), [])
    devices = devices or [record.device for record in records if isinstance(record, Joined)]
    homes = [site for site, those in devices_by_site(begun.plan.sites, devices[:1]).items() if those]
    ends = [site for site in begun.plan.sites.names if (run or begun.run).endswith(f"-{site}")]
    if candidates := homes or sorted(ends, key=len)[-1:]:
        return candidates[0]
    raise ConfigError(f"run {begun.run}: no device took part in it, and its name ends with no site's name")


def accuracy_line(runs: Mapping[str, Sequence[AnyRecord]]) -> str:
    """Return a line with the last measured accuracy, or other compared metric, of each site, and their mean.

    Args:
        runs: Records of each site's run, by folder name, which ends with the site's name.
    """
    last = {find_site(records, run): measured_rounds(records)[-1:] for run, records in runs.items()}
    measured = [accuracies[0] for accuracies in last.values() if accuracies]
    metric = compared_metric(next(iter(runs.values()), ()))
    if not measured:
        return f"{metric.name} by site: none was measured"
    each = ", ".join(
        f"{site} {metric.format(rounds[0][0])}" if rounds else f"{site} -" for site, rounds in last.items()
    )
    mean = metric.format(math.fsum(value for value, _ in measured) / len(measured))
    of = "" if len(measured) == len(last) else f" of {len(measured)} sites"
    name = make_round_namer(next(iter(runs.values())))
    first, *others = sorted({number for _, number in measured})
    when = f"rounds {name(first)} to {name(others[-1])}" if others else f"round {name(first)}"
    return f"{metric.name} by site: {each}; mean{of} {mean} after {when}"


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in items)


def _bytes(count: int) -> str:
    unit = choose_unit(count, BYTES)
    return f"{count / unit.size:.3g} {unit.name}"
