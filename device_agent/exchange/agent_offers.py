"""Agent upgrade offers: fetch the board's package, request its installation, report progress.

This process installs nothing, and the updater, which runs as root, trusts its files only by the site's signature. It
fetches the package that the manifest names for this processor and Python, stores both beside `wanted.json`, and reads
the progress from the updater's record. An offer need not be stored: the server repeats it to a restarted process.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_agent.exchange.download import Download
from device_agent.exchange.offers import OfferLoop
from device_agent.exchange.upgrade_folder import MissingPackage, write_request
from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.inputs import ARCHES
from device_agent.upgrade.record import MOST_PROBATION_S, UpgradeRecord, UpgradeTarget, read_upgrade
from device_agent.upgrade.transitions import is_handled
from shared.errors import ConfigError, CorruptFile, FieldFleetError
from shared.protocol.inference.rollout import Ahead, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.packages import (
    AGENT,
    decode_manifest,
    decode_signed_manifest,
    encode_signed_manifest,
    find_build,
)
from shared.protocol.update import PENDING
from shared.runtime.executor import background

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two reads of the updater's record."""
REWRITE_S, MAX_REWRITE_S = 30.0, 600.0
"""Pause before an unhandled request is written again: the updater may have missed it."""
UNCOUNTED = -1
"""Serial of a version that the gateway does not know, such as one installed by hand."""
CANNOT_UPGRADE = "this agent cannot upgrade itself: it runs from a checkout or in a container; update that instead"
SUPERSEDED = "another version was installed at this board after the offer; start another rollout to offer it again"


@dataclass(frozen=True)
class InstalledVersion:
    """Version of the running agent.

    Attributes:
        home: Folder of the installed versions; None if this process was not started from it.
        arch: Processor, as dpkg names it.
        python: Version such as 3.11.
    """

    home: Path | None
    version: str = ""
    arch: str = field(default_factory=lambda: ARCHES.get(platform.machine(), platform.machine()))
    python: str = f"{sys.version_info[0]}.{sys.version_info[1]}"

    def record(self) -> UpgradeRecord:
        """Return the updater's record.

        Raises:
            ConfigError: A newer fieldfleet wrote it.
            CorruptFile: It is damaged.
        """
        return read_upgrade(self.home) if self.home else UpgradeRecord()


@dataclass
class AgentOffers:
    """Handles this board's part in rollouts of the agent.

    Attributes:
        download: Fetches packages, on the channels `parts` and `lacks`.
        instance: Instance of this process's Status.
        poll_s: Seconds between two reads of the updater's record.
    """

    download: Download
    state_dir: Path
    installed: InstalledVersion
    instance: str = ""
    poll_s: float = POLL_S
    _record: UpgradeRecord = field(default_factory=UpgradeRecord)
    _serials: dict[str, int] = field(default_factory=dict)
    _pending: ModelStatus | None = None

    def __post_init__(self) -> None:
        self._loop = OfferLoop(self.download, "upgrade", "agent", self)

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        async with background(self._poll_record()):
            await self._loop.run()

    async def serve(self, offer: Offer) -> None:
        """Fetch an offered version and request it from the updater until its record reflects that."""
        signed = decode_signed_manifest(offer.manifest)
        manifest = decode_manifest(signed.manifest)
        if (offer.name, offer.version) != (AGENT, manifest.serial):
            raise ConfigError(f"the offer of {offer.name[:64]}/{offer.version} carries the manifest of another version")
        self._serials[manifest.version] = manifest.serial
        if self.installed.home is None:
            raise ConfigError(CANNOT_UPGRADE)
        await self._read_record()
        request = _build_request(offer, manifest.version)
        if _is_already_done(self._record, request, self.installed.version):
            self._set_pending(None)
        else:
            build = find_build(manifest, self.installed.arch, self.installed.python)
            self._set_pending(_build_status(offer, "offered"))
            await self._loop.bundles.fetch(offer.deployment, MissingPackage(self.state_dir, build, manifest.version))
            await self.download.worker(write_request, self.state_dir, encode_signed_manifest(signed), request)
            log.info("version %s fetched and requested from the updater", manifest.version)
            self._set_pending(_build_status(offer, "fetched"))
            await self._repeat_until_done(request)

    async def refuse(self, offer: Offer, reason: str) -> None:
        self._set_pending(_build_status(offer, "refused", reason))

    def has_prefetched(self, _deployment: str) -> bool:
        """Return True, since packages are not fetched before their offer."""
        return True

    async def prefetch(self, _ahead: Ahead) -> None:
        """Do nothing: see `has_prefetched`."""

    async def _repeat_until_done(self, request: UpgradeTarget) -> None:
        """Write a request again, with growing pauses, until the updater's record reflects it."""
        pause_s = REWRITE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_REWRITE_S)
            try:
                await self._read_record()
                if is_handled(self._record, request, self.installed.version):
                    return
                await self.download.worker(write_request, self.state_dir, b"", request)
            except (FieldFleetError, OSError) as error:
                log.warning("upgrade: %s", error)

    def _set_pending(self, pending: ModelStatus | None) -> None:
        self._pending = pending
        self._loop.changed.set()

    async def withdraw(self, message: Withdraw) -> None:
        """Stop fetching a version and revoke the request for it; roll back if asked to."""
        self._set_pending(None)
        if self.installed.home is None:
            return
        await self._read_record()
        target = await self.download.worker(AgentFolder(self.state_dir).read_target)
        if request := self._request_after_withdrawal(message, target):
            await self.download.worker(write_request, self.state_dir, b"", request)
            await self._repeat_until_done(request)

    def _request_after_withdrawal(self, message: Withdraw, request: UpgradeTarget | None) -> UpgradeTarget | None:
        """Return the request that follows a withdrawn version; None if the updater is not concerned."""
        record = self._record
        is_its = record.deployment == message.deployment and self._serial(record.to) == message.version
        if is_its and record.state in ("trial", "committed"):
            goal = record.from_ if record.state == "trial" else record.previous
            if not (message.back and goal):
                return None
            return UpgradeTarget(version=goal, deployment=message.deployment, attempt=max(1, record.attempt))
        if request is None or request.deployment != message.deployment:
            return None
        is_seen_to = is_handled(record, request, self.installed.version) and record.state not in PENDING
        return None if is_seen_to else msgspec.structs.replace(request, version=self.installed.version)

    async def _read_record(self) -> None:
        record = await self.download.worker(self.installed.record)
        if record != self._record:
            self._record = record
            self._loop.changed.set()

    async def _poll_record(self) -> None:
        """Read the updater's record periodically."""
        while True:
            try:
                await self._read_record()
            except (ConfigError, CorruptFile, OSError) as error:
                log.debug("upgrade: %s", error)
            await asyncio.sleep(self.poll_s)

    async def build_statuses(self) -> Releases:
        return Releases(device=self.download.device, instance=self.instance, models=(self.status(),))

    def status(self) -> ModelStatus:
        """Return this board's upgrade state: the updater's record, or a newer offer that it does not cover yet."""
        record, pending = self._record, self._pending
        running = record.from_ if record.state == "trial" else self.installed.version
        recorded = ModelStatus(
            name=AGENT,
            committed=self._serial(running),
            previous=self._serial(record.previous) or UNCOUNTED * bool(record.previous),
            candidate=self._serial(record.to),
            state="" if record.state == "none" else record.state,
            deployment=record.deployment,
            attempt=record.attempt,
            reason=record.reason,
        )
        is_recorded = pending is None or (record.deployment, record.attempt) == (pending.deployment, pending.attempt)
        if pending is None or (is_recorded and pending.state == "fetched"):
            return recorded
        return msgspec.structs.replace(pending, committed=recorded.committed, previous=recorded.previous)

    def _serial(self, version: str) -> int:
        return self._record.serials.get(version, self._serials.get(version, 0)) if version else 0


def _is_already_done(record: UpgradeRecord, request: UpgradeTarget, running: str) -> bool:
    """Return True if the requested version runs already or the updater's record reflects the request.

    Raises:
        ConfigError: Another version was installed at the board since.
    """
    if request == record.passed_over and request.version not in (running, record.to):
        raise ConfigError(SUPERSEDED)
    return (request.version == running and record.state != "trial") or is_handled(record, request, running)


def _build_request(offer: Offer, version: str) -> UpgradeTarget:
    probation_s = min(max(offer.soak_s, 1.0), MOST_PROBATION_S)
    return UpgradeTarget(
        version=version, deployment=offer.deployment, attempt=max(1, offer.attempt), probation_s=probation_s
    )


def _build_status(offer: Offer, state: str, reason: str = "") -> ModelStatus:
    return ModelStatus(
        name=AGENT,
        candidate=offer.version,
        state=state,
        deployment=offer.deployment,
        attempt=offer.attempt,
        reason=reason,
    )
