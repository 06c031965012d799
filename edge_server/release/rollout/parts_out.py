"""Parts of a release on their way to the boards that lack them: boards that lack the same share one transmission."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_server.release.rollout.agents import StoredAgent
from edge_server.release.store import StoredRelease
from edge_server.rounds.broadcast import Outgoing
from shared.errors import CorruptFile, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.bundle import HEADER, LENGTH_BYTES, Lacking, bundle_pieces, header_bytes, tensor_places
from shared.protocol.inference.rollout import Bundle
from shared.protocol.messages import Want
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker
from shared.transfer.sender import Sender
from shared.transfer.to_file import view
from shared.transport.base import Transport

log = logging.getLogger(__name__)

GATHER_S = 2.0
"""Seconds for which the first board that asks is kept waiting for others that were offered the release with it."""
MOST_BUNDLES = 64
"""Payloads under way at once: boards that lack different parts need one each."""


def cut_bundle(stored: StoredRelease | StoredAgent, lacking: Lacking, frame_bytes: int) -> Sender:
    """Return what lacks as a payload that is ready to be sent; its bytes stay in their files.

    Args:
        frame_bytes: What of it to put into a frame at most.

    Raises:
        WireError: The release has no such part.
        CorruptFile: A file of it is not as its manifest says.
    """
    manifest = stored.manifest
    pieces = bundle_pieces(manifest, lacking)
    places = dict[str, memoryview]()
    if lacking.header:
        data = view(stored.path(manifest.parameters.sha256))
        size = header_bytes(manifest)
        if (
            data.nbytes != manifest.parameters.size
            or int.from_bytes(data[:LENGTH_BYTES], "little") + LENGTH_BYTES != size
        ):
            raise CorruptFile(f"release {manifest.reference}: its parameters are not as its manifest says")
        offsets = tensor_places(data[LENGTH_BYTES:size])
        places[HEADER] = data[:size]
        for tensor in manifest.tensors:
            start, stop = offsets.get(tensor.name, (0, 0))
            places[tensor.sha256] = data[size + start : size + stop]
    parts = [places[piece.sha256] if piece.sha256 in places else view(stored.path(piece.sha256)) for piece in pieces]
    for piece, part in zip(pieces, parts, strict=True):
        if part.nbytes != piece.size:
            raise CorruptFile(f"release {manifest.reference}: {piece.sha256[:12]} is not as its manifest says")
    return Sender.of_parts(parts, frame_bytes)


@dataclass
class _Shipment:
    """One payload under way."""

    outgoing: Outgoing
    waiting: set[str]
    running: asyncio.Task[None]


@dataclass
class PartsOut:
    """All payloads of a rollout.

    Attributes:
        deployment: Name of the rollout.
        transport: Way to the broker.
        clock: Monotonic seconds.
        frame_bytes: Of a payload in one message.
        patience_s: Seconds that one board may keep the others waiting.
        expected: Returns the boards that are there and were offered the release, and have not all of it yet.
        sent: Is told of each payload that is done with: for whom, its bytes, and those handed to the broker.
        channel: On which boards are told where parts are to be had.
    """

    site: str
    deployment: str
    transport: Transport
    clock: Clock
    worker: Worker
    stored: StoredRelease | StoredAgent
    frame_bytes: int
    patience_s: float
    expected: Callable[[], set[str]]
    sent: Callable[[tuple[str, ...], int, int], None]
    channel: str = "offer"
    _lacking: dict[str, Lacking] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)
    _shipments: dict[str, _Shipment] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, device: str, lacking: Lacking) -> None:
        """Note what a board lacks; it is told where that is to be had.

        Raises:
            WireError: The release has no such part.
        """
        bundle_pieces(self.stored.manifest, lacking)
        if device in self._shipments and self._lacking.get(device) != lacking:
            self.forget(device)
        self._lacking[device] = lacking
        self._asked.setdefault(device, self.clock())
        self._wake.set()

    def wanted_bytes(self, device: str) -> int:
        """Return how many bytes a board is to fetch: what it lacks, or the whole release where it has not said yet."""
        manifest = self.stored.manifest
        if (lacking := self._lacking.get(device)) is None:
            return sum(part.size for part in manifest.parts.values())
        return sum(piece.size for piece in bundle_pieces(manifest, lacking))

    def want(self, device: str, want: Want) -> None:
        """Hand a wish for frames to the payload that it is of."""
        shipment = self._shipments.get(device)
        if shipment and shipment.outgoing.digest == want.digest:
            shipment.outgoing.want(device, want)

    def forget(self, device: str) -> None:
        """Send a board nothing more: it has everything, is gone, or is to take the release no longer."""
        self._lacking.pop(device, None)
        self._asked.pop(device, None)
        if shipment := self._shipments.pop(device, None):
            shipment.outgoing.dismiss(device)
            shipment.waiting.discard(device)
            if not shipment.waiting:
                self._end(shipment)

    def _end(self, shipment: _Shipment) -> None:
        shipment.running.cancel()
        outgoing = shipment.outgoing
        self.sent(tuple(outgoing.devices), outgoing.transfer.size, outgoing.bytes_sent)

    async def run(self) -> None:
        """Give boards what they lack until cancelled."""
        try:
            while True:
                self._wake.clear()
                for lacking, devices in self._due().items():
                    await self._ship(lacking, devices)
                for device in [device for device in self._asked if device in self._shipments]:
                    del self._asked[device]
                    await self._tell(device)
                try:
                    async with asyncio.timeout(self._left_s()):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            running = {shipment.running for shipment in self._shipments.values()}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _fresh(self) -> list[str]:
        """Return the boards that asked and are sent nothing yet."""
        return [device for device in self._asked if device not in self._shipments]

    def _left_s(self) -> float | None:
        fresh = self._fresh()
        return max(0.01, min(self._asked[device] for device in fresh) + GATHER_S - self.clock()) if fresh else None

    def _due(self) -> dict[Lacking, list[str]]:
        """Return who is to be served now, by what they lack: once nobody else is expected to ask, or it is time."""
        if not (fresh := self._fresh()):
            return {}
        others = self.expected() - self._lacking.keys()
        if others and min(self._asked[device] for device in fresh) + GATHER_S > self.clock():
            return {}
        groups: dict[Lacking, list[str]] = {}
        for device in sorted(fresh):
            groups.setdefault(self._lacking[device], []).append(device)
        return groups

    async def _ship(self, lacking: Lacking, devices: list[str]) -> None:
        if len({id(shipment) for shipment in self._shipments.values()}) >= MOST_BUNDLES:
            for device in devices:
                self._asked[device] = self.clock()  # their turn comes when another payload is done with
            return
        try:
            sender = await self.worker(cut_bundle, self.stored, lacking, self.frame_bytes)
        except (CorruptFile, WireError, OSError) as error:
            log.error("nothing can be sent: %s", error)  # noqa: TRY400 - the cause is in its words
            for device in devices:
                self._asked.pop(device, None)
                self._lacking.pop(device, None)
            return
        devices = [device for device in devices if self._lacking.get(device) == lacking]
        if not devices:
            return
        outgoing = Outgoing(*(self.site, self.transport, self.clock, devices, sender, self.patience_s), channel="parts")
        running = asyncio.create_task(outgoing.run(), name="parts")
        shipment = _Shipment(outgoing, set(devices), running)
        self._shipments |= dict.fromkeys(devices, shipment)
        log.info("parts of %d bytes for %s", sender.transfer.size, ", ".join(devices))

    async def _tell(self, device: str) -> None:
        outgoing = self._shipments[device].outgoing
        bundle = Bundle(deployment=self.deployment, params=outgoing.transfer, shared=outgoing.shared)
        try:
            await self.transport.publish(topic(self.site, device, self.channel), wire.encode(bundle))
        except Unreachable as error:
            log.debug("the board will ask again: %s", error)
