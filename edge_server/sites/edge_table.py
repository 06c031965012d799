"""Gossip edges of one site: settled once, journalled and announced."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from edge_server.journal.outcome import REFUSALS
from edge_server.journal.records import EdgeSettled, Noted
from edge_server.sites import verdicts
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.verdicts import EdgeState
from shared.protocol.clip import NAME, printable
from shared.protocol.peers import EdgeWord
from shared.runtime.clock import remaining_s
from shared.runtime.phases import log_phase

log = logging.getLogger(__name__)

PEER_SUFFIX = "-there"
"""Suffix of causes for which the other end refused our model."""


@dataclass
class EdgeTable:
    """Edges of the current or last gossip, and the verdicts of earlier ones.

    Attributes:
        number: The round of the gossip.
        states: This end's state of each edge, by neighbour.
        digests: Digests of the neighbours' models that are stored.
        changed: Set whenever an edge may have changed.
    """

    identity: SiteIdentity
    links: Links
    services: SiteServices
    number: int = 0
    states: dict[str, EdgeState] = field(default_factory=dict)
    digests: dict[str, bytes] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: dict[tuple[int, str], bool] = field(default_factory=dict)
    _noted: set[tuple[int, str]] = field(default_factory=set)

    def restore(self, record: EdgeSettled) -> None:
        """Restore a settled edge."""
        self._settled[record.round, record.site] = record.on
        if record.on:
            self.links.bound_runs.setdefault(record.site, record.run)

    def begin(self, number: int, digests: dict[str, bytes | None]) -> None:
        """Begin a gossip, or continue it after a restart.

        Args:
            digests: Digest of each neighbour's model that is stored already; None without one.
        """
        self.number, self.digests = number, {peer: digest for peer, digest in digests.items() if digest is not None}
        for peer in digests:
            on, has = self._settled.get((number, peer)), peer in self.digests
            self.states[peer] = EdgeState(owns=self.identity.owns(peer), on=on, is_delivered=bool(on), has=has)
            if on and not has:
                log.error(
                    "round %d: the model of site %s was mixed, but its file is missing; continuing without it",
                    number,
                    peer,
                )
                self.states[peer] = replace(self.states[peer], on=False, cause="disk")

    def is_settled(self, peer: str) -> bool:
        """Return true if this end has settled an edge."""
        return self.states[peer].on is not None

    def was_on(self, number: int, peer: str) -> bool:
        """Return true if an edge was on in an earlier gossip."""
        return self._settled.get((number, peer), False)

    def refuse(self, peer: str, cause: str) -> None:
        """Rule an edge out."""
        self.states[peer] = verdicts.refuse(self.states[peer], cause)
        self.changed.set()

    async def receive_model(self, peer: str, digest: bytes) -> None:
        """Acknowledge a neighbour's model that is stored."""
        log_phase(log, "received", run=self.identity.run, round=self.number)
        self.digests[peer] = digest
        self.states[peer] = verdicts.receive_model(self.states[peer])
        self.changed.set()
        await self.send_verdict(peer)

    async def settle_all(self, started: float) -> None:
        """Settle every edge, by each end's deadline after the beginning."""
        while open_ones := [peer for peer, edge in self.states.items() if edge.on is None]:
            self.changed.clear()
            patience_s = {peer: self.identity.deadline_s * (1 if self.identity.owns(peer) else 2) for peer in open_ones}
            waits_s = {peer: remaining_s(started + patience_s[peer], self.services.clock()) for peer in open_ones}
            for peer, seconds in waits_s.items():
                if why := self.links.objection(peer):
                    self.states[peer] = verdicts.refuse(self.states[peer], why)
                judged = verdicts.judge(self.states[peer], is_late=seconds <= 0)
                if judged.on is not None:
                    await self._settle(peer, judged)
                    self.changed.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(waits_s.values())):
                    await self.changed.wait()

    async def _settle(self, peer: str, judged: EdgeState) -> None:
        """Journal and announce how an edge is settled."""
        number, on = self.number, bool(judged.on)
        run = self.links.run_of(peer)
        record = EdgeSettled(round=number, site=peer, run=run, on=on, cause=judged.cause, at=self.services.clock())
        await self.services.keep(record)
        log_phase(log, "settled", run=self.identity.run, round=number)
        self._settled[number, peer] = on
        if on:
            self.links.bound_runs.setdefault(peer, run)
        else:
            note = "its verdict never came and may differ" if judged.cause == verdicts.UNHEARD else ""
            log.warning("round %d: not mixed with site %s: %s%s", number, peer, judged.cause, note and f" ({note})")
        self.states[peer] = replace(self.states[peer], on=on, cause=judged.cause)
        await self.send_verdict(peer)

    async def send_verdict(self, peer: str) -> None:
        """Send a neighbour our state of the edge."""
        edge = self.states[peer]
        verdict = self.build_verdict(self.number, self.digests.get(peer, b""), on=edge.on, reason=edge.cause)
        await self.links.reply(peer, "gossiped", msgspec.structs.replace(verdict, has=edge.has))

    def build_verdict(self, number: int, digest: bytes, *, on: bool | None, reason: str) -> EdgeWord:
        """Return the message about an edge; `digest` is that of the neighbour's model."""
        why = reason.removesuffix(PEER_SUFFIX) if on is False else ""
        site, run = self.identity.site, self.identity.run
        return EdgeWord(site=site, run=run, round=number, digest=digest, has=bool(on), on=on, reason=why)

    async def handle_verdict(self, peer: str, verdict: EdgeWord, *, has: bool) -> None:
        """Handle the other end's verdict.

        Args:
            has: Whether it has our current model.
        """
        if verdict.round != self.number or peer not in self.states:
            is_on = self._settled.get((verdict.round, peer))
            if is_on is not None and verdict.on is not None and verdict.on != is_on:
                await self._record_difference(verdict.round, peer, is_on=is_on)
            return
        edge = self.states[peer]
        cause = f"{verdict.reason}{PEER_SUFFIX}" if verdict.reason in REFUSALS else printable(verdict.reason, NAME)
        self.states[peer] = edge = verdicts.receive_verdict(edge, has=has, on=verdict.on, cause=cause)
        self.changed.set()
        if verdicts.is_contradicted(edge):
            await self._record_difference(verdict.round, peer, is_on=bool(edge.on))

    async def _record_difference(self, number: int, peer: str, *, is_on: bool) -> None:
        """Record once that both ends settled an edge differently: the mean of the models has changed."""
        if (number, peer) in self._noted:
            return
        self._noted.add((number, peer))
        local, remote = ("on", "off") if is_on else ("off", "on")
        what = f"round {number}: the edge to site {peer} is {local} here and {remote} there: the mean of both has moved"
        log.error("%s", what)
        await self.services.keep(Noted(what=what))
