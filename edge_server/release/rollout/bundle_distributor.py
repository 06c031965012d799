"""Bundle distributor: sends missing release parts to boards.

Boards that miss the same parts share one bundle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from edge_server.journal.rollouts.file import PartsSent
from edge_server.release.rollout.agents import StoredAgent
from edge_server.release.rollout.link import RolloutLink
from edge_server.release.rollout.record_log import RecordLog
from edge_server.release.store import StoredRelease
from edge_server.rounds.broadcast import Outgoing
from shared.errors import CorruptFile, WireError
from shared.protocol.inference.bundle import HEADER, LENGTH_BYTES, Lacking, bundle_pieces, header_bytes, tensor_places
from shared.protocol.inference.rollout import Bundle
from shared.protocol.messages import Message, Want
from shared.runtime.clock import utc_stamp
from shared.transfer.sender import Sender
from shared.transfer.to_file import view

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
        log: Records each finished bundle.
        expected: Returns the online boards that may still request parts.
        send: Sends a message to a board; returns False if the broker is unreachable.
    """

    link: RolloutLink
    log: RecordLog
    expected: Callable[[], set[str]]
    send: Callable[[str, Message], Awaitable[bool]]
    _lacking: dict[str, Lacking] = field(default_factory=dict)
    _asked_at: dict[str, float] = field(default_factory=dict)
    _shipments: dict[str, _Shipment] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def deployment(self) -> str:
        """Name of the rollout's deployment."""
        return self.log.state.plan.deployment

    def ask(self, device: str, lacking: Lacking) -> None:
        """Register the parts that a board lacks; the bundle is announced to it once ready.

        Raises:
            WireError: The release has no such part.
        """
        bundle_pieces(self.link.stored.manifest, lacking)
        if device in self._shipments and self._lacking.get(device) != lacking:
            self.forget(device)
        self._lacking[device] = lacking
        self._asked_at.setdefault(device, self.link.clock())
        self._wake.set()

    def wanted_bytes(self, device: str) -> int:
        """Return the bytes that a board lacks; the size of the release if it has not reported them."""
        manifest = self.link.stored.manifest
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
        devices, size = tuple(outgoing.devices), outgoing.transfer.size
        self.log.add(PartsSent(at=utc_stamp(), devices=devices, size=size, sent=outgoing.bytes_sent))

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
            max(0.01, min(self._asked_at[device] for device in unserved) + GATHER_S - self.link.clock())
            if unserved
            else None
        )

    def _due(self) -> dict[Lacking, list[str]]:
        """Group the boards to serve now by missing parts, after waiting up to `GATHER_S` for further requests."""
        if not (unserved := self._pending_devices()):
            return {}
        others = self.expected() - self._lacking.keys()
        if others and min(self._asked_at[device] for device in unserved) + GATHER_S > self.link.clock():
            return {}
        groups: dict[Lacking, list[str]] = {}
        for device in sorted(unserved):
            groups.setdefault(self._lacking[device], []).append(device)
        return groups

    async def _ship(self, lacking: Lacking, devices: list[str]) -> None:
        link = self.link
        if len({id(shipment) for shipment in self._shipments.values()}) >= MAX_BUNDLES:
            for device in devices:
                self._asked_at[device] = self.link.clock()  # retried once another bundle is finished
            return
        try:
            sender = await link.worker(open_bundle, link.stored, lacking, link.frame_bytes)
        except (CorruptFile, WireError, OSError) as error:
            log.error("cannot send release parts: %s", error)  # noqa: TRY400 - the message states the cause
            for device in devices:
                self._asked_at.pop(device, None)
                self._lacking.pop(device, None)
            return
        devices = [device for device in devices if self._lacking.get(device) == lacking]
        if not devices:
            return
        outgoing = Outgoing(*(link.site, link.transport, link.clock, devices, sender, link.patience_s), channel="parts")
        task = asyncio.create_task(outgoing.run(), name="parts")
        shipment = _Shipment(outgoing, set(devices), task)
        self._shipments |= dict.fromkeys(devices, shipment)
        log.info("parts of %d bytes for %s", sender.transfer.size, ", ".join(devices))

    async def _announce(self, device: str) -> None:
        outgoing = self._shipments[device].outgoing
        bundle = Bundle(deployment=self.deployment, params=outgoing.transfer, shared=outgoing.is_shared)
        await self.send(device, bundle)  # if it does not arrive, the board asks again
