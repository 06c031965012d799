"""Decisions for the devices of all sites: who coordinates, what is told to it, and what it answers.

See `pledges` for terms and joules. A site sends the case of its round to the coordinator of the current term; who gets
no answer by the deadline, or knows that the coordinator is gone, raises the term to the next site that is there. So at
the latest a site coordinates itself, alone, with its own joules, and says so.
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
from edge_server.allocation.optimizers.hcef_problem import Place, remaining
from edge_server.journal.decision import Coordinated, Decision, Granted, Pledged, TermBegan, predicted_joules
from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.journal.sqlite import encode
from edge_server.sites import pledges
from edge_server.sites.cases import ROUND_JOULES, merged, pack_case, part_of, read_case, read_decision
from edge_server.sites.gossip import OFFER_S, Keep, Ourselves
from edge_server.sites.link import Links
from edge_server.sites.pledges import Book, Key, Purse, leader
from shared.errors import Unrecordable, WireError
from shared.protocol.messages import Message
from shared.protocol.peers import MOST_ASKED, Joules, Ruling, Telemetry
from shared.runtime.clock import Clock, left_s
from shared.runtime.executor import Worker

log = logging.getLogger(__name__)

LATE, TERM = "late", "term"
"""Why there is no decision: the round was decided before; the term is over."""
GRACE_S = 4.0
"""A site that let another's deadline pass has so long to answer the next coordinator: one deadline was enough."""
KEPT_ROUNDS = 8
"""Whose decisions a coordinator still has in memory, to say them again."""
MOST_TERMS_AHEAD = 4096
"""By which a term may be above ours to be adopted: a site that was away for a whole run has missed no more."""
MOST_TERMS_HEARD = 64
"""Terms of one peer that are adopted within a round of ours: each of them is a record on the disk."""
ROUNDING = 1 + 1e-9


@dataclass
class Coordination:
    """One site's part in the decisions for all.

    Attributes:
        decide_case: Decides a case by the plan's optimizer.
        place: Where the run stands in a round.
        allowance: Joules that this site's devices may spend in the run, their share of the plan's; 0 for no budget.
        joules: Those of the whole plan: no pledge and no grant is larger.
        devices: Of each site of the plan.
    """

    us: Ourselves
    links: Links
    keep: Keep
    decide_case: Callable[[Case], Decision]
    clock: Clock
    worker: Worker
    place: Callable[[int], Place]
    allowance: float = 0.0
    joules: float = 0.0
    devices: Mapping[str, Collection[str]] = field(default_factory=dict)
    _purse: Purse = field(init=False)
    _book: Book = field(default_factory=Book)
    _number: int = 0
    _passed: int = 0
    _heard: dict[Key, dict[str, Telemetry]] = field(default_factory=dict)
    _decided: dict[Key, Coordinated] = field(default_factory=dict)
    _rulings: dict[Key, Ruling] = field(default_factory=dict)
    _settling: set[Key] = field(default_factory=set)
    _silent: set[str] = field(default_factory=set)
    _doubted: set[tuple[str, int]] = field(default_factory=set)
    _terms_heard: Counter[str] = field(default_factory=Counter)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Have the links tell what concerns decisions."""
        self._purse = Purse(self.allowance)
        self.links.takers |= {"telemetry": self.hear, "decision": self.hear}
        self.links.changed.append(self._news.set)

    def recall(self, records: Iterable[AnyRecord]) -> None:
        """Learn from the journal which term it is, what was pledged, and what was decided."""
        for record in records:
            match record:
                case TermBegan() if record.term > self._book.term + MOST_TERMS_AHEAD:
                    log.error("term %d of the journal is far ahead of %d and not taken", record.term, self._book.term)
                case TermBegan():
                    self._book = pledges.adopt(self._book, record.term)
                case Pledged():
                    known = self._purse.pledged
                    self._purse = replace(self._purse, pledged={**known, (record.round, record.term): record.joules})
                case Granted():
                    self._purse = pledges.credit(self._purse, (record.round, record.term), record.joules)
                case Coordinated():
                    key = (record.round, record.term)
                    self._book = replace(self._book, grants={**self._book.grants, key: record.grants})
                    self._decided[key] = record
                case RoundOpened(decision=Decision() as decision) if decision.coordinator:
                    self._passed = max(self._passed, record.round)

    async def decide(self, case: Case, number: int) -> Decision:
        """Return what is decided for this site's devices; see `edge_server.rounds.neighbours`."""
        self._number, self._passed = number, min(self._passed, number - 1)
        self._terms_heard.clear()
        self._forget()
        found = await self._found(case, number)
        self._passed = max(self._passed, number)
        return found

    async def _found(self, case: Case, number: int) -> Decision:
        while True:
            key = (number, self._book.term)
            lead = leader(self.us.order, key[1])
            found = await (self._lead(case, key) if lead == self.us.site else self._follow(lead, case, key))
            if found is not None:
                return found
            if self._book.term == key[1]:
                there = {self.us.site, *(one for one in self.us.order if one in self.links.away and self._may_be(one))}
                later = pledges.next_term(self.us.order, key[1], there - {lead})
                log.warning("round %d: no decision of site %s: term %d begins", number, lead, later)
                await self._adopt(later, number, "gone" if self.links.is_gone(lead) else "deadline")
                self._silent.add(lead)

    def _may_be(self, peer: str) -> bool:
        """Tell whether a peer may answer: it is not known to be away, and has not let a deadline pass."""
        return not self.links.is_gone(peer) and peer not in self._silent

    def _forget(self) -> None:
        """Part with what is of rounds long past."""
        oldest = self._number - KEPT_ROUNDS
        for kept in (self._heard, self._decided, self._rulings):
            for key in [key for key in kept if key[0] < oldest]:
                del kept[key]
        self._doubted = {(peer, number) for peer, number in self._doubted if number >= self._number}

    async def _adopt(self, term: int, number: int, cause: str, speaker: str = "") -> None:
        """Take a higher term for the current one, in the journal first; by a speaker's word, it had waited in vain."""
        before = self._book.term
        if term > before:
            await self.keep(TermBegan(round=number, term=term, cause=cause, at=self.clock()))
            self._book = pledges.adopt(self._book, term)
            self._heard = {key: heard for key, heard in self._heard.items() if key[1] >= term}
            passed = [leader(self.us.order, one) for one in range(max(before, term - len(self.us.order)), term)]
            there = {self.us.site, speaker, leader(self.us.order, term)}
            self._doubted |= {(peer, number) for peer in passed if speaker and peer not in there}
            self._news.set()

    async def _adopt_heard(self, peer: str, term: int, number: int) -> None:
        """Adopt a peer's term, unless that is further ahead than terms get, or one of very many.

        Raises:
            WireError: It is.
        """
        if term <= self._book.term:
            return
        if term > self._book.term + MOST_TERMS_AHEAD:
            raise WireError(f"term {term}, and ours is {self._book.term}", reason=TERM)
        if self._terms_heard[peer] >= MOST_TERMS_HEARD:
            raise WireError(f"{MOST_TERMS_HEARD} terms within one round", reason=TERM)
        self._terms_heard[peer] += 1
        await self._adopt(term, number, "heard", peer)

    def _require_joules(self, joules: Iterable[float]) -> None:
        """Refuse a pledge or a grant that is more than the whole plan has."""
        if over := [one for one in joules if not 0 <= one <= self.joules * ROUNDING]:
            raise WireError(f"{over[0]:g} J, and the plan has {self.joules:g} J in all", reason="joules")

    async def _pledge(self, case: Case, key: Key) -> float | None:
        """Put this round's part of our joules aside, in the journal first; None where nothing limits them."""
        if ROUND_JOULES not in case.limits:
            return None
        if key not in self._purse.pledged:
            purse = pledges.pledge(self._purse, key, self._own_part(case))
            await self.keep(Pledged(round=key[0], term=key[1], joules=purse.pledged[key], at=self.clock()))
            self._purse = purse
        return self._purse.pledged[key]

    def _own_part(self, case: Case) -> float:
        """Return what the round may take of our joules; the sum over all sites is (15c), which is linear in them."""
        spent = case.limits.get("spent_joules", 0.0)
        before = case.limits.get("before_joules", spent)
        even = remaining(self._purse.rights, before, self.place(self._number), spent - before)
        return max(0.0, even + case.limits.get(SPREAD, 0.0))

    async def _lead(self, case: Case, key: Key) -> Decision | None:
        """Decide for all that tell their case in time; None where a higher term has begun meanwhile."""
        log.debug("phase leading run=%s round=%d", self.us.run, key[0])
        own, began = await self._pledge(case, key), self.clock()
        for peer in sorted(self._silent - self._heard.get(key, {}).keys()):  # it may lead too
            await self._call(peer, key)
        while key not in self._decided and self._book.term == key[1]:
            self._news.clear()
            silent = [peer for peer in self.links.away if peer not in self._heard.get(key, {})]
            left = {peer: left_s(began + self._patience_s(peer, key), self.clock()) for peer in silent}
            self._silent |= {peer for peer, seconds in left.items() if seconds <= 0}
            if not (waits := {peer: seconds for peer, seconds in left.items() if self._may_be(peer)}):
                await self._settle(case, own, key)
                break
            for peer in waits:
                await self._call(peer, key)
            await self._wait(min(OFFER_S, *waits.values()))
        record = self._decided.get(key)
        if record is None or record.decision is None:
            return None
        await self._credit(key, record.grants.get(self.us.site))
        return self._ours(record.decision, case, key, self.us.site)

    def _patience_s(self, peer: str, key: Key) -> float:
        """Return how long a coordinator waits for a peer's case; another site may have waited for it before."""
        return min(GRACE_S, self.us.deadline_s) if (peer, key[0]) in self._doubted else self.us.deadline_s

    async def _call(self, peer: str, key: Key) -> None:
        """Tell a peer which term it is: it may have been away, and know an earlier one."""
        call = Ruling(site=self.us.site, run=self.us.run, round=key[0], term=key[1], reason=TERM)
        await self.links.answer(peer, "decision", call)

    async def _settle(self, case: Case, own: float | None, key: Key) -> None:
        """Decide, journal it, then tell everybody."""
        log.debug("phase deciding run=%s round=%d", self.us.run, key[0])
        heard = dict(self._heard.get(key, {}))
        try:
            record = await self._coordinated(case, own, key, heard)
            encode(record)
        except Unrecordable as error:  # by a figure of theirs: within its bounds, and still more than can be added up
            log.warning("round %d: the cases of %s cannot be used: %s", key[0], ", ".join(sorted(heard)), error)
            heard = {}
            record = await self._coordinated(case, own, key, heard)
        if key[1] < self._book.term:
            return
        if alone := [one for one in self.us.order if one not in record.sites]:
            log.warning("round %d: site %s decides without %s", key[0], self.us.site, ", ".join(alone))
        await self._record(record)
        log.debug("phase decided run=%s round=%d", self.us.run, key[0])
        for peer, told in heard.items():
            await self._answer(peer, told)

    async def _coordinated(
        self, case: Case, own: float | None, key: Key, heard: Mapping[str, Telemetry]
    ) -> Coordinated:
        """Return what is decided for our devices and for those of the sites that told their case."""
        cases = {self.us.site: case} | {peer: read_case(told.case, self._of(peer)) for peer, told in heard.items()}
        put = {site: heard[site].pledge if site in heard else own for site in cases}
        known = {site: one for site, one in put.items() if one is not None}
        joules = math.fsum(known.values()) if known else None
        decision = await self.worker(self.decide_case, merged(self.us.site, cases, joules))
        devices = {site: tuple(one.names) for site, one in cases.items()}
        grants = pledges.share_out(known, _needs(decision, devices)) if known else {}
        at = self.clock()
        return Coordinated(round=key[0], term=key[1], sites=devices, decision=decision, grants=grants, at=at)

    async def _record(self, record: Coordinated) -> None:
        """Journal what was decided; until that is done, nobody is told what became of a pledge."""
        key = (record.round, record.term)
        self._settling.add(key)
        try:
            await self.keep(record)
            grants = {**self._book.grants, key: record.grants}
            self._book, self._decided[key] = replace(self._book, grants=grants), record
        finally:
            self._settling.discard(key)

    async def _follow(self, lead: str, case: Case, key: Key) -> Decision | None:
        """Ask the coordinator; None where it does not answer, or its term is over."""
        own = await self._pledge(case, key)
        asked = Telemetry(
            site=self.us.site, run=self.us.run, round=key[0], term=key[1], case=pack_case(case), pledge=own
        )
        until = self.clock() + self.us.deadline_s
        log.debug("phase asking run=%s round=%d", self.us.run, key[0])
        while (ruling := self._rulings.get(key)) is None:
            self._news.clear()
            seconds = left_s(until, self.clock())
            if seconds <= 0 or self.links.is_gone(lead) or self._book.term != key[1]:
                return None
            await self.links.say(lead, "telemetry", msgspec.structs.replace(asked, asks=self._asks(lead, key)))
            await self._wait(min(OFFER_S, seconds))
        if ruling.decision:
            decision = self._ours(read_decision(ruling.decision, self._of(self.us.site)), case, key, lead)
            if not decision.devices or decision.devices.keys() == set(case.names):
                return await self._within_means(decision, case, key)
            log.warning("round %d: site %s has not decided for all of our devices", key[0], lead)
        elif ruling.reason != LATE:
            return None
        else:
            log.warning("round %d: site %s has decided without us: site %s decides alone", key[0], lead, self.us.site)
        return await self._decide_alone(case, key)

    async def _decide_alone(self, case: Case, key: Key) -> Decision:
        limits = {**case.limits, ROUND_JOULES: self._own_part(case)} if ROUND_JOULES in case.limits else case.limits
        decision = await self.worker(self.decide_case, replace(case, limits=limits))
        return msgspec.structs.replace(decision, term=key[1], coordinator=self.us.site)

    async def _within_means(self, decision: Decision, case: Case, key: Key) -> Decision:
        """Return a coordinator's decision, or our own where that takes less than half of joules that we do not have."""
        needed = math.fsum(predicted_joules(decision).values())
        if ROUND_JOULES not in case.limits or needed <= self._purse.rights - case.limits.get("spent_joules", 0.0):
            return decision
        alone = await self._decide_alone(case, key)
        if 2 * math.fsum(predicted_joules(alone).values()) >= needed:
            return decision
        told = f"{needed:.4g} J, more than are left: decided here"
        log.warning("round %d: site %s lets our devices take %s", key[0], decision.coordinator, told)
        return alone

    def _of(self, site: str) -> Collection[str]:
        """Return the devices that the plan gives a site."""
        return self.devices.get(site, ())

    def _asks(self, lead: str, key: Key) -> tuple[Joules, ...]:
        """Return earlier pledges to this coordinator of which nothing is known."""
        open_ones = ((one, joules) for one, joules in self._purse.unanswered() if one != key)
        ours = [(*one, joules) for one, joules in open_ones if leader(self.us.order, one[1]) == lead]
        return tuple(ours[-MOST_ASKED:])

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._news.wait()

    def _ours(self, decision: Decision, case: Case, key: Key, coordinator: str) -> Decision:
        """Return our part of a decision, with the limits of our own case and what was granted to us."""
        granted = self._purse.granted.get(key)
        limits = dict(case.limits) if granted is None else {**case.limits, ROUND_JOULES: granted}
        part = part_of(decision, case.names)
        return msgspec.structs.replace(part, limits=limits, term=key[1], coordinator=coordinator)

    async def _credit(self, key: Key, joules: float | None) -> None:
        """Take what was granted, in the journal first."""
        if joules is None:
            return
        purse = pledges.credit(self._purse, key, joules)
        if purse is not self._purse:
            await self.keep(Granted(round=key[0], term=key[1], joules=joules, at=self.clock()))
            self._purse = pledges.credit(self._purse, key, joules)

    async def hear(self, peer: str, said: Message | bytes) -> None:
        """Take what a peer says of decisions.

        Raises:
            WireError: It is of no use.
        """
        self._silent.discard(peer)
        self._doubted = {one for one in self._doubted if one[0] != peer}
        match said:
            case Telemetry():
                await self._told(peer, said)
            case Ruling():
                await self._ruled(peer, said)
            case _:
                raise WireError(f"{type(said).__name__} is not about decisions", reason="unexpected")

    async def _told(self, peer: str, said: Telemetry) -> None:
        """Take a site's case, and answer it where it is decided, or cannot be any more."""
        key = (said.round, said.term)
        if leader(self.us.order, said.term) != self.us.site:
            raise WireError(f"term {said.term} is another site's", reason=TERM)
        self._require_joules([*([] if said.pledge is None else [said.pledge]), *(joules for *_, joules in said.asks)])
        if said.round < 1:
            raise WireError("rounds count from 1", reason="round")
        read_case(said.case, self._of(peer))
        if self._settling:
            return  # it will be said again
        await self._adopt_heard(peer, said.term, said.round)
        is_over = said.round <= self._passed or said.round < self._number
        if is_over and key not in self._book.grants and said.term == self._book.term:
            await self._record(Coordinated(round=said.round, term=said.term, at=self.clock()))
        if key in self._book.grants or said.term < self._book.term:
            await self._answer(peer, said)
            return
        if said.round <= self._number + KEPT_ROUNDS:  # else it is said again when we come to that round
            self._heard.setdefault(key, {})[peer] = said
            self._news.set()

    async def _answer(self, peer: str, said: Telemetry) -> None:
        """Say what was decided of a round and a term, and what became of pledges."""
        key, record = (said.round, said.term), self._decided.get((said.round, said.term))
        ours = record.sites.get(peer) if record and record.decision else None
        decision = (
            msgspec.msgpack.encode(part_of(record.decision, ours)) if record and record.decision and ours else b""
        )
        asked = [(key, said.pledge)] if said.pledge is not None else []
        asked += [((number, term), joules) for number, term, joules in said.asks]
        found = [(one, pledges.grant_for(self._book, peer, one, joules)) for one, joules in asked]
        await self.links.answer(
            peer,
            "decision",
            Ruling(
                site=self.us.site,
                run=self.us.run,
                round=said.round,
                term=said.term if key in self._book.grants else max(said.term, self._book.term),
                decision=decision,
                grants=tuple((*one, joules) for one, joules in found if joules is not None),
                reason="" if decision else LATE if key in self._book.grants else TERM,
            ),
        )

    async def _ruled(self, peer: str, said: Ruling) -> None:
        """Take what a coordinator says; a stale one's decision is none."""
        self._require_joules(joules for *_, joules in said.grants)
        for number, term, joules in said.grants:
            if leader(self.us.order, term) == peer:
                await self._credit((number, term), joules)
        if said.reason == TERM:
            await self._adopt_heard(peer, said.term, self._number)
            if said.term < self._book.term:  # it was away, and would wait for us
                await self._call(peer, (self._number, self._book.term))
        else:
            self._take_ruling(peer, said)

    def _take_ruling(self, peer: str, said: Ruling) -> None:
        if leader(self.us.order, said.term) != peer:
            raise WireError(f"term {said.term} is not of site {peer}", reason=TERM)
        if said.term < self._book.term:
            raise WireError(f"of term {said.term}, and it is {self._book.term}", reason=TERM)
        if said.decision:
            read_decision(said.decision, self._of(self.us.site))
        if said.round == self._number and said.term == self._book.term:  # else it is not what we wait for
            self._rulings[said.round, said.term] = said
            self._news.set()


def _needs(decision: Decision, devices: Mapping[str, Iterable[str]]) -> dict[str, float]:
    """Return the joules that a decision takes of each site's devices."""
    each = predicted_joules(decision)
    return {site: math.fsum(each.get(one, 0.0) for one in names) for site, names in devices.items()}
