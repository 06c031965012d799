"""Model release offers: download the release, replace the served model, report the result.

The records hold the board's state; the swap makes them durable before it announces them, and this module only fetches
and reports. So an offer may arrive twice or be lost, and the process may be killed at any point.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from device_agent.exchange.bundle_download import BundleDownload
from device_agent.exchange.bundle_request import BundleRequest
from device_agent.exchange.download import Download
from device_agent.exchange.release_parts import ReleaseStore, runtime_refusal
from device_agent.exchange.resend import announce
from shared.errors import ConfigError, CorruptFile, FieldFleetError, WireError
from shared.protocol import wire
from shared.protocol.inference.release import ReleaseManifest, read_manifest, sha256_of, write_manifest
from shared.protocol.inference.rollout import MOST_MODELS, Ahead, Bundle, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.topics import topic
from shared.protocol.update import PENDING, NewVersion, UpdateRecord, UpdateTerms
from shared.runtime.executor import background

log = logging.getLogger(__name__)


class Swap(Protocol):
    """Switches to an offered release; reports its records by `ReleaseOffers.announce`."""

    def accept_offer(self, manifest: bytes, offer: NewVersion) -> Awaitable[UpdateRecord]:
        """Record an offer; return the record, whose phase `offered` means that its parts are needed."""

    def mark_fetched(self, name: str, deployment: str) -> Awaitable[UpdateRecord]:
        """Continue with an offer whose parts are all in the store."""

    def take_back(self, name: str, version: int) -> Awaitable[UpdateRecord]:
        """Withdraw a version."""


@dataclass
class ReleaseOffers:
    """Handles this board's part in rollouts; fetches one offer at a time, the latest.

    Attributes:
        download: Fetches payloads, on the channels `parts` and `lacks`.
        swap: Receives fetched releases; assigned after construction.
        runtime: Version of ONNX Runtime on this board; empty if unknown.
        instance: Instance of this process's Status.
        folders: Version in the operator's folder by model name: the fallback of a board without another version.
        health: Reads the serving metrics of a version; None to report none.
    """

    download: Download
    store: ReleaseStore
    swap: Swap | None = None
    runtime: str = ""
    instance: str = ""
    health: Callable[[str, int], Awaitable[dict[str, float]]] | None = None
    folders: Mapping[str, int] = field(default_factory=dict)
    _records: dict[str, UpdateRecord] = field(default_factory=dict)
    _refusals: dict[str, ModelStatus] = field(default_factory=dict)
    _offer: Offer | Ahead | None = None
    _ahead: str = ""
    _task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._request = BundleRequest(self.download)
        self._bundles = BundleDownload(self.download, self.store, self._request)

    def announce(self, record: UpdateRecord) -> None:
        """Report a changed record, which is durable by now."""
        self._records[record.name] = record
        self._refusals.pop(record.name, None)
        self._changed.set()

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        download = self.download
        with suppress(CorruptFile, ConfigError):  # the swap reports it
            for name in await download.worker(self.store.names):
                self._records.setdefault(name, await download.worker(self.store.record, name))
        name = topic(download.site, download.device, "offer")
        try:
            async with download.transport.subscribe(name) as inbox, background(self._announce()):
                async for _, data in inbox:
                    try:
                        self._handle(wire.decode(data))
                    except WireError as error:
                        log.warning("dropped: %s", error)
        finally:
            await self._stop()

    def _handle(self, message: object) -> None:
        match message:
            case Offer() | Ahead():
                self._handle_offer(message)
            case Bundle():
                self._request.announce(message)
            case Withdraw():
                before, self._offer = self._task, None
                self._task = self._begin(before, partial(self._withdraw, message))
            case _:
                raise WireError(
                    f"unexpected message {type(message).__name__} on the offer channel", reason="unexpected"
                )

    def _handle_offer(self, message: Offer | Ahead) -> None:
        """Start with an offer or a prefetch; a running prefetch of the same release continues into the offer."""
        current, is_busy = self._offer, self._task is not None and not self._task.done()
        if is_busy and message == current:
            self._bundles.repeat_request()
            return
        if isinstance(message, Ahead) and (
            (is_busy and isinstance(current, Offer)) or message.deployment == self._ahead
        ):
            self._changed.set()
            return
        before, self._offer = self._task, message
        if isinstance(message, Ahead):
            self._task = self._begin(before, partial(self._prefetch, message))
            return
        is_next = isinstance(current, Ahead) and current.manifest == message.manifest
        self._task = self._begin(before, partial(self._serve, message), goes_on=is_next)

    def _begin(
        self, before: asyncio.Task[None] | None, then: Callable[[], Awaitable[None]], *, goes_on: bool = False
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run_after(before, then, goes_on=goes_on), name="release")
        task.add_done_callback(_log_crash)
        return task

    async def _run_after(
        self, before: asyncio.Task[None] | None, then: Callable[[], Awaitable[None]], *, goes_on: bool
    ) -> None:
        """Run `then` after the task before has ended; cancel that task unless it goes on."""
        if before:
            if not goes_on:
                before.cancel()
            try:
                await asyncio.wait({before})
            finally:
                before.cancel()  # cancelling this cancels that, too
                await asyncio.wait({before})
        try:
            await then()
        except (FieldFleetError, OSError) as error:
            log.warning("release: %s", error)

    async def _stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _serve(self, offer: Offer) -> None:
        """Carry out a new offer; refuse one that cannot be carried out."""
        try:
            manifest = read_manifest(offer.manifest, f"release offered by {offer.deployment[:64]}")
            if (manifest.name, manifest.version) != (offer.name, offer.version):
                raise ConfigError(
                    f"the offer of {offer.name}/{offer.version} carries the manifest of {manifest.reference}"
                )
            if reason := runtime_refusal(manifest, self.runtime):
                raise ConfigError(reason)
            await self._accept_offer(offer, manifest)
        except (FieldFleetError, OSError, ValueError) as error:
            log.warning("release %s/%d is refused: %s", offer.name, offer.version, error)
            await self._refuse(offer, str(error))

    async def _refuse(self, offer: Offer, reason: str) -> None:
        """Report an offer as refused before its gates; the refusal stands until another offer."""
        record = self._records.get(offer.name)
        if self.swap and record and record.phase in PENDING and record.deployment == offer.deployment:
            with suppress(FieldFleetError, OSError):
                await self.swap.take_back(offer.name, offer.version)
        current = self._status(self._records.get(offer.name, UpdateRecord(name=offer.name)))
        self._refusals[offer.name] = msgspec.structs.replace(
            current,
            candidate=offer.version,
            state="refused",
            deployment=offer.deployment,
            attempt=offer.attempt,
            reason=reason[:500],
        )
        self._changed.set()

    async def _accept_offer(self, offer: Offer, manifest: ReleaseManifest) -> None:
        assert self.swap
        terms = UpdateTerms(soak_s=offer.soak_s, max_drop=offer.max_drop, max_latency_ms=offer.max_latency_ms)
        news = NewVersion(
            version=manifest.version,
            release=sha256_of(offer.manifest),
            deployment=offer.deployment,
            attempt=offer.attempt,
            terms=terms,
        )
        await self._drop_prefetch(news.release)  # free the room of another rollout's prefetch
        record = await self.swap.accept_offer(offer.manifest, news)
        await self._drop_prefetch()  # the offer itself retains the parts now
        self._ahead = ""
        if record.phase != "offered" or record.deployment != offer.deployment:
            return
        await self._bundles.fetch(offer, manifest)
        await self.swap.mark_fetched(manifest.name, offer.deployment)

    async def _prefetch(self, message: Ahead) -> None:
        """Fetch the missing parts of a release before its offer; an unusable release is refused when it is offered."""
        manifest = read_manifest(message.manifest, f"release of {message.deployment[:64]}")
        record = self._records.get(manifest.name)
        is_known = record is not None and record.release == sha256_of(message.manifest) and record.candidate > 0
        is_match = (manifest.name, manifest.version) == (message.name, message.version)
        if not is_match or runtime_refusal(manifest, self.runtime):
            return
        if not is_known:
            await self.download.worker(self.store.keep_ahead, message.manifest)
            await self._bundles.fetch(message, manifest)
        self._ahead = message.deployment
        self._changed.set()

    async def _drop_prefetch(self, manifest: str = "") -> None:
        """Release the prefetched parts, unless they are of the manifest with this SHA-256."""
        ahead = await self.download.worker(self.store.ahead)
        if ahead and sha256_of(write_manifest(ahead)) != manifest:
            await self.download.worker(self.store.forget_ahead)

    async def _withdraw(self, message: Withdraw) -> None:
        """Stop fetching a release; roll back if asked to or if it is not in use yet."""
        assert self.swap
        ahead = await self.download.worker(self.store.ahead)
        if ahead and (ahead.name, ahead.version) == (message.name, message.version):
            await self._drop_prefetch()
            await self.download.worker(self.store.tidy)
            self._ahead = ""
        record = self._records.get(message.name)
        if record is None or record.deployment != message.deployment or record.candidate != message.version:
            return
        if message.back or record.phase in PENDING:
            await self.swap.take_back(message.name, message.version)

    async def _announce(self) -> None:
        download = self.download
        await announce(
            download.transport, topic(download.site, download.device, "release"), self._changed, self._build_releases
        )

    async def _build_releases(self) -> Releases:
        """Return the board's state and serving metrics by model."""
        health = {name: await self._health(record) for name, record in list(self._records.items())}
        statuses = {name: self._status(record) for name, record in self._records.items()} | self._refusals
        models = [msgspec.structs.replace(statuses[name], figures=health.get(name, {})) for name in sorted(statuses)]
        return Releases(
            device=self.download.device, instance=self.instance, models=tuple(models[:MOST_MODELS]), ahead=self._ahead
        )

    def _status(self, record: UpdateRecord) -> ModelStatus:
        """Return the status of a record; the version to go back to may be that of a folder."""
        status, folder_version = status_of(record), self.folders.get(record.name, 0)
        if status.previous or not status.committed or folder_version == status.committed:
            return status
        return msgspec.structs.replace(status, previous=folder_version)

    async def _health(self, record: UpdateRecord) -> dict[str, float]:
        """Return the metrics of the version that the board serves."""
        return await self.health(record.name, record.serving) if self.health and record.serving else {}


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("internal error, the offer is dropped", exc_info=error)


def status_of(record: UpdateRecord) -> ModelStatus:
    """Return the status that corresponds to a record."""
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
