"""Gossip of one site: exchange models with every neighbour and settle each edge once.

Models are files in the run's folder, so that a restarted server continues with what it has. The site's own model of the
last gossip is served until the next begins, since a neighbour may have been offline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.journal.disk import RETRY_S, retry_write
from edge_server.journal.records import AnyRecord, EdgeSettled, Gossiped
from edge_server.sites.edge_table import EdgeTable
from edge_server.sites.identity import OFFER_S, SiteIdentity, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.model_fetches import ModelFetches, RequireOf
from edge_server.sites.model_files import FOLDER, round_folder, write_model
from edge_server.sites.served_model import ServedModel
from shared.errors import WireError
from shared.protocol.messages import Message, Want
from shared.protocol.payload import digest
from shared.protocol.peers import EdgeWord, ModelOffer
from shared.runtime.executor import background
from shared.runtime.phases import log_phase
from shared.transfer.frames import FRAME_BYTES
from shared.transfer.to_file import view

log = logging.getLogger(__name__)

STALE = "stale-round"


@dataclass
class Gossip:
    """Exchange of models with every neighbour.

    Attributes:
        neighbours: Sites joined by an edge of the graph.
    """

    identity: SiteIdentity
    neighbours: Sequence[str]
    links: Links
    services: SiteServices
    edges: EdgeTable = field(init=False)
    served: ServedModel = field(init=False)
    _fetches: ModelFetches | None = None
    _early: dict[str, ModelOffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Register for messages about models."""
        self.edges = EdgeTable(self.identity, self.links, self.services)
        self.served = ServedModel(self.links, self.services.policy.frame_bytes)
        self.served.open_queues(self.neighbours)
        self.links.handlers |= {"gossip": self.handle, "gossiped": self.handle}
        self.links.on_change.append(self.edges.changed.set)

    def restore(self, records: Iterable[AnyRecord]) -> None:
        """Restore settled edges from the journal, and serve the last gossip's model again."""
        for record in records:
            if isinstance(record, EdgeSettled):
                self.edges.restore(record)
        folders = sorted((self.identity.folder / FOLDER).glob("round-*"))
        if folders and folders[-1].name.removeprefix("round-").isdecimal():
            self._begin_edges(int(folders[-1].name.removeprefix("round-")), folders[-1])
            with suppress(FileNotFoundError):
                self.served.load(folders[-1] / self.identity.site)

    def _begin_edges(self, number: int, folder: Path) -> None:
        stored = {peer: folder / peer for peer in self.neighbours}
        digests = {peer: digest([view(path)]) if path.exists() else None for peer, path in stored.items()}
        self.edges.begin(number, digests)

    async def wait_for_verdicts(self) -> None:
        """Wait until every neighbour has settled the last edges, at most one deadline."""
        edges = self.edges
        with suppress(TimeoutError):
            async with asyncio.timeout(self.identity.deadline_s):
                while any(edge.owns and edge.on and edge.peer_verdict is None for edge in edges.states.values()):
                    edges.changed.clear()
                    await edges.changed.wait()

    async def exchange(
        self, number: int, model: Sequence[memoryview], require: RequireOf
    ) -> tuple[dict[str, memoryview], Gossiped]:
        """Gossip after a round; return the models of neighbours whose edges are on, and the journal record.

        Args:
            require: Raises WireError for bytes that are no acceptable model.
        """
        started = self.services.clock()
        fetches = await self._begin(number, model, require)
        self._log_phase("offering")
        async with background(*(self._offer(peer) for peer in self.neighbours), fetches.watch()):
            await self._take_early()
            await self.edges.settle_all(started)
        models = {peer: view(fetches.folder / peer) for peer, edge in self.edges.states.items() if edge.on}
        return models, self._record(fetches, started)

    async def conclude(self, gossiped: Gossiped) -> None:
        """Journal a gossip after the models were mixed."""
        await self.services.keep(gossiped)
        self._log_phase("mixed")

    def _log_phase(self, phase: str) -> None:
        log_phase(log, phase, run=self.identity.run, round=self.edges.number)

    async def _begin(self, number: int, model: Sequence[memoryview], require: RequireOf) -> ModelFetches:
        """Write and serve our model, in place of the last gossip's."""
        folder = round_folder(self.identity.folder, number)
        await retry_write(self.services.worker, RETRY_S, write_model, folder, self.identity.site, model)
        self.served.load(folder / self.identity.site)
        assert self.served.model
        self._fetches = fetches = ModelFetches(
            *(self.links, self.services, folder, require),
            most_bytes=2 * self.served.model.transfer.size + FRAME_BYTES,
            on_model=self.edges.receive_model,
            on_refused=self.edges.refuse,
        )
        self._begin_edges(number, folder)
        return fetches

    async def _offer(self, peer: str) -> None:
        """Offer our model to a neighbour until the edge is settled on this side."""
        assert self.served.model
        site, run, params = self.identity.site, self.identity.run, self.served.model.transfer
        offer = ModelOffer(site=site, run=run, round=self.edges.number, params=params)
        while not self.edges.is_settled(peer):
            await self.links.send(peer, "gossip", offer)
            await asyncio.sleep(OFFER_S)

    async def handle(self, peer: str, message: Message | bytes) -> None:
        """Handle a peer's message about models.

        Raises:
            WireError: It is invalid.
        """
        if peer not in self.neighbours:
            raise WireError("no edge of the graph joins us", reason="unexpected")
        match message:
            case bytes():
                if self._fetches and not self.edges.is_settled(peer):
                    await self._fetches.take_frame(peer, message)
            case Want():
                self.served.queue(peer, message)
            case ModelOffer():
                await self._handle_offer(peer, message)
            case EdgeWord():
                has = message.has and self.served.is_current(message.digest)
                await self.edges.handle_verdict(peer, message, has=has)
            case other:
                raise WireError(f"{type(other).__name__} is not about models", reason="unexpected")

    async def _handle_offer(self, peer: str, offer: ModelOffer) -> None:
        if offer.round > self.edges.number or (offer.round == self.edges.number and peer not in self.edges.states):
            self._early[peer] = offer  # the peer repeats it
            return
        if offer.round < self.edges.number:
            on = self.edges.was_on(offer.round, peer)
            verdict = self.edges.build_verdict(offer.round, offer.params.digest, on=on, reason=STALE)
            await self.links.reply(peer, "gossiped", verdict)
            return
        edge = self.edges.states[peer]
        if edge.on is not None or (edge.has and self.edges.digests.get(peer) == offer.params.digest):
            await self.edges.send_verdict(peer)
        elif self._fetches:
            await self._fetches.fetch(peer, offer.params)

    async def _take_early(self) -> None:
        """Handle offers that arrived before this round began, so that the last site waits for no second offer."""
        for peer, offer in list(self._early.items()):
            if offer.round == self.edges.number:
                try:
                    await self._handle_offer(peer, offer)
                except WireError as error:
                    self.links.refuse(peer, error)

    def _record(self, fetches: ModelFetches, started: float) -> Gossiped:
        refused, self.links.refused = dict(sorted(self.links.refused.items())), type(self.links.refused)()
        return Gossiped(
            round=self.edges.number,
            on=tuple(peer for peer, edge in self.edges.states.items() if edge.on),
            off={peer: edge.cause for peer, edge in self.edges.states.items() if not edge.on},
            bytes_up={peer: count for peer, count in sorted(self.served.sent_bytes.items()) if count},
            bytes_down={peer: fetch.bytes_received for peer, fetch in sorted(fetches.receivers.items())},
            refused=refused,
            seconds=self.services.clock() - started,
            at=self.services.clock(),
            transfer_s=dict(sorted(fetches.transfer_s.items())),
        )
