"""Model release offers: download the release, replace the served model, report the result.

The records hold the board's state; the swap makes them durable before it announces them, and this module only fetches
and reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from device_agent.exchange.download import Download
from device_agent.exchange.offers import OfferLoop
from device_agent.exchange.release_parts import MissingParts, runtime_refusal
from device_agent.inference.messages import Figures
from device_agent.inference.served_model import Serving
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.inference.release import ReleaseManifest, read_manifest, sha256_of, write_manifest
from shared.protocol.inference.rollout import MOST_MODELS, Ahead, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.update import PENDING, NewVersion, UpdateRecord, UpdateTerms
from shared.runtime import backports

METRICS_TIMEOUT_S = 2.0
"""Time limit of the inference process for its metrics; late ones are reported the next time."""
HEALTH_METRICS = ("requests", "errors", "non_finite", "p50_s", "p95_s", "p99_s")


@dataclass
class ReleaseOffers:
    """Handles this board's part in rollouts of models.

    Attributes:
        download: Fetches payloads, on the channels `parts` and `lacks`.
        swap: Receives fetched releases, and reports its records to `announce`; assigned after construction.
        runtime: Version of ONNX Runtime on this board; empty if unknown.
        instance: Instance of this process's Status.
        folders: Version in the operator's folder by model name: the fallback of a board without another version.
        serving: Inference process whose metrics are reported; None to report none.
    """

    download: Download
    store: BoardStore
    swap: Swaps | None = None
    runtime: str = ""
    instance: str = ""
    serving: Serving | None = None
    folders: Mapping[str, int] = field(default_factory=dict)
    _records: dict[str, UpdateRecord] = field(default_factory=dict)
    _refusals: dict[str, ModelStatus] = field(default_factory=dict)
    _ahead: str = ""

    def __post_init__(self) -> None:
        self._loop = OfferLoop(self.download, "offer", "release", self)

    def announce(self, record: UpdateRecord) -> None:
        """Report a changed record, which is durable by now."""
        self._records[record.name] = record
        self._refusals.pop(record.name, None)
        self._loop.changed.set()

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        with suppress(CorruptFile, ConfigError):  # the swap reports it
            for name in await self.download.worker(self.store.names):
                self._records.setdefault(name, await self.download.worker(self.store.record, name))
        await self._loop.run()

    async def refuse(self, offer: Offer, reason: str) -> None:
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
            reason=reason,
        )
        self._loop.changed.set()

    async def serve(self, offer: Offer) -> None:
        """Record an offer, fetch what the board lacks of it, and hand it to the swap."""
        assert self.swap
        manifest = read_manifest(offer.manifest, f"release offered by {offer.deployment[:64]}")
        if (manifest.name, manifest.version) != (offer.name, offer.version):
            raise ConfigError(f"the offer of {offer.name}/{offer.version} carries the manifest of {manifest.reference}")
        if reason := runtime_refusal(manifest, self.runtime):
            raise ConfigError(reason)
        news = NewVersion(
            version=manifest.version,
            release=sha256_of(offer.manifest),
            deployment=offer.deployment,
            attempt=offer.attempt,
            terms=UpdateTerms(soak_s=offer.soak_s, max_drop=offer.max_drop, max_latency_ms=offer.max_latency_ms),
        )
        await self._drop_prefetch(news.release)  # free the room of another rollout's prefetch
        record = await self.swap.accept_offer(offer.manifest, news)
        await self._drop_prefetch()  # the offer itself retains the parts now
        self._ahead = ""
        if record.phase == "offered" and record.deployment == offer.deployment:
            await self._fetch(offer, manifest)
            await self.swap.mark_fetched(manifest.name, offer.deployment)

    async def _fetch(self, offer: Offer | Ahead, manifest: ReleaseManifest) -> None:
        await self._loop.bundles.fetch(offer.deployment, MissingParts(self.store, manifest))

    def has_prefetched(self, deployment: str) -> bool:
        """Return True if all parts of a future offer are stored."""
        return deployment == self._ahead

    async def prefetch(self, ahead: Ahead) -> None:
        """Fetch the missing parts of a release before its offer; an unusable release is refused when it is offered."""
        manifest = read_manifest(ahead.manifest, f"release of {ahead.deployment[:64]}")
        record = self._records.get(manifest.name)
        is_known = record is not None and record.release == sha256_of(ahead.manifest) and record.candidate > 0
        is_match = (manifest.name, manifest.version) == (ahead.name, ahead.version)
        if not is_match or runtime_refusal(manifest, self.runtime):
            return
        if not is_known:
            await self.download.worker(self.store.keep_ahead, ahead.manifest)
            await self._fetch(ahead, manifest)
        self._ahead = ahead.deployment
        self._loop.changed.set()

    async def _drop_prefetch(self, manifest: str = "") -> None:
        """Release the prefetched parts, unless they are of the manifest with this SHA-256."""
        ahead = await self.download.worker(self.store.ahead)
        if ahead and sha256_of(write_manifest(ahead)) != manifest:
            await self.download.worker(self.store.forget_ahead)

    async def withdraw(self, message: Withdraw) -> None:
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

    async def build_statuses(self) -> Releases:
        """Return the board's state and serving metrics by model."""
        health = {name: await self._health(record) for name, record in list(self._records.items())}
        statuses = {name: self._status(record) for name, record in self._records.items()} | self._refusals
        models = [msgspec.structs.replace(statuses[name], figures=health.get(name, {})) for name in sorted(statuses)]
        return Releases(
            device=self.download.device, instance=self.instance, models=tuple(models[:MOST_MODELS]), ahead=self._ahead
        )

    def _status(self, record: UpdateRecord) -> ModelStatus:
        """Return the status of a record; the version to go back to may be that of a folder."""
        folder_version = self.folders.get(record.name, 0)
        has_fallback = not record.previous and record.committed and folder_version != record.committed
        return ModelStatus(
            name=record.name,
            committed=record.committed,
            previous=folder_version if has_fallback else record.previous,
            candidate=record.candidate,
            state="" if record.phase == "none" else record.phase,
            deployment=record.deployment,
            attempt=record.attempt,
            reason=record.reason,
        )

    async def _health(self, record: UpdateRecord) -> dict[str, float]:
        """Return the metrics of the version that the board serves; empty without an answer in time."""
        if not (self.serving and record.serving):
            return {}
        figures = Figures(record.name, record.serving)
        with suppress(FieldFleetError, TimeoutError):
            async with backports.timeout(METRICS_TIMEOUT_S):
                figures = await self.serving.figures(record.name, record.serving)
        return {key: float(getattr(figures, key)) for key in HEALTH_METRICS} if figures.requests else {}
