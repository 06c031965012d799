"""Gossip of one site after a round: its model to every neighbour and theirs to it, and each edge settled once.

Models are files in the run's folder: a server that was killed in between goes on with what it has. Its own model of the
last gossip is served until the next begins, since a neighbour may have been away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from edge_server.journal.disk import RETRY_S, persist
from edge_server.journal.outcome import REFUSALS
from edge_server.journal.records import AnyRecord, EdgeSettled, Gossiped, Noted
from edge_server.sites import verdicts
from edge_server.sites.link import Links
from edge_server.sites.model_files import FOLDER, round_folder, take_whole, write_own
from edge_server.sites.verdicts import EdgeState
from shared.errors import WireError
from shared.protocol.clip import NAME, printable
from shared.protocol.messages import Message, Transfer, Want
from shared.protocol.payload import digest
from shared.protocol.peers import EdgeWord, ModelOffer
from shared.runtime.clock import Clock, left_s
from shared.runtime.executor import Worker, background
from shared.transfer import frames
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.sender import Sender
from shared.transfer.to_file import FileSink, view

log = logging.getLogger(__name__)

OFFER_S = 2.0
"""Between two offers of a model whose edge is not settled yet."""
MOST_WANTS = 8
"""Of one neighbour that wait to be answered; what is more it asks for again."""
STALE = "stale-round"
THERE = "-there"
"""Behind a cause for which the other end refused our model."""

RequireOf: TypeAlias = Callable[[str, memoryview], None]
"""(neighbour, bytes) -> nothing; refuses, with a WireError, what is no model of this run's that it could have."""
Keep: TypeAlias = Callable[[AnyRecord], Awaitable[None]]
"""Journals a record; durable once it returns."""


@dataclass(frozen=True)
class Ourselves:
    """One site of a run.

    Attributes:
        order: All sites, in the plan's order.
        run: Its own name of the run.
        deadline_s: Seconds that others are waited for.
    """

    site: str
    order: tuple[str, ...]
    run: str
    folder: Path
    deadline_s: float

    def owns(self, peer: str) -> bool:
        """Tell whether this site settles the edge to a neighbour."""
        return self.order.index(self.site) < self.order.index(peer)


@dataclass
class Gossip:
    """What one site knows of its gossips: of the last one, or the one under way, all; of earlier ones the words.

    Attributes:
        neighbours: Those that an edge of the graph joins to it.
        policy: How models are received.
    """

    us: Ourselves
    neighbours: Sequence[str]
    links: Links
    keep: Keep
    policy: Policy
    clock: Clock
    worker: Worker
    _number: int = 0
    _own: Sender | None = None
    _edges: dict[str, EdgeState] = field(default_factory=dict)
    _fetches: dict[str, Receiver[FileSink]] = field(default_factory=dict)
    _words: dict[tuple[int, str], bool] = field(default_factory=dict)
    _wants: dict[str, asyncio.Queue[Want]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _require: RequireOf | None = None
    _noted: set[tuple[int, str]] = field(default_factory=set)
    _bytes: dict[str, int] = field(default_factory=dict)
    _held: dict[str, bytes] = field(default_factory=dict)
    _early: dict[str, ModelOffer] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)
    _took: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Have the links tell what concerns models."""
        self._wants = {peer: asyncio.Queue(MOST_WANTS) for peer in self.neighbours}
        self.links.takers |= {"gossip": self.hear, "gossiped": self.hear}
        self.links.changed.append(self._news.set)

    def recall(self, records: Iterable[AnyRecord]) -> None:
        """Learn from the journal how edges were settled, and serve again the model of the last gossip."""
        for record in records:
            if isinstance(record, EdgeSettled):
                self._words[record.round, record.site] = record.on
                if record.on:
                    self.links.bound.setdefault(record.site, record.run)
        found = sorted((self.us.folder / FOLDER).glob("round-*"))
        if found and found[-1].name.removeprefix("round-").isdecimal():
            self._number = int(found[-1].name.removeprefix("round-"))
            self._edges = {peer: self._edge_of(peer) for peer in self.neighbours}
            with suppress(FileNotFoundError):
                self._own = Sender.of_parts([view(found[-1] / self.us.site)], self.policy.frame_bytes)

    def _edge_of(self, peer: str) -> EdgeState:
        """Return the state of an edge as journal and disk have it."""
        on, has = self._words.get((self._number, peer)), self._place(peer).exists()
        return EdgeState(owns=self.us.owns(peer), on=on, given=bool(on), has=has)

    async def serve(self, peer: str) -> None:
        """Send what a neighbour asks for, until cancelled."""
        while True:
            await self._send(peer, await self._wants[peer].get())

    async def linger(self) -> None:
        """Wait until every neighbour has heard how the last edges stand, for one deadline at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.us.deadline_s):
                while any(edge.owns and edge.on and edge.heard is None for edge in self._edges.values()):
                    self._news.clear()
                    await self._news.wait()

    async def exchange(
        self, number: int, model: Sequence[memoryview], require: RequireOf
    ) -> tuple[dict[str, memoryview], Gossiped]:
        """Gossip after a round; return the models of the neighbours whose edges are on, and what is to be journaled.

        Args:
            require: Refuses what is no model.
        """
        started = self.clock()
        await self._begin(number, model, require)
        self._say("offering")
        async with background(*(self._offer(peer) for peer in self.neighbours), self._watch()):
            await self._take_early()
            await self._settle_all(started)
        models = {peer: view(self._place(peer)) for peer, edge in self._edges.items() if edge.on}
        return models, self._record(started)

    async def conclude(self, gossiped: Gossiped) -> None:
        """Journal what the gossip came to, once the models are mixed."""
        await self.keep(gossiped)
        self._say("mixed")

    def _say(self, phase: str) -> None:
        log.debug("phase %s run=%s round=%d", phase, self.us.run, self._number)

    async def _begin(self, number: int, model: Sequence[memoryview], require: RequireOf) -> None:
        """Put our model where it is served from, in place of that of the last gossip."""
        place = round_folder(self.us.folder, number)
        await persist(self.worker, RETRY_S, write_own, place, self.us.site, model)
        self._own = Sender.of_parts([view(place / self.us.site)], self.policy.frame_bytes)
        self._number, self._require, self._bytes = number, require, {}
        self._fetches, self._began, self._took = {}, {}, {}
        self._edges = {peer: self._edge_of(peer) for peer in self.neighbours}
        self._held = {peer: digest([view(self._place(peer))]) for peer, edge in self._edges.items() if edge.has}
        for peer, edge in self._edges.items():
            if edge.on and not edge.has:
                log.error(
                    "round %d: the model of site %s was mixed, and its file is gone: going on without", number, peer
                )
                self._edges[peer] = replace(edge, on=False, cause="disk")

    def _place(self, peer: str) -> Path:
        return round_folder(self.us.folder, self._number) / peer

    async def _offer(self, peer: str) -> None:
        """Offer our model to a neighbour until the edge is settled here."""
        assert self._own
        offer = ModelOffer(site=self.us.site, run=self.us.run, round=self._number, params=self._own.transfer)
        while self._edges[peer].on is None:
            await self.links.say(peer, "gossip", offer)
            await asyncio.sleep(OFFER_S)

    async def _watch(self) -> None:
        """Ask again for what does not come."""
        while True:
            for peer, fetch in list(self._fetches.items()):
                if not fetch.complete and not fetch.left_s(self.clock()):
                    fetch.gave_up(self.clock())
                    await self._ask(peer, fetch)
            waits = [one.left_s(self.clock()) for one in self._fetches.values() if not one.complete]
            await asyncio.sleep(max(0.05, min([OFFER_S, *waits])))

    async def _settle_all(self, started: float) -> None:
        while open_ones := [peer for peer, edge in self._edges.items() if edge.on is None]:
            self._news.clear()
            left = {peer: left_s(started + self._patience_s(peer), self.clock()) for peer in open_ones}
            for peer, seconds in left.items():
                if why := self.links.objection(peer):
                    self._edges[peer] = verdicts.refuse(self._edges[peer], why)
                judged = verdicts.judge(self._edges[peer], is_late=seconds <= 0)
                if judged.on is not None:
                    await self._conclude(peer, judged)
                    self._news.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left.values())):
                    await self._news.wait()

    def _patience_s(self, peer: str) -> float:
        return self.us.deadline_s * (1 if self.us.owns(peer) else 2)

    async def _conclude(self, peer: str, judged: EdgeState) -> None:
        """Journal how an edge is settled, then say so."""
        number, on = self._number, bool(judged.on)
        run = self.links.run_of(peer)
        record = EdgeSettled(round=number, site=peer, run=run, on=on, cause=judged.cause, at=self.clock())
        await self.keep(record)
        self._say("settled")
        self._words[number, peer] = on
        if on:
            self.links.bound.setdefault(peer, run)
        else:
            told = "its word never came, and it may have settled otherwise" if judged.cause == verdicts.UNHEARD else ""
            log.warning("round %d: not mixed with site %s: %s%s", number, peer, judged.cause, told and f" ({told})")
        self._edges[peer] = replace(self._edges[peer], on=on, cause=judged.cause)
        await self._tell(peer)

    async def _tell(self, peer: str) -> None:
        """Tell a neighbour what we know of the edge."""
        edge = self._edges[peer]
        word = self._word(self._number, self._held.get(peer, b""), on=edge.on, reason=edge.cause)
        await self.links.answer(peer, "gossiped", msgspec.structs.replace(word, has=edge.has))

    def _word(self, number: int, digest: bytes, *, on: bool | None, reason: str) -> EdgeWord:
        why = reason.removesuffix(THERE) if on is False else ""
        us = self.us
        return EdgeWord(site=us.site, run=us.run, round=number, digest=digest, has=bool(on), on=on, reason=why)

    async def hear(self, peer: str, said: Message | bytes) -> None:
        """Take what a peer says of models.

        Raises:
            WireError: It is of no use.
        """
        if peer not in self.neighbours:
            raise WireError("no edge of the graph joins us", reason="unexpected")
        match said:
            case bytes():
                await self._frame(peer, said)
            case Want():
                self._note_want(peer, said)
            case ModelOffer():
                await self._offered(peer, said)
            case EdgeWord():
                await self._told(peer, said)
            case other:
                raise WireError(f"{type(other).__name__} is not about models", reason="unexpected")

    def _note_want(self, peer: str, want: Want) -> None:
        if self._own and want.digest == self._own.transfer.digest:
            with suppress(asyncio.QueueFull):
                self._wants[peer].put_nowait(want)

    async def _send(self, peer: str, want: Want) -> None:
        """Answer a wish for frames; what the broker does not take is asked for again."""
        if not self._own or want.digest != self._own.transfer.digest:
            return
        try:
            for frame in self._own.answer(want, self.links.room(peer)):
                if not await self.links.say(peer, "gossip", frame, assured=False):
                    return
                self._bytes[peer] = self._bytes.get(peer, 0) + len(frame)
        except WireError as error:
            self.links.refuse(peer, error)

    async def _offered(self, peer: str, offer: ModelOffer) -> None:
        if offer.round > self._number or (offer.round == self._number and peer not in self._edges):
            self._early[peer] = offer  # and it will be offered again
            return
        if offer.round < self._number:
            on = self._words.get((offer.round, peer), False)
            await self.links.answer(peer, "gossiped", self._word(offer.round, offer.params.digest, on=on, reason=STALE))
            return
        edge = self._edges[peer]
        if edge.on is not None or (edge.has and self._held.get(peer) == offer.params.digest):
            await self._tell(peer)
        elif self._require is not None:
            await self._fetch(peer, offer.params)

    async def _take_early(self) -> None:
        """Take up what was offered of this round before it began here: who comes last waits for no second offer."""
        for peer, offer in list(self._early.items()):
            if offer.round == self._number:
                try:
                    await self._offered(peer, offer)
                except WireError as error:
                    self.links.refuse(peer, error)

    async def _fetch(self, peer: str, transfer: Transfer) -> None:
        now, fetch = self.clock(), self._fetches.get(peer)
        if fetch and fetch.transfer.digest == transfer.digest:
            fetch.waited_for(now)
        else:
            assert self._own
            if transfer.size > 2 * self._own.transfer.size + frames.FRAME_BYTES:
                raise WireError(f"model of {transfer.size} bytes, ours has {self._own.transfer.size}", reason="shape")
            pace = self.policy.pace(now, transfer.frame_bytes)
            place = partial(FileSink, self._place(f"_{peer}"))
            self._fetches[peer] = fetch = Receiver(transfer, place, self.policy, pace, now)
            self._began.setdefault(peer, now)
        if fetch.complete:
            await self._whole(peer, fetch)
        else:
            await self._ask(peer, fetch)

    async def _ask(self, peer: str, fetch: Receiver[FileSink]) -> None:
        if want := fetch.want():
            await self.links.answer(peer, "gossiped", want)

    async def _frame(self, peer: str, data: bytes) -> None:
        fetch = self._fetches.get(peer)
        if fetch is None or fetch.complete or self._edges[peer].on is not None:
            return
        fetch.take(frames.decode(data), self.clock())
        if not fetch.lacking:
            await self._whole(peer, fetch)
        else:
            await self._ask(peer, fetch)

    async def _whole(self, peer: str, fetch: Receiver[FileSink]) -> None:
        """Check a model that is here, wait until it is on the disk, and say that we have it."""
        try:
            require = partial(self._require, peer) if self._require else None
            await self.worker(take_whole, fetch, self._place(peer), require)
        except WireError as error:
            if error.reason == "digest" and not fetch.is_hopeless:
                await self._ask(peer, fetch)
            else:
                self._edges[peer] = verdicts.refuse(self._edges[peer], printable(error.reason, NAME))
                self._news.set()
            raise
        self._say("received")
        self._held[peer] = fetch.transfer.digest
        self._took.setdefault(peer, self.clock() - self._began[peer])
        self._edges[peer] = verdicts.receive(self._edges[peer])
        self._news.set()
        await self._tell(peer)

    async def _told(self, peer: str, word: EdgeWord) -> None:
        if word.round != self._number or peer not in self._edges:
            ours = self._words.get((word.round, peer))
            if ours is not None and word.on is not None and word.on != ours:
                await self._note_difference(word.round, peer, ours=ours)
            return
        edge = self._edges[peer]
        has = word.has and self._own is not None and word.digest == self._own.transfer.digest
        cause = f"{word.reason}{THERE}" if word.reason in REFUSALS else printable(word.reason, NAME)
        self._edges[peer] = edge = verdicts.hear(edge, has=has, on=word.on, cause=cause)
        self._news.set()
        if verdicts.differs(edge):
            await self._note_difference(word.round, peer, ours=bool(edge.on))

    async def _note_difference(self, number: int, peer: str, *, ours: bool) -> None:
        """Say once that both ends of an edge were not of one mind: their mean is not what it was before."""
        if (number, peer) in self._noted:
            return
        self._noted.add((number, peer))
        here, there = ("on", "off") if ours else ("off", "on")
        what = f"round {number}: the edge to site {peer} is {here} here and {there} there: the mean of both has moved"
        log.error("%s", what)
        await self.keep(Noted(what=what))

    def _record(self, started: float) -> Gossiped:
        refused, self.links.refused = dict(sorted(self.links.refused.items())), type(self.links.refused)()
        return Gossiped(
            round=self._number,
            on=tuple(peer for peer, edge in self._edges.items() if edge.on),
            off={peer: edge.cause for peer, edge in self._edges.items() if not edge.on},
            bytes_up={peer: count for peer, count in sorted(self._bytes.items()) if count},
            bytes_down={peer: fetch.bytes_received for peer, fetch in sorted(self._fetches.items())},
            refused=refused,
            seconds=self.clock() - started,
            at=self.clock(),
            transfer_s=dict(sorted(self._took.items())),
        )
