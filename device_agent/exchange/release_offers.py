"""Offers of releases: hears one, fetches what the board lacks of it, hands it to the swap, and says what became of it.

What the board is at stands in its records, which the swap makes durable before it announces them; this only fetches and
tells. So an offer may come twice, or be lost, and a process may be killed anywhere in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from device_agent.exchange.download import Download
from device_agent.exchange.release_parts import PartStore, find_lacking, runtime_refusal, take_bundle
from device_agent.exchange.resend import announce, ask
from shared.errors import ConfigError, CorruptFile, FieldFleetError, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.bundle import Lacking, build_lacks, bundle_pieces
from shared.protocol.inference.release import ReleaseManifest, read_manifest, sha256_of, write_manifest
from shared.protocol.inference.rollout import MOST_MODELS, Ahead, Bundle, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.topics import topic
from shared.protocol.update import PENDING, NewVersion, UpdateRecord, UpdateTerms
from shared.runtime.executor import background

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often what came is asked for again where it is not what it should be."""


class Swap(Protocol):
    """What takes a release that is offered, and tells its records by `ReleaseOffers.announce`."""

    def hear(self, manifest: bytes, offer: NewVersion) -> Awaitable[UpdateRecord]:
        """Note an offer; return the record, whose phase `offered` asks for its parts."""

    def fetched(self, name: str, deployment: str) -> Awaitable[UpdateRecord]:
        """Go on with an offer, all parts of which are in the store."""

    def back(self, name: str, version: int) -> Awaitable[UpdateRecord]:
        """Part with a version."""


@dataclass
class ReleaseOffers:
    """This board's part in rollouts; one offer at a time is fetched, the last one that came.

    Attributes:
        download: Fetches payloads, by the channels `parts` and `lacks`.
        swap: Takes what was fetched; None until it is there.
        runtime: Version of ONNX Runtime on this board; empty where nobody knows.
        instance: That of the process's Status.
        folders: Versions that an operator's folders have, by name: a board goes back to that where it has no other.
        health: Says how a version of a model does; None where nothing does.
    """

    download: Download
    store: PartStore
    swap: Swap | None = None
    runtime: str = ""
    instance: str = ""
    health: Callable[[str, int], Awaitable[dict[str, float]]] | None = None
    folders: Mapping[str, int] = field(default_factory=dict)
    _records: dict[str, UpdateRecord] = field(default_factory=dict)
    _refusals: dict[str, ModelStatus] = field(default_factory=dict)
    _offer: Offer | Ahead | None = None
    _ahead: str = ""
    _taking: asyncio.Task[None] | None = None
    _bundle: Bundle | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _asks: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, record: UpdateRecord) -> None:
        """Say what the board is at with a name; it is durable by now."""
        self._records[record.name] = record
        self._refusals.pop(record.name, None)
        self._changed.set()

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        place = self.download
        with suppress(CorruptFile, ConfigError):  # the swap says so
            for name in await place.worker(self.store.names):
                self._records.setdefault(name, await place.worker(self.store.record, name))
        name = topic(place.site, place.device, "offer")
        try:
            async with place.transport.subscribe(name) as inbox, background(self._announcing()):
                async for _, data in inbox:
                    try:
                        self._take(wire.decode(data))
                    except WireError as error:
                        log.warning("dropped: %s", error)
        finally:
            await self._stop()

    def _take(self, message: object) -> None:
        match message:
            case Offer() | Ahead():
                self._take_offer_or_ahead(message)
            case Bundle():
                self._bundle = message
                self._answered.set()
            case Withdraw():
                before, self._offer = self._taking, None
                self._taking = self._begin(before, partial(self._withdraw, message))
            case _:
                raise WireError(f"{type(message).__name__} is no offer", reason="unexpected")

    def _take_offer_or_ahead(self, message: Offer | Ahead) -> None:
        """Begin with an offer, or with what is to come before it; that goes on where the offer is of the same."""
        known, is_busy = self._offer, self._taking is not None and not self._taking.done()
        if is_busy and message == known:
            self._asks.set()  # the server may have lost what we asked
            return
        if isinstance(message, Ahead) and ((is_busy and isinstance(known, Offer)) or message.deployment == self._ahead):
            self._changed.set()
            return
        before, self._offer = self._taking, message
        if isinstance(message, Ahead):
            self._taking = self._begin(before, partial(self._fetch_ahead, message))
            return
        is_next = isinstance(known, Ahead) and known.manifest == message.manifest
        self._taking = self._begin(before, partial(self._serve, message), goes_on=is_next)

    def _begin(
        self, before: asyncio.Task[None] | None, then: Callable[[], Awaitable[None]], *, goes_on: bool = False
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._follow(before, then, goes_on=goes_on), name="release")
        task.add_done_callback(_log_fault)
        return task

    async def _follow(
        self, before: asyncio.Task[None] | None, then: Callable[[], Awaitable[None]], *, goes_on: bool
    ) -> None:
        """Do something once what was under way has ended, which it is told to unless it goes on."""
        if before:
            if not goes_on:
                before.cancel()
            try:
                await asyncio.wait({before})
            finally:
                before.cancel()  # who cancels this means that, too
                await asyncio.wait({before})
        try:
            await then()
        except (FieldFleetError, OSError) as error:
            log.warning("release: %s", error)

    async def _stop(self) -> None:
        if self._taking:
            self._taking.cancel()
            await asyncio.wait({self._taking})

    async def _serve(self, offer: Offer) -> None:
        """Do what an offer asks for, as far as it is news; what cannot be done is refused."""
        try:
            manifest = read_manifest(offer.manifest, f"release offered by {offer.deployment[:64]}")
            if (manifest.name, manifest.version) != (offer.name, offer.version):
                raise ConfigError(f"{offer.name}/{offer.version} is offered with the manifest of {manifest.reference}")
            if reason := runtime_refusal(manifest, self.runtime):
                raise ConfigError(reason)
            await self._take_offer(offer, manifest)
        except (FieldFleetError, OSError, ValueError) as error:
            log.warning("release %s/%d is refused: %s", offer.name, offer.version, error)
            await self._refuse(offer, str(error))

    async def _refuse(self, offer: Offer, reason: str) -> None:
        """Say that an offer cannot be taken, for a cause that lies before every gate; it stays so until another one."""
        record = self._records.get(offer.name)
        if self.swap and record and record.phase in PENDING and record.deployment == offer.deployment:
            with suppress(FieldFleetError, OSError):
                await self.swap.back(offer.name, offer.version)
        known = self._status(self._records.get(offer.name, UpdateRecord(name=offer.name)))
        self._refusals[offer.name] = msgspec.structs.replace(
            known,
            candidate=offer.version,
            state="refused",
            deployment=offer.deployment,
            attempt=offer.attempt,
            reason=reason[:500],
        )
        self._changed.set()

    async def _take_offer(self, offer: Offer, manifest: ReleaseManifest) -> None:
        assert self.swap
        terms = UpdateTerms(soak_s=offer.soak_s, max_drop=offer.max_drop, max_latency_ms=offer.max_latency_ms)
        news = NewVersion(
            version=manifest.version,
            release=sha256_of(offer.manifest),
            deployment=offer.deployment,
            attempt=offer.attempt,
            terms=terms,
        )
        await self._drop_ahead(news.release)  # another rollout's takes room
        record = await self.swap.hear(offer.manifest, news)
        await self._drop_ahead()  # its parts are kept for the offer by now
        self._ahead = ""
        if record.phase != "offered" or record.deployment != offer.deployment:
            return
        await self._fetch(offer, manifest)
        await self.swap.fetched(manifest.name, offer.deployment)

    async def _fetch_ahead(self, message: Ahead) -> None:
        """Fetch what the board lacks of a release that will be offered; what cannot be taken is refused then."""
        manifest, worker = (
            read_manifest(message.manifest, f"release of {message.deployment[:64]}"),
            self.download.worker,
        )
        record = self._records.get(manifest.name)
        is_known = record is not None and record.release == sha256_of(message.manifest) and record.candidate > 0
        if runtime_refusal(manifest, self.runtime) or (manifest.name, manifest.version) != (
            message.name,
            message.version,
        ):
            return
        if not is_known:
            await worker(self.store.keep_ahead, message.manifest)
            await self._fetch(message, manifest)
        self._ahead = message.deployment
        self._changed.set()

    async def _drop_ahead(self, manifest: str = "") -> None:
        """Keep nothing for a release that was to be offered, unless it is the one with a manifest of that SHA-256."""
        ahead = await self.download.worker(self.store.ahead)
        if ahead and sha256_of(write_manifest(ahead)) != manifest:
            await self.download.worker(self.store.forget_ahead)

    async def _fetch(self, offer: Offer | Ahead, manifest: ReleaseManifest) -> None:
        """Fetch what the board lacks of a release into its store.

        Raises:
            WireError: What came was not what it should be, every time.
            Unwritable: The disk takes nothing more.
        """
        whole, worker = False, self.download.worker
        for attempt in range(ATTEMPTS):
            lacking = await worker(find_lacking, self.store, manifest, whole=whole)
            if not (lacking.parts or lacking.header):
                return
            bundle = await self._ask(offer, manifest, lacking)
            what = f"parts of {manifest.reference}"
            path, _ = await self._receive(offer, lacking, bundle, what)
            try:
                await worker(take_bundle, self.store, manifest, lacking, path)
            except CorruptFile as error:
                log.warning("%s, attempt %d of %d: %s", what, attempt + 1, ATTEMPTS, error)
                whole = True
        if (await worker(find_lacking, self.store, manifest)) != Lacking():
            raise WireError(f"parts of {manifest.reference} were damaged {ATTEMPTS} times", reason="digest")

    async def _ask(self, offer: Offer | Ahead, manifest: ReleaseManifest, lacking: Lacking) -> Bundle:
        """Say what lacks until somebody says where it is to be had."""
        size = sum(piece.size for piece in bundle_pieces(manifest, lacking))
        self._bundle = None
        return await ask(
            partial(self._say_lacking, offer, lacking), self._answered, partial(self._bundle_of, offer, size)
        )

    def _bundle_of(self, offer: Offer | Ahead, size: int) -> Bundle | None:
        found = self._bundle
        return found if found and (found.deployment, found.params.size) == (offer.deployment, size) else None

    async def _say_lacking(self, offer: Offer | Ahead, lacking: Lacking) -> None:
        place = self.download
        word = build_lacks(place.device, offer.deployment, lacking)
        with suppress(Unreachable):  # said again
            await place.transport.publish(topic(place.site, place.device, "lacks"), wire.encode(word))

    async def _receive(self, offer: Offer | Ahead, lacking: Lacking, bundle: Bundle, what: str) -> tuple[Path, int]:
        """Fetch a bundle; where the offer comes again meanwhile, the server may have forgotten what we asked for."""
        async with background(self._remind(offer, lacking)):
            return await self.download.receive(bundle.params, what, shared=bundle.shared)

    async def _remind(self, offer: Offer | Ahead, lacking: Lacking) -> None:
        self._asks.clear()
        while True:
            await self._asks.wait()
            self._asks.clear()
            self._answered.clear()
            await self._say_lacking(offer, lacking)
            await self._answered.wait()
            self.download.told_again()

    async def _withdraw(self, word: Withdraw) -> None:
        """Fetch no more of a release; go back from it where that is asked for, or where nothing of it is in use."""
        assert self.swap
        ahead = await self.download.worker(self.store.ahead)
        if ahead and (ahead.name, ahead.version) == (word.name, word.version):
            await self._drop_ahead()
            await self.download.worker(self.store.tidy)
            self._ahead = ""
        record = self._records.get(word.name)
        if record is None or record.deployment != word.deployment or record.candidate != word.version:
            return
        if word.back or record.phase in PENDING:
            await self.swap.back(word.name, word.version)

    async def _announcing(self) -> None:
        place = self.download
        await announce(place.transport, topic(place.site, place.device, "release"), self._changed, self._releases)

    async def _releases(self) -> Releases:
        """Return what the board is at with every name, and how what it serves does."""
        health = {name: await self._health(record) for name, record in list(self._records.items())}
        known = {name: self._status(record) for name, record in self._records.items()} | self._refusals
        models = [msgspec.structs.replace(known[one], figures=health.get(one, {})) for one in sorted(known)]
        return Releases(
            device=self.download.device, instance=self.instance, models=tuple(models[:MOST_MODELS]), ahead=self._ahead
        )

    def _status(self, record: UpdateRecord) -> ModelStatus:
        """Return what the board says of a record; what it would go back to may be a folder's."""
        found, there = status_of(record), self.folders.get(record.name, 0)
        if found.previous or not found.committed or there == found.committed:
            return found
        return msgspec.structs.replace(found, previous=there)

    async def _health(self, record: UpdateRecord) -> dict[str, float]:
        """Return how the version that a board serves does."""
        return await self.health(record.name, record.serving) if self.health and record.serving else {}


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a fault of ours, the offer is dropped", exc_info=error)


def status_of(record: UpdateRecord) -> ModelStatus:
    """Return what a board says of a record."""
    return ModelStatus(
        name=record.name,
        committed=record.committed,
        previous=record.previous,
        candidate=record.candidate,
        state="" if record.phase == "none" else record.phase,
        deployment=record.deployment,
        attempt=record.attempt,
        reason=record.reason,
    )
