"""A payload on its way to the devices that ask for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_server.rounds.fanout import ALL, Fanout
from shared.errors import Unreachable
from shared.protocol import payload, wire
from shared.protocol.messages import BLOCK_BYTES, Leave, Payload, Transfer, Want
from shared.protocol.payload import Scattered
from shared.protocol.topics import EVERYONE, topic
from shared.runtime.clock import Clock
from shared.tensors.tree import Tree
from shared.transfer import frames
from shared.transport.base import Transport

log = logging.getLogger(__name__)

RETRY_S = 0.5


@dataclass
class Outgoing:
    """One payload and its audience; frames are cut from the tensors themselves when they are sent.

    Attributes:
        transfer: What devices ask for.
        shared: Whether there is more than one device, so that frames go to all at once.
        bytes_sent: Bytes handed to the broker.
    """

    site: str
    transport: Transport
    clock: Clock
    devices: Sequence[str]
    transfer: Transfer
    source: Scattered
    patience_s: float
    bytes_sent: int = 0
    _fanout: Fanout = field(init=False)
    _leavers: list[str] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Expect every device on the shared topic."""
        self._fanout = Fanout(self.devices, patience_s=self.patience_s)

    @property
    def shared(self) -> bool:
        """Whether the frames go out on the topic common to all."""
        return len(self.devices) > 1

    def want(self, device: str, want: Want) -> None:
        """Note what a device asks for.

        Raises:
            WireError: It asks for frames that do not exist.
        """
        if device not in self.devices:
            return
        pieces = frames.pieces(want, self.transfer, self._frame_bytes())
        if self.shared and self._fanout.in_group(device) and not all(map(self._is_common, pieces)):
            self._fanout.leave(device)
            self._leavers.append(device)
        else:
            self._fanout.want(device, pieces, self.clock())
        self._wake.set()

    def _frame_bytes(self) -> int:
        return frames.largest_frame(self.transfer.frame_bytes, self.transport.max_payload_bytes)

    def _is_common(self, piece: tuple[int, int]) -> bool:
        """Tell whether a piece is one that every member of the group asks for."""
        start, stop = piece
        frame = self._frame_bytes() // BLOCK_BYTES
        return start % frame == 0 and (stop == start + frame or stop == self.transfer.blocks)

    def dismiss(self, device: str) -> None:
        """Stop waiting for a device that has everything, or is gone."""
        self._fanout.drop(device)
        self._wake.set()

    async def run(self) -> None:
        """Send what is asked for until cancelled."""
        while True:
            self._wake.clear()
            for piece, audience in self._fanout.due(self.clock()):
                await self._send(*piece, audience)
            while self._leavers:
                await self._dismiss_from_group(self._leavers.pop())
            try:
                async with asyncio.timeout(self._fanout.patience(self.clock())):
                    await self._wake.wait()
            except TimeoutError:
                self._leavers += self._fanout.laggards(self.clock())

    async def _send(self, start: int, stop: int, audience: str) -> None:
        everyone = audience == ALL and self.shared
        receiver = EVERYONE if everyone else audience or self.devices[0]
        data = self.source.read(start * BLOCK_BYTES, (stop - start) * BLOCK_BYTES)
        frame = frames.encode(self.transfer, start, data)
        try:
            await self.transport.publish(topic(self.site, receiver, "model"), frame, assured=False)
            self.bytes_sent += len(frame)
        except Unreachable as error:
            log.debug("block %d not sent, it will be asked for again: %s", start, error)
            await asyncio.sleep(RETRY_S)

    async def _dismiss_from_group(self, device: str) -> None:
        log.info("device %s keeps the others waiting, serving it alone", device)
        leave = wire.encode(Leave(digest=self.transfer.digest))
        try:
            await self.transport.publish(topic(self.site, device, "model"), leave)
        except Unreachable as error:
            log.debug("not told to leave: %s", error)


def describe(encoded: Payload, frame_bytes: int) -> tuple[Transfer, Scattered]:
    """Return what devices need to know of a payload, and its bytes in place."""
    parts = payload.pack(encoded)
    source = Scattered(parts)
    return Transfer(digest=payload.digest(parts), size=source.size, frame_bytes=frame_bytes), source


def audiences(trees: dict[str, Tree]) -> list[tuple[Tree, list[str]]]:
    """Group devices that are given the very same leaves; each group shares one transmission."""
    groups: dict[tuple[tuple[str, int], ...], tuple[Tree, list[str]]] = {}
    for device, tree in sorted(trees.items()):
        key = tuple((name, id(leaf)) for name, leaf in sorted(tree.items()))
        groups.setdefault(key, (tree, []))[1].append(device)
    return list(groups.values())
