"""Decide for all sites, as the coordinator of a term."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Coordinated, Decision, predicted_joules
from edge_server.journal.sqlite import encode
from edge_server.sites import pledges
from edge_server.sites.cases import ROUND_JOULES, merge_cases, read_case, restrict_decision
from edge_server.sites.identity import OFFER_S, SiteIdentity, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.pledges import Key, coordinator_of
from edge_server.sites.site_energy import SiteEnergy
from edge_server.sites.terms import TERM, Terms
from shared.errors import Unrecordable, WireError
from shared.protocol.peers import Ruling, Telemetry
from shared.runtime.clock import remaining_s
from shared.runtime.phases import log_phase

log = logging.getLogger(__name__)

LATE = "late"
"""Reason for a missing decision: the round was decided before."""
KEPT_ROUNDS = 8
"""Rounds whose decisions a coordinator keeps in memory, to send them again."""


@dataclass
class Coordinator:
    """One site's part in joint decisions during its own terms.

    Attributes:
        devices: Devices of each site of the plan.
        changed: Set whenever a case arrives, a term begins, or a peer comes or goes.
        last_decided: The last round that is decided for this site's devices.
    """

    identity: SiteIdentity
    links: Links
    services: SiteServices
    devices: Mapping[str, Collection[str]]
    terms: Terms
    energy: SiteEnergy
    changed: asyncio.Event
    number: int = 0
    last_decided: int = 0
    _cases: dict[Key, dict[str, Telemetry]] = field(default_factory=dict)
    _decisions: dict[Key, Coordinated] = field(default_factory=dict)
    _settling: set[Key] = field(default_factory=set)

    def restore(self, record: Coordinated) -> None:
        """Restore a journalled decision."""
        key = (record.round, record.term)
        self.terms.log = replace(self.terms.log, grants={**self.terms.log.grants, key: record.grants})
        self._decisions[key] = record

    def begin_round(self, number: int) -> None:
        """Begin a round; drop state of past ones."""
        self.number, self.last_decided = number, min(self.last_decided, number - 1)
        for table in (self._cases, self._decisions):
            for key in [key for key in table if key[0] < number - KEPT_ROUNDS]:
                del table[key]

    def drop_cases(self, term: int) -> None:
        """Drop the cases of earlier terms."""
        self._cases = {key: cases for key, cases in self._cases.items() if key[1] >= term}

    async def lead(self, case: Case, key: Key) -> Decision | None:
        """Decide for all sites whose cases arrive in time; None if a higher term has begun meanwhile."""
        log_phase(log, "leading", run=self.identity.run, round=key[0])
        pledge, began = await self.energy.pledge(case, key), self.services.clock()
        for peer in sorted(self.terms.silent - self._cases.get(key, {}).keys()):  # it may coordinate, too
            await self.announce_term(peer, key)
        while key not in self._decisions and self.terms.current == key[1]:
            self.changed.clear()
            silent = [peer for peer in self.links.peers if peer not in self._cases.get(key, {})]
            waits_s = {
                peer: remaining_s(began + self.terms.patience_s(peer, key[0]), self.services.clock()) for peer in silent
            }
            self.terms.silent |= {peer for peer, seconds in waits_s.items() if seconds <= 0}
            if not (waits := {peer: seconds for peer, seconds in waits_s.items() if self.terms.may_answer(peer)}):
                await self._settle(case, pledge, key)
                break
            for peer in waits:
                await self.announce_term(peer, key)
            await wait_for(self.changed, min(OFFER_S, *waits.values()))
        record = self._decisions.get(key)
        if record is None or record.decision is None:
            return None
        await self.energy.credit(key, record.grants.get(self.identity.site))
        return localize(self.energy, record.decision, case, key, self.identity.site)

    async def announce_term(self, peer: str, key: Key) -> None:
        """Send a peer the current term, which it may have missed."""
        call = Ruling(site=self.identity.site, run=self.identity.run, round=key[0], term=key[1], reason=TERM)
        await self.links.reply(peer, "decision", call)

    async def _settle(self, case: Case, pledge: float | None, key: Key) -> None:
        """Decide, journal the decision, then send it."""
        log_phase(log, "deciding", run=self.identity.run, round=key[0])
        messages = dict(self._cases.get(key, {}))
        try:
            record = await self._decide_all(case, pledge, key, messages)
            encode(record)
        except Unrecordable as error:  # their figures are within bounds, but overflow when added
            log.warning("round %d: the cases of %s cannot be used: %s", key[0], ", ".join(sorted(messages)), error)
            messages = {}
            record = await self._decide_all(case, pledge, key, messages)
        if key[1] < self.terms.current:
            return
        if alone := [site for site in self.identity.order if site not in record.sites]:
            log.warning("round %d: site %s decides without %s", key[0], self.identity.site, ", ".join(alone))
        await self._record(record)
        log_phase(log, "decided", run=self.identity.run, round=key[0])
        for peer, message in messages.items():
            await self._answer(peer, message)

    async def _decide_all(
        self, case: Case, pledge: float | None, key: Key, messages: Mapping[str, Telemetry]
    ) -> Coordinated:
        """Return the decision for our devices and those of the sites whose cases arrived."""
        cases = {self.identity.site: case}
        cases |= {peer: read_case(message.case, self.devices.get(peer, ())) for peer, message in messages.items()}
        all_pledges = {site: messages[site].pledge if site in messages else pledge for site in cases}
        site_pledges = {site: joules for site, joules in all_pledges.items() if joules is not None}
        joules = math.fsum(site_pledges.values()) if site_pledges else None
        decision = await self.services.worker(self.services.decide_case, merge_cases(self.identity.site, cases, joules))
        devices = {site: tuple(case.names) for site, case in cases.items()}
        grants = pledges.share_out(site_pledges, _sum_joules(decision, devices)) if site_pledges else {}
        at = self.services.clock()
        return Coordinated(round=key[0], term=key[1], sites=devices, decision=decision, grants=grants, at=at)

    async def _record(self, record: Coordinated) -> None:
        """Journal a decision; until that is done, no pledge is answered."""
        key = (record.round, record.term)
        self._settling.add(key)
        try:
            await self.services.keep(record)
            grants = {**self.terms.log.grants, key: record.grants}
            self.terms.log, self._decisions[key] = replace(self.terms.log, grants=grants), record
        finally:
            self._settling.discard(key)

    async def handle_case(self, peer: str, message: Telemetry) -> None:
        """Store a site's case; answer it if its round is decided, or cannot be decided any more.

        Raises:
            WireError: It is invalid.
        """
        key = (message.round, message.term)
        if coordinator_of(self.identity.order, message.term) != self.identity.site:
            raise WireError(f"term {message.term} is another site's", reason=TERM)
        self.energy.require([message.pledge or 0.0, *(joules for *_, joules in message.asks)])
        if message.round < 1:
            raise WireError("rounds count from 1", reason="round")
        read_case(message.case, self.devices.get(peer, ()))
        if self._settling:
            return  # the peer repeats it
        await self.terms.adopt_from_peer(peer, message.term, message.round)
        is_over = message.round <= self.last_decided or message.round < self.number
        if is_over and key not in self.terms.log.grants and message.term == self.terms.current:
            await self._record(Coordinated(round=message.round, term=message.term, at=self.services.clock()))
        if key in self.terms.log.grants or message.term < self.terms.current:
            await self._answer(peer, message)
            return
        if message.round <= self.number + KEPT_ROUNDS:  # the peer repeats later rounds
            self._cases.setdefault(key, {})[peer] = message
            self.changed.set()

    async def _answer(self, peer: str, message: Telemetry) -> None:
        """Send the decision of a round and term, and the state of pledges."""
        key, record = (message.round, message.term), self._decisions.get((message.round, message.term))
        devices = record.sites.get(peer) if record and record.decision else None
        decision = b""
        if record and record.decision and devices:
            decision = msgspec.msgpack.encode(restrict_decision(record.decision, devices))
        pledged = [(key, message.pledge)] if message.pledge is not None else []
        pledged += [((number, term), joules) for number, term, joules in message.asks]
        answers = [(asked, pledges.find_grant(self.terms.log, peer, asked, joules)) for asked, joules in pledged]
        await self.links.reply(
            peer,
            "decision",
            Ruling(
                site=self.identity.site,
                run=self.identity.run,
                round=message.round,
                term=message.term if key in self.terms.log.grants else max(message.term, self.terms.current),
                decision=decision,
                grants=tuple((*pledge_key, joules) for pledge_key, joules in answers if joules is not None),
                reason="" if decision else LATE if key in self.terms.log.grants else TERM,
            ),
        )


async def wait_for(changed: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await changed.wait()


def localize(energy: SiteEnergy, decision: Decision, case: Case, key: Key, coordinator: str) -> Decision:
    """Return our part of a decision, with our own limits and grant."""
    granted = energy.account.granted.get(key)
    limits = dict(case.limits) if granted is None else {**case.limits, ROUND_JOULES: granted}
    part = restrict_decision(decision, case.names)
    return msgspec.structs.replace(part, limits=limits, term=key[1], coordinator=coordinator)


def _sum_joules(decision: Decision, devices: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """Return the predicted joules of a decision, by site."""
    each = predicted_joules(decision)
    return {site: math.fsum(each.get(device, 0.0) for device in names) for site, names in devices.items()}
