"""Coordinate allocation decisions across sites, with rotating coordinators.

See `pledges` for terms and joules. A site sends its round's case to the coordinator of the current term. A site without
an answer by the deadline, or whose coordinator is offline, raises the term to that of the next reachable site. So at
the latest a site coordinates itself, alone, with its own joules, and announces it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from edge_server.allocation.inputs import SPREAD, Case
from edge_server.allocation.optimizers.hcef_budget import Place, remaining
from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan, predicted_joules
from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.journal.sqlite import encode
from edge_server.sites import pledges
from edge_server.sites.cases import ROUND_JOULES, merge_cases, pack_case, read_case, read_decision, restrict_decision
from edge_server.sites.gossip import OFFER_S, Keep, SiteIdentity
from edge_server.sites.link import Links
from edge_server.sites.pledges import EnergyAccount, GrantLog, Key, coordinator_of
from shared.errors import Unrecordable, WireError
from shared.protocol.messages import Message
from shared.protocol.peers import MOST_ASKED, Joules, Ruling, Telemetry
from shared.runtime.clock import Clock, remaining_s
from shared.runtime.executor import Worker
from shared.runtime.phases import log_phase

log = logging.getLogger(__name__)

LATE, TERM = "late", "term"
"""Reasons for a missing decision: the round was decided before; the term is over."""
GRACE_S = 4.0
"""Seconds that a site has to answer a new coordinator after missing the deadline of another one."""
KEPT_ROUNDS = 8
"""Rounds whose decisions a coordinator keeps in memory, to send them again."""
MOST_TERMS_AHEAD = 4096
"""Most terms ahead of ours that are adopted; a site that was offline for a whole run has not missed more."""
MOST_TERMS_HEARD = 64
"""Most terms adopted from one peer within a round: each of them is a record on the disk."""
ROUNDING = 1 + 1e-9


@dataclass
class Coordination:
    """One site's part in joint decisions, as coordinator or participant.

    Attributes:
        decide_case: Decides a case by the plan's optimizer.
        place: Returns the run's progress at a round.
        allowance: Joules that this site's devices may spend in the run, their share of the plan's; 0 for no budget.
        joules: The plan's joules: no pledge and no grant may exceed them.
        devices: Devices of each site of the plan.
    """

    identity: SiteIdentity
    links: Links
    keep: Keep
    decide_case: Callable[[Case], Decision]
    clock: Clock
    worker: Worker
    place: Callable[[int], Place]
    allowance: float = 0.0
    joules: float = 0.0
    devices: Mapping[str, Collection[str]] = field(default_factory=dict)
    _account: EnergyAccount = field(init=False)
    _grant_log: GrantLog = field(default_factory=GrantLog)
    _number: int = 0
    _last_decided: int = 0
    _cases: dict[Key, dict[str, Telemetry]] = field(default_factory=dict)
    _decisions: dict[Key, Coordinated] = field(default_factory=dict)
    _rulings: dict[Key, Ruling] = field(default_factory=dict)
    _settling: set[Key] = field(default_factory=set)
    _silent: set[str] = field(default_factory=set)
    _doubted: set[tuple[str, int]] = field(default_factory=set)
    _terms_heard: Counter[str] = field(default_factory=Counter)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Register for messages about decisions."""
        self._account = EnergyAccount(self.allowance)
        self.links.handlers |= {"telemetry": self.handle, "decision": self.handle}
        self.links.on_change.append(self._changed.set)

    def restore(self, records: Iterable[AnyRecord]) -> None:
        """Restore the term, pledges and decisions from the journal."""
        for record in records:
            match record:
                case TermBegan() if record.term > self._grant_log.term + MOST_TERMS_AHEAD:
                    log.error("term %d is too far ahead of %d and is ignored", record.term, self._grant_log.term)
                case TermBegan():
                    self._grant_log = pledges.adopt_term(self._grant_log, record.term)
                case Pledged():
                    pledged = {**self._account.pledged, (record.round, record.term): record.joules}
                    self._account = replace(self._account, pledged=pledged)
                case Granted():
                    self._account = pledges.credit(self._account, (record.round, record.term), record.joules)
                case Coordinated():
                    key = (record.round, record.term)
                    self._grant_log = replace(self._grant_log, grants={**self._grant_log.grants, key: record.grants})
                    self._decisions[key] = record
                case RoundOpened(decision=Decision() as decision) if decision.coordinator:
                    self._last_decided = max(self._last_decided, record.round)

    async def decide(self, case: Case, number: int) -> Decision:
        """Return the decision for this site's devices; see `edge_server.rounds.neighbours`."""
        self._number, self._last_decided = number, min(self._last_decided, number - 1)
        self._terms_heard.clear()
        self._drop_old_rounds()
        decision = await self._reach_decision(case, number)
        self._last_decided = max(self._last_decided, number)
        return decision

    async def _reach_decision(self, case: Case, number: int) -> Decision:
        while True:
            key = (number, self._grant_log.term)
            lead = coordinator_of(self.identity.order, key[1])
            decision = await (self._lead(case, key) if lead == self.identity.site else self._follow(lead, case, key))
            if decision is not None:
                return decision
            if self._grant_log.term == key[1]:
                reachable = {self.identity.site, *filter(self._may_answer, self.links.peers)}
                later = pledges.next_term(self.identity.order, key[1], reachable - {lead})
                log.warning("round %d: no decision of site %s: term %d begins", number, lead, later)
                await self._adopt(later, number, "gone" if self.links.is_gone(lead) else "deadline")
                self._silent.add(lead)

    def _may_answer(self, peer: str) -> bool:
        """Return true if a peer may answer: it is not known to be offline, and missed no deadline."""
        return not self.links.is_gone(peer) and peer not in self._silent

    def _drop_old_rounds(self) -> None:
        """Drop state of past rounds."""
        oldest = self._number - KEPT_ROUNDS
        for table in (self._cases, self._decisions, self._rulings):
            for key in [key for key in table if key[0] < oldest]:
                del table[key]
        self._doubted = {(peer, number) for peer, number in self._doubted if number >= self._number}

    async def _adopt(self, term: int, number: int, cause: str, speaker: str = "") -> None:
        """Journal and adopt a higher term; a peer that announces one got no answer from earlier coordinators."""
        before = self._grant_log.term
        if term > before:
            await self.keep(TermBegan(round=number, term=term, cause=cause, at=self.clock()))
            self._grant_log = pledges.adopt_term(self._grant_log, term)
            self._cases = {key: cases for key, cases in self._cases.items() if key[1] >= term}
            order = self.identity.order
            passed = [coordinator_of(order, past) for past in range(max(before, term - len(order)), term)]
            responsive = {self.identity.site, speaker, coordinator_of(self.identity.order, term)}
            self._doubted |= {(peer, number) for peer in passed if speaker and peer not in responsive}
            self._changed.set()

    async def _adopt_from_peer(self, peer: str, term: int, number: int) -> None:
        """Adopt a peer's term, within limits.

        Raises:
            WireError: The term is too far ahead, or one of too many.
        """
        if term <= self._grant_log.term:
            return
        if term > self._grant_log.term + MOST_TERMS_AHEAD:
            raise WireError(f"term {term} is too far ahead of ours, {self._grant_log.term}", reason=TERM)
        if self._terms_heard[peer] >= MOST_TERMS_HEARD:
            raise WireError(f"more than {MOST_TERMS_HEARD} terms within one round", reason=TERM)
        self._terms_heard[peer] += 1
        await self._adopt(term, number, "heard", peer)

    def _require_joules(self, joules: Iterable[float]) -> None:
        """Refuse a pledge or grant above the plan's joules."""
        if over := [amount for amount in joules if not 0 <= amount <= self.joules * ROUNDING]:
            raise WireError(f"{over[0]:g} J exceed the plan's {self.joules:g} J", reason="joules")

    async def _pledge(self, case: Case, key: Key) -> float | None:
        """Journal and pledge this round's part of our joules; None without a limit."""
        if ROUND_JOULES not in case.limits:
            return None
        if key not in self._account.pledged:
            account = pledges.pledge(self._account, key, self._round_share(case))
            await self.keep(Pledged(round=key[0], term=key[1], joules=account.pledged[key], at=self.clock()))
            self._account = account
        return self._account.pledged[key]

    def _round_share(self, case: Case) -> float:
        """Return this round's share of our joules; the sum over all sites is (15c), which is linear in them."""
        spent_joules = case.limits.get("spent_joules", 0.0)
        joules_before = case.limits.get("before_joules", spent_joules)
        even = remaining(self._account.rights, joules_before, self.place(self._number), spent_joules - joules_before)
        return max(0.0, even + case.limits.get(SPREAD, 0.0))

    async def _lead(self, case: Case, key: Key) -> Decision | None:
        """Decide for all sites whose cases arrive in time; None if a higher term has begun meanwhile."""
        log_phase(log, "leading", run=self.identity.run, round=key[0])
        pledge, began = await self._pledge(case, key), self.clock()
        for peer in sorted(self._silent - self._cases.get(key, {}).keys()):  # it may coordinate, too
            await self._announce_term(peer, key)
        while key not in self._decisions and self._grant_log.term == key[1]:
            self._changed.clear()
            silent = [peer for peer in self.links.peers if peer not in self._cases.get(key, {})]
            waits_s = {peer: remaining_s(began + self._patience_s(peer, key), self.clock()) for peer in silent}
            self._silent |= {peer for peer, seconds in waits_s.items() if seconds <= 0}
            if not (waits := {peer: seconds for peer, seconds in waits_s.items() if self._may_answer(peer)}):
                await self._settle(case, pledge, key)
                break
            for peer in waits:
                await self._announce_term(peer, key)
            await self._wait(min(OFFER_S, *waits.values()))
        record = self._decisions.get(key)
        if record is None or record.decision is None:
            return None
        await self._credit(key, record.grants.get(self.identity.site))
        return self._localize(record.decision, case, key, self.identity.site)

    def _patience_s(self, peer: str, key: Key) -> float:
        """Return the deadline of a peer's case in seconds; shorter if another site has waited for it before."""
        return min(GRACE_S, self.identity.deadline_s) if (peer, key[0]) in self._doubted else self.identity.deadline_s

    async def _announce_term(self, peer: str, key: Key) -> None:
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
        if key[1] < self._grant_log.term:
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
        cases |= {peer: read_case(message.case, self._devices_of(peer)) for peer, message in messages.items()}
        all_pledges = {site: messages[site].pledge if site in messages else pledge for site in cases}
        site_pledges = {site: joules for site, joules in all_pledges.items() if joules is not None}
        joules = math.fsum(site_pledges.values()) if site_pledges else None
        decision = await self.worker(self.decide_case, merge_cases(self.identity.site, cases, joules))
        devices = {site: tuple(case.names) for site, case in cases.items()}
        grants = pledges.share_out(site_pledges, _sum_joules(decision, devices)) if site_pledges else {}
        at = self.clock()
        return Coordinated(round=key[0], term=key[1], sites=devices, decision=decision, grants=grants, at=at)

    async def _record(self, record: Coordinated) -> None:
        """Journal a decision; until that is done, no pledge is answered."""
        key = (record.round, record.term)
        self._settling.add(key)
        try:
            await self.keep(record)
            grants = {**self._grant_log.grants, key: record.grants}
            self._grant_log, self._decisions[key] = replace(self._grant_log, grants=grants), record
        finally:
            self._settling.discard(key)

    async def _follow(self, lead: str, case: Case, key: Key) -> Decision | None:
        """Ask the coordinator; None if it does not answer, or its term is over."""
        pledge = await self._pledge(case, key)
        request = Telemetry(
            site=self.identity.site,
            run=self.identity.run,
            round=key[0],
            term=key[1],
            case=pack_case(case),
            pledge=pledge,
        )
        until = self.clock() + self.identity.deadline_s
        log_phase(log, "asking", run=self.identity.run, round=key[0])
        while (ruling := self._rulings.get(key)) is None:
            self._changed.clear()
            seconds = remaining_s(until, self.clock())
            if seconds <= 0 or self.links.is_gone(lead) or self._grant_log.term != key[1]:
                return None
            request = msgspec.structs.replace(request, asks=self._open_pledges(lead, key))
            await self.links.send(lead, "telemetry", request)
            await self._wait(min(OFFER_S, seconds))
        if ruling.decision:
            decision = read_decision(ruling.decision, self._devices_of(self.identity.site))
            decision = self._localize(decision, case, key, lead)
            if not decision.devices or decision.devices.keys() == set(case.names):
                return await self._check_means(decision, case, key)
            log.warning("round %d: site %s has not decided for all of our devices", key[0], lead)
        elif ruling.reason != LATE:
            return None
        else:
            log.warning("round %d: site %s has decided without us, deciding alone", key[0], lead)
        return await self._decide_alone(case, key)

    async def _decide_alone(self, case: Case, key: Key) -> Decision:
        limits = {**case.limits, ROUND_JOULES: self._round_share(case)} if ROUND_JOULES in case.limits else case.limits
        decision = await self.worker(self.decide_case, replace(case, limits=limits))
        return msgspec.structs.replace(decision, term=key[1], coordinator=self.identity.site)

    async def _check_means(self, decision: Decision, case: Case, key: Key) -> Decision:
        """Return a coordinator's decision, or our own if that needs less than half of joules that we do not have."""
        needed = math.fsum(predicted_joules(decision).values())
        if ROUND_JOULES not in case.limits or needed <= self._account.rights - case.limits.get("spent_joules", 0.0):
            return decision
        alone = await self._decide_alone(case, key)
        if 2 * math.fsum(predicted_joules(alone).values()) >= needed:
            return decision
        detail = f"{needed:.4g} J, more than are left; deciding locally"
        log.warning("round %d: site %s allocates to our devices %s", key[0], decision.coordinator, detail)
        return alone

    def _devices_of(self, site: str) -> Collection[str]:
        """Return the plan's devices of a site."""
        return self.devices.get(site, ())

    def _open_pledges(self, lead: str, key: Key) -> tuple[Joules, ...]:
        """Return earlier pledges to a coordinator that it has not answered."""
        open_ones = ((pledge_key, joules) for pledge_key, joules in self._account.list_open() if pledge_key != key)
        order = self.identity.order
        unsettled = [(*pledged, joules) for pledged, joules in open_ones if coordinator_of(order, pledged[1]) == lead]
        return tuple(unsettled[-MOST_ASKED:])

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()

    def _localize(self, decision: Decision, case: Case, key: Key, coordinator: str) -> Decision:
        """Return our part of a decision, with our own limits and grant."""
        granted = self._account.granted.get(key)
        limits = dict(case.limits) if granted is None else {**case.limits, ROUND_JOULES: granted}
        part = restrict_decision(decision, case.names)
        return msgspec.structs.replace(part, limits=limits, term=key[1], coordinator=coordinator)

    async def _credit(self, key: Key, joules: float | None) -> None:
        """Journal and book a grant."""
        if joules is None:
            return
        account = pledges.credit(self._account, key, joules)
        if account is not self._account:
            await self.keep(Granted(round=key[0], term=key[1], joules=joules, at=self.clock()))
            self._account = pledges.credit(self._account, key, joules)

    async def handle(self, peer: str, message: Message | bytes) -> None:
        """Handle a peer's message about decisions.

        Raises:
            WireError: It is invalid.
        """
        self._silent.discard(peer)
        self._doubted = {doubt for doubt in self._doubted if doubt[0] != peer}
        match message:
            case Telemetry():
                await self._handle_case(peer, message)
            case Ruling():
                await self._handle_ruling(peer, message)
            case _:
                raise WireError(f"{type(message).__name__} is not about decisions", reason="unexpected")

    async def _handle_case(self, peer: str, message: Telemetry) -> None:
        """Store a site's case; answer it if its round is decided, or cannot be decided any more."""
        key = (message.round, message.term)
        if coordinator_of(self.identity.order, message.term) != self.identity.site:
            raise WireError(f"term {message.term} is another site's", reason=TERM)
        self._require_joules([message.pledge or 0.0, *(joules for *_, joules in message.asks)])
        if message.round < 1:
            raise WireError("rounds count from 1", reason="round")
        read_case(message.case, self._devices_of(peer))
        if self._settling:
            return  # the peer repeats it
        await self._adopt_from_peer(peer, message.term, message.round)
        is_over = message.round <= self._last_decided or message.round < self._number
        if is_over and key not in self._grant_log.grants and message.term == self._grant_log.term:
            await self._record(Coordinated(round=message.round, term=message.term, at=self.clock()))
        if key in self._grant_log.grants or message.term < self._grant_log.term:
            await self._answer(peer, message)
            return
        if message.round <= self._number + KEPT_ROUNDS:  # the peer repeats later rounds
            self._cases.setdefault(key, {})[peer] = message
            self._changed.set()

    async def _answer(self, peer: str, message: Telemetry) -> None:
        """Send the decision of a round and term, and the state of pledges."""
        key, record = (message.round, message.term), self._decisions.get((message.round, message.term))
        devices = record.sites.get(peer) if record and record.decision else None
        decision = b""
        if record and record.decision and devices:
            decision = msgspec.msgpack.encode(restrict_decision(record.decision, devices))
        pledged = [(key, message.pledge)] if message.pledge is not None else []
        pledged += [((number, term), joules) for number, term, joules in message.asks]
        answers = [(asked, pledges.find_grant(self._grant_log, peer, asked, joules)) for asked, joules in pledged]
        await self.links.reply(
            peer,
            "decision",
            Ruling(
                site=self.identity.site,
                run=self.identity.run,
                round=message.round,
                term=message.term if key in self._grant_log.grants else max(message.term, self._grant_log.term),
                decision=decision,
                grants=tuple((*pledge_key, joules) for pledge_key, joules in answers if joules is not None),
                reason="" if decision else LATE if key in self._grant_log.grants else TERM,
            ),
        )

    async def _handle_ruling(self, peer: str, ruling: Ruling) -> None:
        """Handle a coordinator's reply; a decision of a past term is ignored."""
        self._require_joules(joules for *_, joules in ruling.grants)
        for number, term, joules in ruling.grants:
            if coordinator_of(self.identity.order, term) == peer:
                await self._credit((number, term), joules)
        if ruling.reason == TERM:
            await self._adopt_from_peer(peer, ruling.term, self._number)
            if ruling.term < self._grant_log.term:  # it was offline and does not know our term
                await self._announce_term(peer, (self._number, self._grant_log.term))
        else:
            self._store_ruling(peer, ruling)

    def _store_ruling(self, peer: str, ruling: Ruling) -> None:
        if coordinator_of(self.identity.order, ruling.term) != peer:
            raise WireError(f"term {ruling.term} is not of site {peer}", reason=TERM)
        if ruling.term < self._grant_log.term:
            raise WireError(f"ruling of term {ruling.term}, the current one is {self._grant_log.term}", reason=TERM)
        if ruling.decision:
            read_decision(ruling.decision, self._devices_of(self.identity.site))
        if ruling.round == self._number and ruling.term == self._grant_log.term:  # ignore other rounds
            self._rulings[ruling.round, ruling.term] = ruling
            self._changed.set()


def _sum_joules(decision: Decision, devices: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """Return the predicted joules of a decision, by site."""
    each = predicted_joules(decision)
    return {site: math.fsum(each.get(device, 0.0) for device in names) for site, names in devices.items()}
