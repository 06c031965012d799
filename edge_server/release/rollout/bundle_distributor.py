"""Bundle distributor: sends missing release parts to boards.

Boards that miss the same parts share one bundle.
"""

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
"""Time that the first request waits for those of other boards that were offered the release."""
MAX_BUNDLES = 64
"""Limit of concurrent bundles; each distinct set of missing parts needs one."""


def open_bundle(stored: StoredRelease | StoredAgent, lacking: Lacking, frame_bytes: int) -> Sender:
    """Open the missing parts as one payload, memory-mapped from their files.

    Args:
        frame_bytes: Most payload bytes in one frame.

    Raises:
        WireError: The release has no such part.
        CorruptFile: A file of the release does not match its manifest.
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
            raise CorruptFile(f"release {manifest.reference}: its parameter file does not match its manifest")
        offsets = tensor_places(data[LENGTH_BYTES:size])
        places[HEADER] = data[:size]
        for tensor in manifest.tensors:
            start, stop = offsets.get(tensor.name, (0, 0))
            places[tensor.sha256] = data[size + start : size + stop]
    parts = [places[piece.sha256] if piece.sha256 in places else view(stored.path(piece.sha256)) for piece in pieces]
    for piece, part in zip(pieces, parts, strict=True):
        if part.nbytes != piece.size:
            raise CorruptFile(f"release {manifest.reference}: part {piece.sha256[:12]} does not match its manifest")
    return Sender.of_parts(parts, frame_bytes)


@dataclass
class _Shipment:
    """A bundle being sent, and the boards that still receive it."""

    outgoing: Outgoing
    devices: set[str]
    task: asyncio.Task[None]


@dataclass
class BundleDistributor:
    """Sends the bundles of a rollout.

    Attributes:
        clock: Clock in monotonic seconds.
        frame_bytes: Payload bytes in one frame.
        patience_s: Seconds that one board may delay the others that receive the same bundle.
        expected: Returns the online boards that may still request parts.
        sent: Called for each finished bundle with its boards, its size and the bytes handed to the broker.
        channel: Channel on which bundles are announced to boards.
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
    _asked_at: dict[str, float] = field(default_factory=dict)
    _shipments: dict[str, _Shipment] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, device: str, lacking: Lacking) -> None:
        """Register the parts that a board lacks; the bundle is announced to it once ready.

        Raises:
            WireError: The release has no such part.
        """
        bundle_pieces(self.stored.manifest, lacking)
        if device in self._shipments and self._lacking.get(device) != lacking:
            self.forget(device)
        self._lacking[device] = lacking
        self._asked_at.setdefault(device, self.clock())
        self._wake.set()

    def wanted_bytes(self, device: str) -> int:
        """Return the bytes that a board lacks; the size of the release if it has not reported them."""
        manifest = self.stored.manifest
        if (lacking := self._lacking.get(device)) is None:
            return sum(part.size for part in manifest.parts.values())
        return sum(piece.size for piece in bundle_pieces(manifest, lacking))

    def want(self, device: str, want: Want) -> None:
        """Pass a request for frames to the bundle that it refers to."""
        shipment = self._shipments.get(device)
        if shipment and shipment.outgoing.digest == want.digest:
            shipment.outgoing.want(device, want)

    def forget(self, device: str) -> None:
        """Stop sending to a board."""
        self._lacking.pop(device, None)
        self._asked_at.pop(device, None)
        if shipment := self._shipments.pop(device, None):
            shipment.outgoing.dismiss(device)
            shipment.devices.discard(device)
            if not shipment.devices:
                self._end(shipment)

    def _end(self, shipment: _Shipment) -> None:
        shipment.task.cancel()
        outgoing = shipment.outgoing
        self.sent(tuple(outgoing.devices), outgoing.transfer.size, outgoing.bytes_sent)

    async def run(self) -> None:
        """Send bundles until cancelled."""
        try:
            while True:
                self._wake.clear()
                for lacking, devices in self._due().items():
                    await self._ship(lacking, devices)
                for device in [device for device in self._asked_at if device in self._shipments]:
                    del self._asked_at[device]
                    await self._announce(device)
                try:
                    async with asyncio.timeout(self._remaining_s()):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = {shipment.task for shipment in self._shipments.values()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _pending_devices(self) -> list[str]:
        """Return the boards whose request has no bundle yet."""
        return [device for device in self._asked_at if device not in self._shipments]

    def _remaining_s(self) -> float | None:
        unserved = self._pending_devices()
        return (
            max(0.01, min(self._asked_at[device] for device in unserved) + GATHER_S - self.clock())
            if unserved
            else None
        )

    def _due(self) -> dict[Lacking, list[str]]:
        """Group the boards to serve now by missing parts, after waiting up to `GATHER_S` for further requests."""
        if not (unserved := self._pending_devices()):
            return {}
        others = self.expected() - self._lacking.keys()
        if others and min(self._asked_at[device] for device in unserved) + GATHER_S > self.clock():
            return {}
        groups: dict[Lacking, list[str]] = {}
        for device in sorted(unserved):
            groups.setdefault(self._lacking[device], []).append(device)
        return groups

    async def _ship(self, lacking: Lacking, devices: list[str]) -> None:
        if len({id(shipment) for shipment in self._shipments.values()}) >= MAX_BUNDLES:
            for device in devices:
                self._asked_at[device] = self.clock()  # retried once another bundle is finished
            return
        try:
            sender = await self.worker(open_bundle, self.stored, lacking, self.frame_bytes)
        except (CorruptFile, WireError, OSError) as error:
            log.error("cannot send release parts: %s", error)  # noqa: TRY400 - the message states the cause
            for device in devices:
                self._asked_at.pop(device, None)
                self._lacking.pop(device, None)
            return
        devices = [device for device in devices if self._lacking.get(device) == lacking]
        if not devices:
            return
        outgoing = Outgoing(*(self.site, self.transport, self.clock, devices, sender, self.patience_s), channel="parts")
        task = asyncio.create_task(outgoing.run(), name="parts")
        shipment = _Shipment(outgoing, set(devices), task)
        self._shipments |= dict.fromkeys(devices, shipment)
        log.info("parts of %d bytes for %s", sender.transfer.size, ", ".join(devices))

    async def _announce(self, device: str) -> None:
        outgoing = self._shipments[device].outgoing
        bundle = Bundle(deployment=self.deployment, params=outgoing.transfer, shared=outgoing.shared)
        try:
            await self.transport.publish(topic(self.site, device, self.channel), wire.encode(bundle))
        except Unreachable as error:
            log.debug("bundle not announced, %s will ask again: %s", device, error)
