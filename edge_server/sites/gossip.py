"""Gossip of one site: exchange models with every neighbour and settle each edge once.

Models are files in the run's folder, so that a restarted server continues with what it has. The site's own model of the
last gossip is served until the next begins, since a neighbour may have been offline.
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

from edge_server.journal.disk import RETRY_S, retry_write
from edge_server.journal.outcome import REFUSALS
from edge_server.journal.records import AnyRecord, EdgeSettled, Gossiped, Noted
from edge_server.sites import verdicts
from edge_server.sites.link import Links
from edge_server.sites.model_files import FOLDER, round_folder, store_received, write_model
from edge_server.sites.verdicts import EdgeState
from shared.errors import WireError
from shared.protocol.clip import NAME, printable
from shared.protocol.messages import Message, Transfer, Want
from shared.protocol.payload import digest
from shared.protocol.peers import EdgeWord, ModelOffer
from shared.runtime.clock import Clock, remaining_s
from shared.runtime.executor import Worker, background
from shared.runtime.phases import log_phase
from shared.transfer import frames
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.sender import Sender
from shared.transfer.to_file import FileSink, view

log = logging.getLogger(__name__)

OFFER_S = 2.0
"""Seconds between two offers of a model whose edge is not settled yet."""
MOST_WANTS = 8
"""Most queued requests of one neighbour; it repeats the others."""
STALE = "stale-round"
PEER_SUFFIX = "-there"
"""Suffix of causes for which the other end refused our model."""

RequireOf: TypeAlias = Callable[[str, memoryview], None]
"""(neighbour, bytes) -> None; raises WireError for bytes that are no acceptable model."""
Keep: TypeAlias = Callable[[AnyRecord], Awaitable[None]]
"""Journals a record; durable once it returns."""


@dataclass(frozen=True)
class SiteIdentity:
    """Identity of one site in a run.

    Attributes:
        order: All sites, in the plan's order.
        run: This site's name of the run.
        deadline_s: Seconds to wait for other sites.
    """

    site: str
    order: tuple[str, ...]
    run: str
    folder: Path
    deadline_s: float

    def owns(self, peer: str) -> bool:
        """Return true if this site settles the edge to a neighbour."""
        return self.order.index(self.site) < self.order.index(peer)


@dataclass
class Gossip:
    """Gossip state of one site: all of the current or last gossip, and the verdicts of earlier ones.

    Attributes:
        neighbours: Sites joined by an edge of the graph.
        policy: Limits for receiving models.
    """

    identity: SiteIdentity
    neighbours: Sequence[str]
    links: Links
    keep: Keep
    policy: Policy
    clock: Clock
    worker: Worker
    _number: int = 0
    _model: Sender | None = None
    _edges: dict[str, EdgeState] = field(default_factory=dict)
    _fetches: dict[str, Receiver[FileSink]] = field(default_factory=dict)
    _verdicts: dict[tuple[int, str], bool] = field(default_factory=dict)
    _wants: dict[str, asyncio.Queue[Want]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _require: RequireOf | None = None
    _noted: set[tuple[int, str]] = field(default_factory=set)
    _bytes: dict[str, int] = field(default_factory=dict)
    _digests: dict[str, bytes] = field(default_factory=dict)
    _early: dict[str, ModelOffer] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)
    _transfer_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Register for messages about models."""
        self._wants = {peer: asyncio.Queue(MOST_WANTS) for peer in self.neighbours}
        self.links.handlers |= {"gossip": self.handle, "gossiped": self.handle}
        self.links.on_change.append(self._changed.set)

    def restore(self, records: Iterable[AnyRecord]) -> None:
        """Restore settled edges from the journal, and serve the last gossip's model again."""
        for record in records:
            if isinstance(record, EdgeSettled):
                self._verdicts[record.round, record.site] = record.on
                if record.on:
                    self.links.bound_runs.setdefault(record.site, record.run)
        folders = sorted((self.identity.folder / FOLDER).glob("round-*"))
        if folders and folders[-1].name.removeprefix("round-").isdecimal():
            self._number = int(folders[-1].name.removeprefix("round-"))
            self._edges = {peer: self._load_edge(peer) for peer in self.neighbours}
            with suppress(FileNotFoundError):
                self._model = Sender.of_parts([view(folders[-1] / self.identity.site)], self.policy.frame_bytes)

    def _load_edge(self, peer: str) -> EdgeState:
        """Return an edge's state by journal and disk."""
        on, has = self._verdicts.get((self._number, peer)), self._model_path(peer).exists()
        return EdgeState(owns=self.identity.owns(peer), on=on, is_delivered=bool(on), has=has)

    async def serve(self, peer: str) -> None:
        """Send requested frames to a neighbour, until cancelled."""
        while True:
            await self._send(peer, await self._wants[peer].get())

    async def wait_for_verdicts(self) -> None:
        """Wait until every neighbour has settled the last edges, at most one deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.identity.deadline_s):
                while any(edge.owns and edge.on and edge.peer_verdict is None for edge in self._edges.values()):
                    self._changed.clear()
                    await self._changed.wait()

    async def exchange(
        self, number: int, model: Sequence[memoryview], require: RequireOf
    ) -> tuple[dict[str, memoryview], Gossiped]:
        """Gossip after a round; return the models of neighbours whose edges are on, and the journal record.

        Args:
            require: Raises WireError for bytes that are no acceptable model.
        """
        started = self.clock()
        await self._begin(number, model, require)
        self._log_phase("offering")
        async with background(*(self._offer(peer) for peer in self.neighbours), self._watch()):
            await self._take_early()
            await self._settle_all(started)
        models = {peer: view(self._model_path(peer)) for peer, edge in self._edges.items() if edge.on}
        return models, self._record(started)

    async def conclude(self, gossiped: Gossiped) -> None:
        """Journal a gossip after the models were mixed."""
        await self.keep(gossiped)
        self._log_phase("mixed")

    def _log_phase(self, phase: str) -> None:
        log_phase(log, phase, run=self.identity.run, round=self._number)

    async def _begin(self, number: int, model: Sequence[memoryview], require: RequireOf) -> None:
        """Write and serve our model, in place of the last gossip's."""
        place = round_folder(self.identity.folder, number)
        await retry_write(self.worker, RETRY_S, write_model, place, self.identity.site, model)
        self._model = Sender.of_parts([view(place / self.identity.site)], self.policy.frame_bytes)
        self._number, self._require, self._bytes = number, require, {}
        self._fetches, self._began, self._transfer_s = {}, {}, {}
        self._edges = {peer: self._load_edge(peer) for peer in self.neighbours}
        self._digests = {peer: digest([view(self._model_path(peer))]) for peer, edge in self._edges.items() if edge.has}
        for peer, edge in self._edges.items():
            if edge.on and not edge.has:
                log.error(
                    "round %d: the model of site %s was mixed, but its file is missing; continuing without it",
                    number,
                    peer,
                )
                self._edges[peer] = replace(edge, on=False, cause="disk")

    def _model_path(self, peer: str) -> Path:
        return round_folder(self.identity.folder, self._number) / peer

    async def _offer(self, peer: str) -> None:
        """Offer our model to a neighbour until the edge is settled on this side."""
        assert self._model
        site, run = self.identity.site, self.identity.run
        offer = ModelOffer(site=site, run=run, round=self._number, params=self._model.transfer)
        while self._edges[peer].on is None:
            await self.links.send(peer, "gossip", offer)
            await asyncio.sleep(OFFER_S)

    async def _watch(self) -> None:
        """Repeat requests for overdue frames."""
        while True:
            for peer, fetch in list(self._fetches.items()):
                if not fetch.complete and not fetch.remaining_s(self.clock()):
                    fetch.time_out(self.clock())
                    await self._ask(peer, fetch)
            waits = [fetch.remaining_s(self.clock()) for fetch in self._fetches.values() if not fetch.complete]
            await asyncio.sleep(max(0.05, min([OFFER_S, *waits])))

    async def _settle_all(self, started: float) -> None:
        while open_ones := [peer for peer, edge in self._edges.items() if edge.on is None]:
            self._changed.clear()
            waits_s = {peer: remaining_s(started + self._patience_s(peer), self.clock()) for peer in open_ones}
            for peer, seconds in waits_s.items():
                if why := self.links.objection(peer):
                    self._edges[peer] = verdicts.refuse(self._edges[peer], why)
                judged = verdicts.judge(self._edges[peer], is_late=seconds <= 0)
                if judged.on is not None:
                    await self._conclude(peer, judged)
                    self._changed.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(waits_s.values())):
                    await self._changed.wait()

    def _patience_s(self, peer: str) -> float:
        return self.identity.deadline_s * (1 if self.identity.owns(peer) else 2)

    async def _conclude(self, peer: str, judged: EdgeState) -> None:
        """Journal and announce how an edge is settled."""
        number, on = self._number, bool(judged.on)
        run = self.links.run_of(peer)
        record = EdgeSettled(round=number, site=peer, run=run, on=on, cause=judged.cause, at=self.clock())
        await self.keep(record)
        self._log_phase("settled")
        self._verdicts[number, peer] = on
        if on:
            self.links.bound_runs.setdefault(peer, run)
        else:
            note = "its verdict never came and may differ" if judged.cause == verdicts.UNHEARD else ""
            log.warning("round %d: not mixed with site %s: %s%s", number, peer, judged.cause, note and f" ({note})")
        self._edges[peer] = replace(self._edges[peer], on=on, cause=judged.cause)
        await self._send_verdict(peer)

    async def _send_verdict(self, peer: str) -> None:
        """Send a neighbour our state of the edge."""
        edge = self._edges[peer]
        verdict = self._build_verdict(self._number, self._digests.get(peer, b""), on=edge.on, reason=edge.cause)
        await self.links.reply(peer, "gossiped", msgspec.structs.replace(verdict, has=edge.has))

    def _build_verdict(self, number: int, digest: bytes, *, on: bool | None, reason: str) -> EdgeWord:
        why = reason.removesuffix(PEER_SUFFIX) if on is False else ""
        site, run = self.identity.site, self.identity.run
        return EdgeWord(site=site, run=run, round=number, digest=digest, has=bool(on), on=on, reason=why)

    async def handle(self, peer: str, message: Message | bytes) -> None:
        """Handle a peer's message about models.

        Raises:
            WireError: It is invalid.
        """
        if peer not in self.neighbours:
            raise WireError("no edge of the graph joins us", reason="unexpected")
        match message:
            case bytes():
                await self._handle_frame(peer, message)
            case Want():
                self._queue_want(peer, message)
            case ModelOffer():
                await self._handle_offer(peer, message)
            case EdgeWord():
                await self._handle_verdict(peer, message)
            case other:
                raise WireError(f"{type(other).__name__} is not about models", reason="unexpected")

    def _queue_want(self, peer: str, want: Want) -> None:
        if self._model and want.digest == self._model.transfer.digest:
            with suppress(asyncio.QueueFull):
                self._wants[peer].put_nowait(want)

    async def _send(self, peer: str, want: Want) -> None:
        """Send requested frames; if the broker is unreachable, the peer requests them again."""
        if not self._model or want.digest != self._model.transfer.digest:
            return
        try:
            for frame in self._model.answer(want, self.links.payload_limit(peer)):
                if not await self.links.send(peer, "gossip", frame, assured=False):
                    return
                self._bytes[peer] = self._bytes.get(peer, 0) + len(frame)
        except WireError as error:
            self.links.refuse(peer, error)

    async def _handle_offer(self, peer: str, offer: ModelOffer) -> None:
        if offer.round > self._number or (offer.round == self._number and peer not in self._edges):
            self._early[peer] = offer  # the peer repeats it
            return
        if offer.round < self._number:
            on = self._verdicts.get((offer.round, peer), False)
            verdict = self._build_verdict(offer.round, offer.params.digest, on=on, reason=STALE)
            await self.links.reply(peer, "gossiped", verdict)
            return
        edge = self._edges[peer]
        if edge.on is not None or (edge.has and self._digests.get(peer) == offer.params.digest):
            await self._send_verdict(peer)
        elif self._require is not None:
            await self._fetch(peer, offer.params)

    async def _take_early(self) -> None:
        """Handle offers that arrived before this round began, so that the last site waits for no second offer."""
        for peer, offer in list(self._early.items()):
            if offer.round == self._number:
                try:
                    await self._handle_offer(peer, offer)
                except WireError as error:
                    self.links.refuse(peer, error)

    async def _fetch(self, peer: str, transfer: Transfer) -> None:
        now, fetch = self.clock(), self._fetches.get(peer)
        if fetch and fetch.transfer.digest == transfer.digest:
            fetch.note_waiting_sender(now)
        else:
            assert self._model
            if transfer.size > 2 * self._model.transfer.size + frames.FRAME_BYTES:
                raise WireError(f"model of {transfer.size} bytes, ours has {self._model.transfer.size}", reason="shape")
            pace = self.policy.pace(now, transfer.frame_bytes)
            place = partial(FileSink, self._model_path(f"_{peer}"))
            self._fetches[peer] = fetch = Receiver(transfer, place, self.policy, pace, now)
            self._began.setdefault(peer, now)
        if fetch.complete:
            await self._finish_fetch(peer, fetch)
        else:
            await self._ask(peer, fetch)

    async def _ask(self, peer: str, fetch: Receiver[FileSink]) -> None:
        if want := fetch.want():
            await self.links.reply(peer, "gossiped", want)

    async def _handle_frame(self, peer: str, data: bytes) -> None:
        fetch = self._fetches.get(peer)
        if fetch is None or fetch.complete or self._edges[peer].on is not None:
            return
        fetch.take(frames.decode(data), self.clock())
        if not fetch.lacking:
            await self._finish_fetch(peer, fetch)
        else:
            await self._ask(peer, fetch)

    async def _finish_fetch(self, peer: str, fetch: Receiver[FileSink]) -> None:
        """Check a complete model, sync it to disk and acknowledge it."""
        try:
            require = partial(self._require, peer) if self._require else None
            await self.worker(store_received, fetch, self._model_path(peer), require)
        except WireError as error:
            if error.reason == "digest" and not fetch.is_hopeless:
                await self._ask(peer, fetch)
            else:
                self._edges[peer] = verdicts.refuse(self._edges[peer], printable(error.reason, NAME))
                self._changed.set()
            raise
        self._log_phase("received")
        self._digests[peer] = fetch.transfer.digest
        self._transfer_s.setdefault(peer, self.clock() - self._began[peer])
        self._edges[peer] = verdicts.receive_model(self._edges[peer])
        self._changed.set()
        await self._send_verdict(peer)

    async def _handle_verdict(self, peer: str, verdict: EdgeWord) -> None:
        if verdict.round != self._number or peer not in self._edges:
            is_on = self._verdicts.get((verdict.round, peer))
            if is_on is not None and verdict.on is not None and verdict.on != is_on:
                await self._record_difference(verdict.round, peer, is_on=is_on)
            return
        edge = self._edges[peer]
        has = verdict.has and self._model is not None and verdict.digest == self._model.transfer.digest
        cause = f"{verdict.reason}{PEER_SUFFIX}" if verdict.reason in REFUSALS else printable(verdict.reason, NAME)
        self._edges[peer] = edge = verdicts.receive_verdict(edge, has=has, on=verdict.on, cause=cause)
        self._changed.set()
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
            transfer_s=dict(sorted(self._transfer_s.items())),
        )
