"""How a site stands among its peers, by its journal: who mixed with it, what that took, who decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from edge_server.journal.decision import TermBegan
from edge_server.journal.outcome import RefusedModels, refused_models
from edge_server.journal.records import (
    AnyRecord,
    Gossiped,
    Joined,
    RoundClosed,
    RoundOpened,
    RunOpened,
    measured_rounds,
)
from edge_server.journal.runs import name_rounds
from edge_server.plan.sites import devices_by_site, round_name
from shared.errors import ConfigError, Unwritable
from shared.protocol.units import BYTES, SECONDS, choose_unit
from shared.runtime.durable import replace_file
from shared.runtime.text_table import TextColumn, TextTable

HEARD = "peers/heard.json"
"""In the folder of a live run: the round that each peer has begun, by its own word."""


class PeerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One peer in a line.

    Attributes:
        round: Which it has begun, by its own word, as `global.edge`; empty where it has told none.
        missed: Those in which the edge to it was off.
        last: The round of the last gossip with it, as `global.edge`; empty where there was none.
        cause: Why the edge was off in the last gossip, one word; empty where it was on.
        bytes_up, bytes_down: Bytes of models that went to it, and that came of it.
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
    """One site of a run.

    Attributes:
        run: By this site's name of it.
        sites: All, in the plan's order.
        round: The last that was opened, as `global.edge`; empty before the first.
        rounds: That have ended, of how many.
        gossip_s: Seconds of all gossips together.
        coordinator: Of the last decision; empty where nobody decides.
        term: Of the coordinator, by what this site heard last.
        refused: What peers said that was of no use, by reason.
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
    """Write down which round each peer has begun; it is for people, and where the disk takes nothing, it is left."""
    path = folder / HEARD
    with suppress(OSError, Unwritable):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(rounds), durable=False)


def read_rounds(folder: Path) -> dict[str, int]:
    """Return which round each peer of a run has begun, as far as anybody wrote it down."""
    try:
        return msgspec.json.decode((folder / HEARD).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}


def summarise_sites(records: Sequence[AnyRecord], heard: Mapping[str, int] | None = None) -> SitesSummary:
    """Return how a site stands.

    Args:
        heard: Which round each peer has begun.

    Raises:
        ConfigError: The run has one site alone, or was not begun.
    """
    begun = next((one for one in records if isinstance(one, RunOpened)), None)
    if begun is None or not begun.plan.sites:
        raise ConfigError("the run's plan has no [sites]: it has one server, and that no peers")
    edge_rounds = begun.plan.sites.edge_rounds
    gossips = {one.round: one for one in records if isinstance(one, Gossiped)}
    opened = [one for one in records if isinstance(one, RoundOpened) and one.round <= begun.plan.rounds]
    closed = {one.round for one in records if isinstance(one, RoundClosed) and one.round <= begun.plan.rounds}
    decided = [one.decision for one in opened if one.decision and one.decision.coordinator]
    refused: dict[str, int] = {}
    for gossip in gossips.values():
        for reason, count in gossip.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    name, begun_there = name_rounds(records), heard or {}
    peers = dict.fromkeys(peer for gossip in gossips.values() for peer in (*gossip.on, *gossip.off))
    peers |= dict.fromkeys(begun_there)
    return SitesSummary(
        run=begun.run,
        sites=begun.plan.sites.names,
        round=round_name(opened[-1].round, edge_rounds) if opened else "",
        rounds=(len(closed), begun.plan.rounds),
        gossip_s=sum(gossip.seconds for gossip in gossips.values()),
        coordinator=decided[-1].coordinator if decided else "",
        term=max((one.term for one in records if isinstance(one, TermBegan)), default=0),
        peers=[
            _peer(site, name(begun_there[site]) if site in begun_there else "", list(gossips.values()), name)
            for site in peers
        ],
        refused=dict(sorted(refused.items())),
        refused_models=refused_models(records),
    )


def _peer(site: str, begun: str, gossips: Sequence[Gossiped], name: Callable[[int], str]) -> PeerSummary:
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


def sites_table(found: SitesSummary) -> tuple[TextTable, list[str]]:
    """Return a table of the neighbours, and lines of what concerns the site itself."""
    columns = [
        TextColumn(name)
        for name in ("peer", "in round", "mixed", "missed", "last", "bytes up", "bytes down", "edge off")
    ]
    rows = [
        [
            one.site,
            one.round,
            str(one.mixed),
            str(one.missed),
            one.last,
            _bytes(one.bytes_up),
            _bytes(one.bytes_down),
            one.cause,
        ]
        for one in found.peers
    ]
    unit = choose_unit(found.gossip_s, SECONDS)
    lines = [
        f"run {found.run}: {found.rounds[0]} of {found.rounds[1]} rounds, in {found.round or 'none yet'} (global.edge)",
        f"sites {', '.join(found.sites)}; gossip took {found.gossip_s / unit.size:.3g} {unit.name} in all",
    ]
    if found.coordinator:
        lines.append(f"site {found.coordinator} coordinates, term {found.term}")
    if found.refused:
        lines.append(f"refused of peers: {_counts(found.refused.items())}")
    lines += [one.line for one in found.refused_models]
    return TextTable(columns, rows), lines


def site_of(records: Sequence[AnyRecord], run: str = "") -> str:
    """Return which site of its plan a run is of: its devices tell, and where there were none, its name's end.

    Args:
        run: Its name, where the journal's is another.

    Raises:
        ConfigError: Nothing tells.
    """
    begun = next((one for one in records if isinstance(one, RunOpened)), None)
    if begun is None or not begun.plan.sites:
        raise ConfigError("the run's plan has no [sites]")
    told = next((list(one.assignments) for one in records if isinstance(one, RoundOpened) and one.assignments), [])
    told = told or [one.device for one in records if isinstance(one, Joined)]
    homes = [site for site, those in devices_by_site(begun.plan.sites, told[:1]).items() if those]
    ends = [site for site in begun.plan.sites.names if (run or begun.run).endswith(f"-{site}")]
    if found := homes or sorted(ends, key=len)[-1:]:
        return found[0]
    raise ConfigError(f"run {begun.run}: no device of any site took part in it, and its name is no site's")


def accuracy_line(runs: Mapping[str, Sequence[AnyRecord]]) -> str:
    """Return how accurate the model of each site was when it was measured last, and the mean of these.

    Args:
        runs: The records of each site's run, by its folder's name, which ends with the site's.
    """
    last = {site_of(records, run): measured_rounds(records)[-1:] for run, records in runs.items()}
    known = [found[0] for found in last.values() if found]
    if not known:
        return "accuracy by site: none was measured"
    each = ", ".join(f"{site} {found[0][0]:.4f}" if found else f"{site} -" for site, found in last.items())
    mean = math.fsum(accuracy for accuracy, _ in known) / len(known)
    of = "" if len(known) == len(last) else f" of {len(known)} sites"
    name = name_rounds(next(iter(runs.values())))
    first, *others = sorted({number for _, number in known})
    when = f"rounds {name(first)} to {name(others[-1])}" if others else f"round {name(first)}"
    return f"accuracy by site: {each}; mean{of} {mean:.4f} after {when}"


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in items)


def _bytes(count: int) -> str:
    unit = choose_unit(count, BYTES)
    return f"{count / unit.size:.3g} {unit.name}"
