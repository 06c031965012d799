"""Test boards in memory for rollouts, with a swap decided by a rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.exchange.download import Download
from device_agent.exchange.release_offers import ReleaseOffers
from device_agent.inference.store import BoardStore
from edge_server.release.store import StoredRelease, publish
from shared.protocol import wire
from shared.protocol.inference.release import (
    ParameterSpec,
    Preprocessing,
    ReleaseGraph,
    ReleaseManifest,
    ReleasePart,
    ReleaseSource,
    TensorSpec,
    read_manifest,
    sha256_of,
)
from shared.protocol.messages import Report, Spec, Status
from shared.protocol.topics import topic
from shared.protocol.update import PENDING, NewVersion, UpdateRecord, advance, take_offer
from shared.runtime.executor import background, inline
from shared.transfer.receiver import Policy
from shared.transport.base import Transport

SITE = "lab"


def make_release(data_dir: Path, tensors: dict[str, bytes], name: str = "net") -> StoredRelease:
    """Keep a release of made-up tensors, written as safetensors lays them out.

    Args:
        tensors: Bytes by name.
    """
    offset, entries = 0, dict[str, object]()
    for one, data in tensors.items():
        entries[one] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    parameters = len(header).to_bytes(8, "little") + header + b"".join(tensors.values())
    parts = {sha256_of(data): data for data in (parameters, b"graph" * 50, b"probes" * 20)}
    told = [ReleasePart(sha256=digest, size=len(data)) for digest, data in parts.items()]
    tensor = TensorSpec(name="input", dtype="float32", shape=(-1, 4))
    manifest = ReleaseManifest(
        name=name,
        version=0,
        created="20260101T000000Z",
        model=Spec(name="mlp"),
        source=ReleaseSource(run="run-1", round=3, plan="plan", algorithm=Spec(name="fedavg")),
        graph=ReleaseGraph(part=told[1], input=tensor, output=tensor, parameters=tuple(tensors)),
        parameters=told[0],
        tensors=tuple(
            ParameterSpec(name=one, dtype="U8", shape=(len(data),), sha256=sha256_of(data))
            for one, data in sorted(tensors.items())
        ),
        preprocessing=Preprocessing(),
        probes=told[2],
        opset=17,
        ir_version=8,
    )
    return publish(data_dir, manifest, parts)


@dataclass
class RuleSwap:
    """Takes a release as a rule says: the reason of a refusal, `worse: ...` for a trial that fails, or nothing.

    Attributes:
        announce: Hears of every record, once it is durable.
    """

    store: BoardStore
    rule: Callable[[ReleaseManifest], str]
    announce: Callable[[UpdateRecord], None] = lambda _record: None
    _soaking: set[asyncio.Task[None]] = field(default_factory=set)

    async def accept_offer(self, manifest: bytes, offer: NewVersion) -> UpdateRecord:
        told = read_manifest(manifest, "offer")
        record = self.store.record(told.name)
        if (record.deployment, record.release) == (offer.deployment, offer.release):
            self.announce(record)
            return record
        if record.phase in PENDING:
            record = advance(record, "superseded", 0.0)
        return self._note(take_offer(record, offer, 0.0), manifest)

    def _note(self, record: UpdateRecord, manifest: bytes | None = None) -> UpdateRecord:
        self.store.write(record, manifest)
        self.announce(record)
        return record

    def resume(self) -> None:
        """Go on with a trial that a power cut ended."""
        for record in map(self.store.record, self.store.names()):
            if record.phase == "trial":
                reason = self.rule(self.store.manifest(record.name, record.candidate))
                self._soaking.add(asyncio.create_task(self._soak(record, reason)))

    async def mark_fetched(self, name: str, deployment: str) -> UpdateRecord:
        record = self.store.record(name)
        manifest = self.store.manifest(name, record.candidate)
        assert record.deployment == deployment
        assert not self.store.parts.missing(manifest)
        record = self._note(advance(record, "fetched", 0.0))
        if (reason := self.rule(manifest)) and not reason.startswith("worse"):
            return self._note(advance(record, "refused", 0.0, reason))
        for event in ("verified", "staged", "switched"):
            record = self._note(advance(record, event, 0.0))
        self._soaking.add(asyncio.create_task(self._soak(record, reason)))
        return record

    async def _soak(self, record: UpdateRecord, reason: str) -> None:
        await asyncio.sleep(record.terms.soak_s)
        if self.store.record(record.name) == record:
            self._note(advance(record, "worse" if reason else "passed", 0.0, reason))

    async def take_back(self, name: str, version: int) -> UpdateRecord:
        record = self.store.record(name)
        if record.candidate != version or record.phase in ("refused", "rolled-back", "superseded"):
            return record
        pending = record.phase in ("offered", "fetched", "verified", "staged")
        return self._note(advance(record, "superseded" if pending else "back", 0.0, "taken back"))

    async def close(self) -> None:
        for task in self._soaking:
            task.cancel()
        await asyncio.gather(*self._soaking, return_exceptions=True)


@dataclass
class SlowTransport:
    """A way to the broker by which each wish for frames takes its time."""

    way: Transport
    seconds: float

    def __getattr__(self, name: str) -> object:
        return getattr(self.way, name)

    async def publish(self, name: str, data: bytes, *, retain: bool = False, assured: bool = True) -> None:
        if self.seconds and not assured:
            await asyncio.sleep(self.seconds)
        await self.way.publish(name, data, retain=retain, assured=assured)


@dataclass
class FieldBoard:
    """One board that can be switched on and off; what it keeps on its disk stays.

    Attributes:
        transport: Its way to the broker.
        profile: Id of its firmware profile.
        rule: See `RuleSwap`.
        runtime: Version of its ONNX Runtime.
        folders: Versions that an operator put there, by name.
        says_each_s: Seconds that it takes over each wish for frames, infinity for one that stalls.
    """

    device: str
    transport: Transport
    folder: Path
    profile: str = "pi-4"
    rule: Callable[[ReleaseManifest], str] = lambda _manifest: ""
    runtime: str = ""
    folders: dict[str, int] = field(default_factory=dict)
    says_each_s: float = 0.0
    session: int = 0
    bytes_fetched: int = 0
    _living: asyncio.Task[None] | None = None

    @property
    def store(self) -> BoardStore:
        """What it keeps."""
        return BoardStore(self.folder, reserve_bytes=0)

    def record(self, name: str = "net") -> UpdateRecord:
        """Return what it is at."""
        return self.store.record(name)

    async def switch_on(self) -> None:
        """Let it be born, say what it is, and take part in rollouts."""
        self.session += 1
        await self._say_status(online=True)
        report = Report(device=self.device, at=float(self.session), board=self.profile, instance=f"i{self.session}")
        await self.transport.publish(topic(SITE, self.device, "report"), wire.encode(report), retain=True)
        self._living = asyncio.create_task(self._live())

    async def switch_off(self) -> None:
        """Cut its power: its will is told, and nothing goes on."""
        if self._living:
            self._living.cancel()
            await asyncio.wait({self._living})
        self._living = None
        await self._say_status(online=False)

    async def _say_status(self, *, online: bool) -> None:
        status = Status(device=self.device, session=self.session, instance=f"i{self.session}", online=online)
        await self.transport.publish(topic(SITE, self.device, "status"), wire.encode(status), retain=True)

    async def _live(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        swap = RuleSwap(self.store, self.rule)
        loop = asyncio.get_running_loop()
        download = Download(
            *(SlowTransport(self.transport, self.says_each_s), SITE, self.device, self.folder, inline, loop.time),
            policy=Policy(16, 2.0, 1 << 30),
            spool="release",
            frames_on="parts",
            wants_on="lacks",
        )
        offers = ReleaseOffers(download, self.store, swap, self.runtime, f"i{self.session}", folders=self.folders)
        swap.announce = offers.announce
        swap.resume()
        try:
            async with background(self._count()):
                await offers.run()
        finally:
            await swap.close()

    async def _count(self) -> None:
        names = (topic(SITE, one, "parts") for one in (self.device, "_all"))
        async with self.transport.subscribe(*names) as inbox:
            async for _, data in inbox:
                self.bytes_fetched += len(data)
