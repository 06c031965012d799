"""A payload on its way to the devices that ask for it.

Which piece of a common payload goes out next, and to whom. Knows no bytes, no sockets and takes its time as input.

A piece is a run of blocks, (start, stop), that goes out as a frame; members of the group ask for the same pieces.
Every member asks for them on its own; a piece goes out once to all as soon as each member has asked for it. A member
that keeps the others waiting is told to leave, and is served alone from then on, at its own pace. So the sender's
bytes do not grow with the fleet, and the fleet does not wait for its slowest link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Leave, Transfer, Want
from shared.protocol.topics import EVERYONE, topic
from shared.runtime.clock import Clock
from shared.transfer.sender import Sender, WaitingPieces
from shared.transport.base import Transport

T = TypeVar("T", bound=Mapping[str, object])

ALL = ""
"""The audience that is every member at once."""

log = logging.getLogger(__name__)
RETRY_S = 0.5


@dataclass
class _Member:
    """One device: what it waits for, and how far it has asked."""

    waiting: WaitingPieces = field(default_factory=WaitingPieces)
    served: set[int] = field(default_factory=set)
    reached: int = -1

    def ready(self, start: int) -> bool:
        """Tell whether sending the piece at `start` to all now would not come too early for this member."""
        return start in self.waiting or start in self.served or self.reached > start


class Fanout:
    """The state of one payload on its way to several devices.

    Args:
        group: Devices expected on the shared topic; others are served alone.
        patience_s: Seconds that one member may keep the others waiting.
    """

    def __init__(self, group: Iterable[str], *, patience_s: float) -> None:
        self._group = {device: _Member() for device in group}
        self._alone: dict[str, _Member] = {}
        self._patience_s = patience_s
        self._asked_at: dict[int, float] = {}
        self._cycle_s = 0.0
        self._last_sent_at: float | None = None

    def want(self, device: str, pieces: Iterable[tuple[int, int]], now: float) -> None:
        """Note what a device asks for.

        Args:
            pieces: Runs of blocks, (start, stop).
            now: The server's clock, in seconds.
        """
        member = self._group.get(device) or self._alone.setdefault(device, _Member())
        replaced = False
        for start, stop in pieces:
            replaced |= member.waiting.add(start, stop)
            if start not in member.waiting:
                break  # a window of them waits already; the device will ask again
            member.served.discard(start)
            member.reached = max(member.reached, start)
            if device in self._group:
                self._asked_at.setdefault(start, now)
        if replaced:
            self._forget_unwanted()

    def in_group(self, device: str) -> bool:
        """Tell whether a device is served together with others."""
        return device in self._group

    def drop(self, device: str) -> None:
        """Forget a device that went away or has everything."""
        self._group.pop(device, None)
        self._alone.pop(device, None)
        self._forget_unwanted()

    def due(self, now: float) -> list[tuple[tuple[int, int], str]]:
        """Return (piece, audience) pairs to send now, in order; audience `ALL` or one device.

        Devices that are served alone take turns, so that none waits for all that another asks for.
        """
        turns = [[(piece, device) for piece in member.waiting.take()] for device, member in self._alone.items()]
        sends = [send for turn in zip_longest(*turns) for send in turn if send]
        for start in sorted(self._asked_at):
            if not all(member.ready(start) for member in self._group.values()):
                break
            waiting = {device: member for device, member in self._group.items() if start in member.waiting}
            audience = next(iter(waiting)) if len(waiting) == 1 and len(self._group) > 1 else ALL
            sends.append(((start, max(member.waiting.pop(start) for member in waiting.values())), audience))
            for member in waiting.values():
                member.served.add(start)
            del self._asked_at[start]
            if self._last_sent_at is not None:
                self._cycle_s = max(now - self._last_sent_at, self._cycle_s / 2)
            self._last_sent_at = now
        return sends

    def patience(self, now: float) -> float | None:
        """Return the seconds until somebody has waited too long; None while nobody waits."""
        if not self._asked_at:
            return None
        limit = max(self._patience_s, self._cycle_s / 2)
        return max(0.0, min(self._asked_at.values()) + limit - now)

    def laggards(self, now: float) -> list[str]:
        """Move members too far behind the others, or ahead, out of the group; return those to be told to leave.

        What they had asked for is forgotten: they ask anew when they have left.
        """
        if self.patience(now) != 0.0:
            return []
        start = min(self._asked_at)
        slow = [device for device, member in self._group.items() if not member.ready(start)]
        ahead = [device for device, member in self._group.items() if start in member.waiting]
        leavers = slow if len(slow) <= len(ahead) else ahead  # who resumes far ahead must not break up the others
        for device in leavers:
            self.leave(device)
        return leavers

    def leave(self, device: str) -> None:
        """Serve a member alone from now on; what it had asked for is forgotten."""
        del self._group[device]
        self._alone[device] = _Member()
        self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        """Let nobody wait for, and nothing go out for, a piece that only leavers had asked for."""
        if not self._asked_at:
            return
        wanted = set().union(*(member.waiting for member in self._group.values()))
        self._asked_at = {start: since for start, since in self._asked_at.items() if start in wanted}


COPIES, MORE_BYTES, MORE_PER_S = 4, float(8 << 20), float(1 << 20)
"""What one device may ask for: so many copies of the payload and so many bytes at once, and so many for ever. A link
that loses every other frame takes less; one that asks without end would take the server's time and line from others."""


class WishBudget:
    """What one device may ask for, of one payload or of one after the other.

    Args:
        now: Seconds.
    """

    def __init__(self, now: float) -> None:
        self._most = self._left = MORE_BYTES
        self._since = now

    def begin(self, size: int, now: float) -> None:
        """Note that there is another payload of so many bytes to ask for."""
        self._refill(now)
        self._most = COPIES * size + MORE_BYTES
        self._left = min(self._most, self._left + COPIES * size)

    def take(self, size: int, now: float) -> bool:
        """Count bytes that are asked for; tell whether they are no more than anybody needs."""
        self._refill(now)
        may = self._left >= size
        self._left -= size * may
        return may

    def _refill(self, now: float) -> None:
        self._left, self._since = min(self._most, self._left + MORE_PER_S * (now - self._since)), now


@dataclass
class Outgoing:
    """One payload and its audience; frames are cut from the tensors themselves when they are sent.

    Attributes:
        sender: What devices ask for.
        shared: Whether there is more than one device, so that frames go to all at once.
        channel: On which the frames go.
        alone: Whether each device is served by itself: of what few lack, most never ask.
        bytes_sent: Bytes handed to the broker.
    """

    site: str
    transport: Transport
    clock: Clock
    devices: Sequence[str]
    sender: Sender
    patience_s: float
    alone: bool = False
    bytes_sent: int = 0
    channel: str = "model"
    _fanout: Fanout = field(init=False)
    _leavers: list[str] = field(default_factory=list)
    _budgets: dict[str, WishBudget] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Expect every device on the shared topic, unless they are served alone."""
        self._fanout = Fanout(() if self.alone else self.devices, patience_s=self.patience_s)

    @property
    def transfer(self) -> Transfer:
        """What devices are told of the payload."""
        return self.sender.transfer

    @property
    def digest(self) -> bytes:
        """Digest of the payload, by which devices ask for it."""
        return self.transfer.digest

    @property
    def shared(self) -> bool:
        """Whether the frames go out on the topic common to all."""
        return len(self.devices) > 1 and not self.alone

    def want(self, device: str, want: Want) -> None:
        """Note what a device asks for.

        Raises:
            WireError: It asks for frames that do not exist.
        """
        if device not in self.devices:
            return
        pieces = self.sender.pieces(want, self.transport.max_payload_bytes)
        if not self._may_ask(device, sum(stop - start for start, stop in pieces) * BLOCK_BYTES):
            return  # an honest device asks again
        if self.shared and self._fanout.in_group(device) and not all(map(self._is_common, pieces)):
            self._fanout.leave(device)
            self._leavers.append(device)
        else:
            self._fanout.want(device, pieces, self.clock())
        self._wake.set()

    def _may_ask(self, device: str, size: int) -> bool:
        """Count what a device asks for; tell whether that is no more than anybody needs."""
        now = self.clock()
        if device not in self._budgets:
            self._budgets[device] = WishBudget(now)
            self._budgets[device].begin(self.transfer.size, now)
        return self._budgets[device].take(size, now)

    def _is_common(self, piece: tuple[int, int]) -> bool:
        """Tell whether a piece is one that every member of the group asks for."""
        start, stop = piece
        frame = self.sender.largest_frame(self.transport.max_payload_bytes) // BLOCK_BYTES
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
        frame = self.sender.frame(start, stop)
        try:
            await self.transport.publish(topic(self.site, receiver, self.channel), frame, assured=False)
            self.bytes_sent += len(frame)
        except Unreachable as error:
            log.debug("block %d not sent, it will be asked for again: %s", start, error)
            await asyncio.sleep(RETRY_S)

    async def _dismiss_from_group(self, device: str) -> None:
        log.info("device %s keeps the others waiting, serving it alone", device)
        leave = wire.encode(Leave(digest=self.digest))
        try:
            await self.transport.publish(topic(self.site, device, self.channel), leave)
        except Unreachable as error:
            log.debug("not told to leave: %s", error)


def audiences(trees: Mapping[str, T]) -> list[tuple[T, list[str]]]:
    """Group devices whose trees are of the very same leaves; each group shares one transmission."""
    groups: dict[tuple[tuple[str, int], ...], tuple[T, list[str]]] = {}
    for device, tree in sorted(trees.items()):
        key = tuple((name, id(leaf)) for name, leaf in sorted(tree.items()))
        groups.setdefault(key, (tree, []))[1].append(device)
    return list(groups.values())
