"""Offers of the agent itself: hears one, fetches this board's package, tells root's half, and says what came of it.

This half installs nothing, and what it writes root believes only by the site's signature. It fetches the package that
the manifest names for this processor and Python, lays both beside `wanted.json`, and reads from root's record how it
goes. What it was offered need not be kept: who offers it says it again to a process that began anew.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from device_agent.exchange.download import Download
from device_agent.exchange.resend import announce, ask
from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.proof import open_folder
from device_agent.upgrade.record import MOST_PROBATION_S, WANTED, UpgradeRecord, Wanted, read_upgrade
from device_agent.upgrade.verdict import is_done
from shared.errors import ConfigError, CorruptFile, FieldFleetError, WireError
from shared.protocol import wire
from shared.protocol.inference.release import sha256_of
from shared.protocol.inference.rollout import Bundle, Lacks, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.packages import AGENT, Build, PackageManifest, find_build, read_manifest, read_signed, write_signed
from shared.protocol.topics import topic
from shared.protocol.update import PENDING
from shared.runtime.durable import replace_file, sync
from shared.runtime.executor import background

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at root's record."""
INSIST_S, MOST_INSIST_S = 30.0, 600.0
"""Before a wish is written anew that root's half has not seen to: whoever waits for it may have missed it."""
ATTEMPTS = 3
UNCOUNTED = -1
"""In place of the number of a version that the gateway does not count: one that was installed by hand."""
ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
NOT_HERE = "this agent cannot upgrade itself: it runs from a checkout or in a container, so update that"
PASSED_OVER = "somebody at this board took another version after this one was offered; another rollout offers it anew"
PRIVATE = 0o600


@dataclass(frozen=True)
class OwnVersion:
    """What runs here.

    Attributes:
        home: Folder of the versions; None where this process is none of them.
        arch: As dpkg calls the processor.
        python: Such as 3.11.
    """

    home: Path | None
    version: str = ""
    arch: str = field(default_factory=lambda: ARCHES.get(platform.machine(), platform.machine()))
    python: str = f"{sys.version_info[0]}.{sys.version_info[1]}"

    def record(self) -> UpgradeRecord:
        """Return how upgrades stand.

        Raises:
            ConfigError: A newer fieldfleet wrote the record.
            CorruptFile: It is damaged.
        """
        return read_upgrade(self.home) if self.home else UpgradeRecord()


@dataclass
class AgentOffers:
    """This board's part in rollouts of the agent.

    Attributes:
        download: Fetches packages, on the channels `parts` and `lacks`.
        instance: That of the process's Status.
        look_s: Seconds between two looks at root's record.
    """

    download: Download
    state_dir: Path
    own: OwnVersion
    instance: str = ""
    look_s: float = LOOK_S
    _record: UpgradeRecord = field(default_factory=UpgradeRecord)
    _serials: dict[str, int] = field(default_factory=dict)
    _offer: Offer | None = None
    _pending: ModelStatus | None = None
    _bundle: Bundle | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _taking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        place = self.download
        name = topic(place.site, place.device, "upgrade")
        try:
            async with place.transport.subscribe(name) as inbox, background(self._looking(), self._announcing()):
                async for _, data in inbox:
                    try:
                        await self._take(wire.decode(data))
                    except WireError as error:
                        log.warning("dropped: %s", error)
        finally:
            await self._stop()

    async def _take(self, message: object) -> None:
        match message:
            case Offer():
                if self._offer == message and self._taking and not self._taking.done():
                    self.download.told_again()
                    return
                await self._begin(message, self._serve(message))
            case Bundle():
                self._bundle = message
                self._answered.set()
            case Withdraw():
                await self._begin(None, self._withdraw(message))
            case _:
                raise WireError(f"{type(message).__name__} is no offer of an agent", reason="unexpected")

    async def _begin(self, offer: Offer | None, then: Coroutine[Any, Any, None]) -> None:
        await self._stop()
        self._offer, self._taking = offer, asyncio.create_task(then, name="upgrade")

    async def _stop(self) -> None:
        if self._taking:
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)

    async def _serve(self, offer: Offer) -> None:
        """Do what an offer asks for; what cannot be done is refused."""
        try:
            signed = read_signed(offer.manifest)
            manifest = read_manifest(signed.manifest)
            if (offer.name, offer.version) != (AGENT, manifest.serial):
                raise ConfigError(f"{offer.name[:64]}/{offer.version} is offered with the manifest of another version")
            self._serials[manifest.version] = manifest.serial
            if self.own.home is None:
                raise ConfigError(NOT_HERE)
            await self._read_record()
            wanted = _wanted(offer, manifest)
            if self._is_settled(wanted):
                self._tell(None)
                return
            build = find_build(manifest, self.own.arch, self.own.python)
            self._tell(self._standing(offer, "offered"))
            await self._fetch(offer, build, manifest.version)
            await self.download.worker(self._want, write_signed(signed), wanted)
            log.info("version %s is here, and root's half is told", manifest.version)
            self._tell(self._standing(offer, "fetched"))
        except (FieldFleetError, OSError, ValueError) as error:
            log.warning("agent %d is refused: %s", offer.version, error)
            self._tell(self._standing(offer, "refused", str(error)[:500]))
        else:
            await self._insist(wanted)

    async def _insist(self, wanted: Wanted) -> None:
        """Write a wish anew, ever less often, until root's record is of it."""
        pause_s = INSIST_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_INSIST_S)
            try:
                await self._read_record()
                if is_done(self._record, wanted, self.own.version):
                    return
                await self.download.worker(self._want, b"", wanted)
            except (FieldFleetError, OSError) as error:
                log.warning("upgrade: %s", error)

    def _is_settled(self, wanted: Wanted) -> bool:
        """Tell whether a wish is the version that runs already, or what root's record is of.

        Raises:
            ConfigError: Somebody at the board took another version in its place.
        """
        runs_it = wanted.version == self.own.version and self._record.state != "trial"
        if wanted == self._record.passed_over and wanted.version not in (self.own.version, self._record.to):
            raise ConfigError(PASSED_OVER)
        return runs_it or is_done(self._record, wanted, self.own.version)

    def _standing(self, offer: Offer, state: str, reason: str = "") -> ModelStatus:
        return ModelStatus(
            name=AGENT,
            candidate=offer.version,
            state=state,
            deployment=offer.deployment,
            attempt=offer.attempt,
            reason=reason,
        )

    def _tell(self, pending: ModelStatus | None) -> None:
        self._pending = pending
        self._changed.set()

    async def _fetch(self, offer: Offer, build: Build, version: str) -> None:
        """Bring this board's package into the folder of upgrades, unless it is there.

        Raises:
            WireError: What came was not what it should be, every time.
            Unwritable: The disk takes nothing more.
        """
        worker = self.download.worker
        place = (await worker(open_folder, self.state_dir)) / f"{version}.deb"
        for _ in range(ATTEMPTS):
            if await worker(_is_whole, place, build):
                return
            bundle = await self._ask(offer, build)
            path, _ = await self.download.receive(bundle.params, f"agent {version}", shared=bundle.shared)
            await worker(_move, path, place)
        if not await worker(_is_whole, place, build):
            await worker(place.unlink)
            raise WireError(f"{build.file} was damaged {ATTEMPTS} times", reason="digest")

    async def _ask(self, offer: Offer, build: Build) -> Bundle:
        """Say what lacks until somebody says where it is to be had."""
        place = self.download
        word = Lacks(device=place.device, deployment=offer.deployment, parts=(bytes.fromhex(build.sha256),))
        name = topic(place.site, place.device, "lacks")
        self._bundle = None

        def bundle() -> Bundle | None:
            found = self._bundle
            return found if found and (found.deployment, found.params.size) == (offer.deployment, build.size) else None

        return await ask(lambda: place.transport.publish(name, wire.encode(word)), self._answered, bundle)

    def _want(self, signed: bytes, wanted: Wanted) -> None:
        """Say durably which version is wanted, and who vouches for it; the wish is written last."""
        folder = open_folder(self.state_dir)
        if signed:
            replace_file(folder / f"{wanted.version}.json", signed, mode=PRIVATE)
            for path in folder.glob("*.deb"):
                if path.name != f"{wanted.version}.deb":
                    path.unlink(missing_ok=True)
                    path.with_suffix(".json").unlink(missing_ok=True)
        replace_file(folder / WANTED, msgspec.json.encode(wanted), mode=PRIVATE)

    async def _withdraw(self, word: Withdraw) -> None:
        """Fetch no more of a version, and take back the wish for it; go back from it where that is asked for."""
        self._tell(None)
        if self.own.home is None:
            return
        try:
            await self._read_record()
            wanted = self._wish_against(word, await self.download.worker(AgentFolder(self.state_dir).wanted))
            if wanted is None:
                return
            await self.download.worker(self._want, b"", wanted)
        except (FieldFleetError, OSError, ValueError) as error:  # ValueError: there is no version before
            log.warning("upgrade: %s", error)
        else:
            await self._insist(wanted)

    def _wish_against(self, word: Withdraw, wish: Wanted | None) -> Wanted | None:
        """Return what root's half is told of a version that was withdrawn; None where it has nothing to do with it.

        Raises:
            ValueError: There is no version to go back to.
        """
        record = self._record
        is_its = record.deployment == word.deployment and self._serial(record.to) == word.version
        if is_its and record.state in ("trial", "committed"):
            goal = record.from_ if record.state == "trial" else record.previous
            attempt = max(1, record.attempt)
            return Wanted(version=goal, deployment=word.deployment, attempt=attempt) if word.back else None
        if wish is None or wish.deployment != word.deployment:
            return None
        is_seen_to = is_done(record, wish, self.own.version) and record.state not in PENDING
        return None if is_seen_to else msgspec.structs.replace(wish, version=self.own.version)

    async def _read_record(self) -> None:
        found = await self.download.worker(self.own.record)
        if found != self._record:
            self._record = found
            self._changed.set()

    async def _looking(self) -> None:
        """Look at root's record while the agent runs."""
        while True:
            try:
                await self._read_record()
            except (ConfigError, CorruptFile, OSError) as error:
                log.debug("upgrade: %s", error)
            await asyncio.sleep(self.look_s)

    async def _announcing(self) -> None:
        place = self.download
        await announce(place.transport, topic(place.site, place.device, "agent"), self._changed, self._releases)

    async def _releases(self) -> Releases:
        return Releases(device=self.download.device, instance=self.instance, models=(self.status(),))

    def status(self) -> ModelStatus:
        """Return what this board is at: by root's record, or with an offer that this has nothing of yet."""
        record, pending = self._record, self._pending
        running = record.from_ if record.state == "trial" else self.own.version
        known = ModelStatus(
            name=AGENT,
            committed=self._serial(running),
            previous=self._serial(record.previous) or UNCOUNTED * bool(record.previous),
            candidate=self._serial(record.to),
            state="" if record.state == "none" else record.state,
            deployment=record.deployment,
            attempt=record.attempt,
            reason=record.reason,
        )
        is_roots = pending is None or (record.deployment, record.attempt) == (pending.deployment, pending.attempt)
        if pending is None or (is_roots and pending.state == "fetched"):
            return known
        return msgspec.structs.replace(pending, committed=known.committed, previous=known.previous)

    def _serial(self, version: str) -> int:
        return self._record.serials.get(version, self._serials.get(version, 0)) if version else 0


def _wanted(offer: Offer, manifest: PackageManifest) -> Wanted:
    probation_s = min(max(offer.soak_s, 1.0), MOST_PROBATION_S)
    return Wanted(
        version=manifest.version, deployment=offer.deployment, attempt=max(1, offer.attempt), probation_s=probation_s
    )


def _is_whole(path: Path, build: Build) -> bool:
    return path.is_file() and path.stat().st_size == build.size and sha256_of(path.read_bytes()) == build.sha256


def _move(path: Path, place: Path) -> None:
    path.chmod(PRIVATE)
    sync(path)
    path.replace(place)
    sync(place.parent)
