"""Terms of rotating coordinators, and the peers that do not answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_server.journal.decision import TermBegan
from edge_server.sites import pledges
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.pledges import GrantLog, coordinator_of
from shared.errors import WireError

log = logging.getLogger(__name__)

TERM = "term"
"""Reason for a missing decision: the term is over."""
GRACE_S = 4.0
"""Seconds that a site has to answer a new coordinator after missing the deadline of another one."""
MOST_TERMS_AHEAD = 4096
"""Most terms ahead of ours that are adopted; a site that was offline for a whole run has not missed more."""
MOST_TERMS_HEARD = 64
"""Most terms adopted from one peer within a round: each of them is a record on the disk."""


@dataclass
class Terms:
    """The current term, and which peers answer.

    Attributes:
        on_begin: Called with each new term.
        log: The current term, and the grants of past decisions.
        silent: Peers that missed a deadline and have sent nothing since.
    """

    identity: SiteIdentity
    links: Links
    services: SiteServices
    on_begin: Callable[[int], None]
    log: GrantLog = field(default_factory=GrantLog)
    silent: set[str] = field(default_factory=set)
    _doubted: set[tuple[str, int]] = field(default_factory=set)
    _heard: Counter[str] = field(default_factory=Counter)

    @property
    def current(self) -> int:
        """The current term."""
        return self.log.term

    def restore(self, record: TermBegan) -> None:
        """Restore a journalled term."""
        if record.term > self.current + MOST_TERMS_AHEAD:
            log.error("term %d is too far ahead of %d and is ignored", record.term, self.current)
        else:
            self.log = pledges.adopt_term(self.log, record.term)

    def begin_round(self, number: int) -> None:
        """Forget what concerned past rounds."""
        self._heard.clear()
        self._doubted = {(peer, doubted) for peer, doubted in self._doubted if doubted >= number}

    def note_message(self, peer: str) -> None:
        """Record that a peer has sent a message."""
        self.silent.discard(peer)
        self._doubted = {doubt for doubt in self._doubted if doubt[0] != peer}

    def may_answer(self, peer: str) -> bool:
        """Return true if a peer may answer: it is not known to be offline, and missed no deadline."""
        return not self.links.is_gone(peer) and peer not in self.silent

    def patience_s(self, peer: str, number: int) -> float:
        """Return the deadline of a peer's case in seconds; shorter if another site has waited for it before."""
        return min(GRACE_S, self.identity.deadline_s) if (peer, number) in self._doubted else self.identity.deadline_s

    async def replace_coordinator(self, lead: str, number: int) -> None:
        """Begin the term of the next reachable site, in place of one that does not answer."""
        reachable = {self.identity.site, *filter(self.may_answer, self.links.peers)}
        later = pledges.next_term(self.identity.order, self.current, reachable - {lead})
        log.warning("round %d: no decision of site %s: term %d begins", number, lead, later)
        await self._adopt(later, number, "gone" if self.links.is_gone(lead) else "deadline")
        self.silent.add(lead)

    async def _adopt(self, term: int, number: int, cause: str, speaker: str = "") -> None:
        """Journal and adopt a higher term; a peer that announces one got no answer from earlier coordinators."""
        before = self.current
        if term > before:
            await self.services.keep(TermBegan(round=number, term=term, cause=cause, at=self.services.clock()))
            self.log = pledges.adopt_term(self.log, term)
            order = self.identity.order
            passed = [coordinator_of(order, past) for past in range(max(before, term - len(order)), term)]
            responsive = {self.identity.site, speaker, coordinator_of(order, term)}
            self._doubted |= {(peer, number) for peer in passed if speaker and peer not in responsive}
            self.on_begin(term)

    async def adopt_from_peer(self, peer: str, term: int, number: int) -> None:
        """Adopt a peer's term, within limits.

        Raises:
            WireError: The term is too far ahead, or one of too many.
        """
        if term <= self.current:
            return
        if term > self.current + MOST_TERMS_AHEAD:
            raise WireError(f"term {term} is too far ahead of ours, {self.current}", reason=TERM)
        if self._heard[peer] >= MOST_TERMS_HEARD:
            raise WireError(f"more than {MOST_TERMS_HEARD} terms within one round", reason=TERM)
        self._heard[peer] += 1
        await self._adopt(term, number, "heard", peer)
