"""Coordinate allocation decisions across sites, with rotating coordinators.

See `pledges` for terms and joules. A site sends its round's case to the coordinator of the current term. A site without
an answer by the deadline, or whose coordinator is offline, raises the term to that of the next reachable site. So at
the latest a site coordinates itself, alone, with its own joules, and announces it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan, predicted_joules
from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.sites.cases import ROUND_JOULES, pack_case, read_decision
from edge_server.sites.coordinator import KEPT_ROUNDS, LATE, Coordinator, localize, wait_for
from edge_server.sites.identity import OFFER_S, SiteIdentity, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.pledges import Key, coordinator_of
from edge_server.sites.site_energy import SiteEnergy
from edge_server.sites.terms import TERM, Terms
from shared.errors import WireError
from shared.protocol.messages import Message
from shared.protocol.peers import Ruling, Telemetry
from shared.runtime.clock import remaining_s
from shared.runtime.phases import log_phase

log = logging.getLogger(__name__)


class Coordination:
    """One site's part in joint decisions, as coordinator or participant.

    Args:
        devices: Devices of each site of the plan.
    """

    def __init__(
        self,
        identity: SiteIdentity,
        links: Links,
        services: SiteServices,
        energy: SiteEnergy,
        devices: Mapping[str, Collection[str]],
    ) -> None:
        self.identity, self.links, self.services = identity, links, services
        self.energy, self.devices, self.changed = energy, devices, asyncio.Event()
        self.terms = terms = Terms(identity, links, services, self._begin_term)
        self.coordinator = Coordinator(identity, links, services, devices, terms, energy, self.changed)
        self._rulings: dict[Key, Ruling] = {}
        links.handlers |= {"telemetry": self.handle, "decision": self.handle}
        links.on_change.append(self.changed.set)

    def _begin_term(self, term: int) -> None:
        self.coordinator.drop_cases(term)
        self.changed.set()

    def restore(self, records: Iterable[AnyRecord]) -> None:
        """Restore the term, pledges and decisions from the journal."""
        for record in records:
            match record:
                case TermBegan():
                    self.terms.restore(record)
                case Pledged() | Granted():
                    self.energy.restore(record)
                case Coordinated():
                    self.coordinator.restore(record)
                case RoundOpened(decision=Decision() as decision) if decision.coordinator:
                    self.coordinator.last_decided = max(self.coordinator.last_decided, record.round)

    async def decide(self, case: Case, number: int) -> Decision:
        """Return the decision for this site's devices; see `edge_server.rounds.neighbours`."""
        self.terms.begin_round(number)
        self.coordinator.begin_round(number)
        self._rulings = {key: ruling for key, ruling in self._rulings.items() if key[0] >= number - KEPT_ROUNDS}
        decision = await self._reach_decision(case, number)
        self.coordinator.last_decided = max(self.coordinator.last_decided, number)
        return decision

    async def _reach_decision(self, case: Case, number: int) -> Decision:
        while True:
            key = (number, self.terms.current)
            lead = coordinator_of(self.identity.order, key[1])
            if lead == self.identity.site:
                decision = await self.coordinator.lead(case, key)
            else:
                decision = await self._follow(lead, case, key)
            if decision is not None:
                return decision
            if self.terms.current == key[1]:
                await self.terms.replace_coordinator(lead, number)

    async def _follow(self, lead: str, case: Case, key: Key) -> Decision | None:
        """Ask the coordinator; None if it does not answer, or its term is over."""
        pledge = await self.energy.pledge(case, key)
        request = Telemetry(
            site=self.identity.site,
            run=self.identity.run,
            round=key[0],
            term=key[1],
            case=pack_case(case),
            pledge=pledge,
        )
        until = self.services.clock() + self.identity.deadline_s
        log_phase(log, "asking", run=self.identity.run, round=key[0])
        while (ruling := self._rulings.get(key)) is None:
            self.changed.clear()
            seconds = remaining_s(until, self.services.clock())
            if seconds <= 0 or self.links.is_gone(lead) or self.terms.current != key[1]:
                return None
            request = msgspec.structs.replace(request, asks=self.energy.list_open(lead, key))
            await self.links.send(lead, "telemetry", request)
            await wait_for(self.changed, min(OFFER_S, seconds))
        if ruling.decision:
            decision = read_decision(ruling.decision, self.devices.get(self.identity.site, ()))
            decision = localize(self.energy, decision, case, key, lead)
            if not decision.devices or decision.devices.keys() == set(case.names):
                return await self._check_means(decision, case, key)
            log.warning("round %d: site %s has not decided for all of our devices", key[0], lead)
        elif ruling.reason != LATE:
            return None
        else:
            log.warning("round %d: site %s has decided without us, deciding alone", key[0], lead)
        return await self._decide_alone(case, key)

    async def _decide_alone(self, case: Case, key: Key) -> Decision:
        limits = (
            {**case.limits, ROUND_JOULES: self.energy.round_share(case, key[0])}
            if ROUND_JOULES in case.limits
            else case.limits
        )
        decision = await self.services.worker(self.services.decide_case, replace(case, limits=limits))
        return msgspec.structs.replace(decision, term=key[1], coordinator=self.identity.site)

    async def _check_means(self, decision: Decision, case: Case, key: Key) -> Decision:
        """Return a coordinator's decision, or our own if that needs less than half of joules that we do not have."""
        needed = math.fsum(predicted_joules(decision).values())
        if ROUND_JOULES not in case.limits or needed <= self.energy.account.rights - case.limits.get(
            "spent_joules", 0.0
        ):
            return decision
        alone = await self._decide_alone(case, key)
        if 2 * math.fsum(predicted_joules(alone).values()) >= needed:
            return decision
        detail = f"{needed:.4g} J, more than are left; deciding locally"
        log.warning("round %d: site %s allocates to our devices %s", key[0], decision.coordinator, detail)
        return alone

    async def handle(self, peer: str, message: Message | bytes) -> None:
        """Handle a peer's message about decisions.

        Raises:
            WireError: It is invalid.
        """
        self.terms.note_message(peer)
        match message:
            case Telemetry():
                await self.coordinator.handle_case(peer, message)
            case Ruling():
                await self._handle_ruling(peer, message)
            case _:
                raise WireError(f"{type(message).__name__} is not about decisions", reason="unexpected")

    async def _handle_ruling(self, peer: str, ruling: Ruling) -> None:
        """Handle a coordinator's reply; a decision of a past term is ignored."""
        self.energy.require(joules for *_, joules in ruling.grants)
        for number, term, joules in ruling.grants:
            if coordinator_of(self.identity.order, term) == peer:
                await self.energy.credit((number, term), joules)
        if ruling.reason == TERM:
            await self.terms.adopt_from_peer(peer, ruling.term, self.coordinator.number)
            if ruling.term < self.terms.current:  # it was offline and does not know our term
                await self.coordinator.announce_term(peer, (self.coordinator.number, self.terms.current))
        else:
            self._store_ruling(peer, ruling)

    def _store_ruling(self, peer: str, ruling: Ruling) -> None:
        if coordinator_of(self.identity.order, ruling.term) != peer:
            raise WireError(f"term {ruling.term} is not of site {peer}", reason=TERM)
        if ruling.term < self.terms.current:
            raise WireError(f"ruling of term {ruling.term}, the current one is {self.terms.current}", reason=TERM)
        if ruling.decision:
            read_decision(ruling.decision, self.devices.get(self.identity.site, ()))
        if ruling.round == self.coordinator.number and ruling.term == self.terms.current:  # ignore other rounds
            self._rulings[ruling.round, ruling.term] = ruling
            self.changed.set()
