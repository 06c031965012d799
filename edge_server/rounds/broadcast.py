"""Multicast of a model payload: shared frames for the group, unicast for stragglers.

A piece is a run of blocks, (start, stop), that is sent as one frame. Every member of the group requests pieces on its
own; a piece is sent once to all as soon as each member has requested it. A member that delays the others is told to
leave and is served alone from then on, at its own pace. So the bytes sent do not grow with the fleet, and the fleet
does not wait for its slowest link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import TypeVar

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Leave, Transfer, Want
from shared.protocol.topics import EVERYONE, topic
from shared.runtime.clock import Clock
from shared.runtime.token_bucket import TokenBucket
from shared.transfer.sender import PieceQueue, Sender
from shared.transport.base import Transport

T = TypeVar("T", bound=Mapping[str, object])

ALL = ""
"""Audience of a piece that is sent to the whole group."""

log = logging.getLogger(__name__)
RETRY_S = 0.5
COPIES, MORE_BYTES, MORE_PER_S = 4, float(8 << 20), float(1 << 20)
"""Request budget of one device: copies of the payload and bytes at once, and bytes per second after that. A link that
loses every other frame needs less; endless requests would take server time and bandwidth from other devices.
"""


@dataclass
class _Member:
    """Requests of one device: pending and served pieces, and the highest block requested."""

    pending: PieceQueue = field(default_factory=PieceQueue)
    served: set[int] = field(default_factory=set)
    reached: int = -1

    def ready(self, start: int) -> bool:
        """Return true if the piece at `start` may be sent to the group without being too early for this member."""
        return start in self.pending or start in self.served or self.reached > start


class Fanout:
    """Scheduler of one payload's pieces: what to send next, and to whom. It does no IO and takes the time as input.

    Args:
        group: Devices on the shared topic; all others are served alone.
        patience_s: Seconds that one member may delay the group.
    """

    def __init__(self, group: Iterable[str], *, patience_s: float) -> None:
        self._group = {device: _Member() for device in group}
        self._alone: dict[str, _Member] = {}
        self._patience_s = patience_s
        self._asked_at: dict[int, float] = {}
        self._cycle_s = 0.0
        self._last_sent_at: float | None = None

    def want(self, device: str, pieces: Iterable[tuple[int, int]], now: float) -> None:
        """Add a device's request.

        Args:
            pieces: Runs of blocks, (start, stop).
            now: The server's clock, in seconds.
        """
        member = self._group.get(device) or self._alone.setdefault(device, _Member())
        replaced = False
        for start, stop in pieces:
            replaced |= member.pending.add(start, stop)
            if start not in member.pending:
                break  # a full window is pending; the device requests again
            member.served.discard(start)
            member.reached = max(member.reached, start)
            if device in self._group:
                self._asked_at.setdefault(start, now)
        if replaced:
            self._forget_unwanted()

    def in_group(self, device: str) -> bool:
        """Return true if a device is served on the shared topic."""
        return device in self._group

    def drop(self, device: str) -> None:
        """Forget a device that disconnected or has the whole payload."""
        self._group.pop(device, None)
        self._alone.pop(device, None)
        self._forget_unwanted()

    def due(self, now: float) -> list[tuple[tuple[int, int], str]]:
        """Return the (piece, audience) pairs to send now, in order; an audience is `ALL` or one device.

        Devices that are served alone take turns, so that none waits for another's whole request.
        """
        turns = [[(piece, device) for piece in member.pending.take()] for device, member in self._alone.items()]
        sends = [send for turn in zip_longest(*turns) for send in turn if send]
        for start in sorted(self._asked_at):
            if not all(member.ready(start) for member in self._group.values()):
                break
            receivers = {device: member for device, member in self._group.items() if start in member.pending}
            audience = next(iter(receivers)) if len(receivers) == 1 and len(self._group) > 1 else ALL
            sends.append(((start, max(member.pending.pop(start) for member in receivers.values())), audience))
            for member in receivers.values():
                member.served.add(start)
            del self._asked_at[start]
            if self._last_sent_at is not None:
                self._cycle_s = max(now - self._last_sent_at, self._cycle_s / 2)
            self._last_sent_at = now
        return sends

    def patience_left_s(self, now: float) -> float | None:
        """Return the seconds until a member has waited too long; None while none waits."""
        if not self._asked_at:
            return None
        limit = max(self._patience_s, self._cycle_s / 2)
        return max(0.0, min(self._asked_at.values()) + limit - now)

    def remove_laggards(self, now: float) -> list[str]:
        """Remove members too far behind or ahead from the group; return them, they must be told to leave.

        Their requests are dropped: they request again after leaving.
        """
        if self.patience_left_s(now) != 0.0:
            return []
        start = min(self._asked_at)
        slow = [device for device, member in self._group.items() if not member.ready(start)]
        ahead = [device for device, member in self._group.items() if start in member.pending]
        leavers = slow if len(slow) <= len(ahead) else ahead  # a device far ahead must not split the group
        for device in leavers:
            self.leave(device)
        return leavers

    def leave(self, device: str) -> None:
        """Serve a member alone from now on; its requests are dropped."""
        del self._group[device]
        self._alone[device] = _Member()
        self._forget_unwanted()

    def _forget_unwanted(self) -> None:
        """Drop pieces that only removed members had requested."""
        if not self._asked_at:
            return
        pending = set().union(*(member.pending for member in self._group.values()))
        self._asked_at = {start: since for start, since in self._asked_at.items() if start in pending}


def make_request_budget(now: float) -> TokenBucket:
    """Return the budget of the bytes that one device may request, over consecutive payloads."""
    return TokenBucket(MORE_BYTES, MORE_PER_S, MORE_BYTES, now)


def add_payload(budget: TokenBucket, size: int, now: float) -> None:
    """Add the allowance of a further payload of `size` bytes to a device's budget."""
    budget.refill(now)
    budget.most = COPIES * size + MORE_BYTES
    budget.give(COPIES * size)


@dataclass
class Outgoing:
    """One payload and its audience; frames are cut from the tensors when they are sent.

    Attributes:
        channel: Topic channel of the frames.
        group: Devices that are expected to request it, and share frames on the common topic; None for all. Those that
            never request it would delay the others.
        bytes_sent: Bytes handed to the broker.
    """

    site: str
    transport: Transport
    clock: Clock
    devices: Sequence[str]
    sender: Sender
    patience_s: float
    group: Sequence[str] | None = None
    bytes_sent: int = 0
    channel: str = "model"
    _fanout: Fanout = field(init=False)
    _leavers: list[str] = field(default_factory=list)
    _budgets: dict[str, TokenBucket] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.group = self.devices if self.group is None else self.group
        self._fanout = Fanout(self.group, patience_s=self.patience_s)

    @property
    def transfer(self) -> Transfer:
        """Size, digest and framing of the payload, as sent to devices."""
        return self.sender.transfer

    @property
    def digest(self) -> bytes:
        """Digest of the payload, by which devices request it."""
        return self.transfer.digest

    @cached_property
    def content(self) -> bytes:
        """Copy of the payload, for tasks that carry it; only for small ones."""
        return b"".join(self.sender.source.read(0, self.transfer.size))

    @property
    def is_shared(self) -> bool:
        """True if frames are sent on the common topic."""
        return len(self.group or ()) > 1

    def want(self, device: str, want: Want) -> None:
        """Add a device's request.

        Raises:
            WireError: It requests blocks that do not exist.
        """
        if device not in self.devices:
            return
        pieces = self.sender.pieces(want, self.transport.max_payload_bytes)
        if not self._may_ask(device, sum(stop - start for start, stop in pieces) * BLOCK_BYTES):
            return  # an honest device requests again
        if self.is_shared and self._fanout.in_group(device) and not all(map(self._is_common, pieces)):
            self._fanout.leave(device)
            self._leavers.append(device)
        else:
            self._fanout.want(device, pieces, self.clock())
        self._wake.set()

    def _may_ask(self, device: str, size: int) -> bool:
        """Charge requested blocks to the device's budget; return false if they exceed it."""
        now = self.clock()
        if device not in self._budgets:
            self._budgets[device] = make_request_budget(now)
            add_payload(self._budgets[device], self.transfer.size, now)
        return self._budgets[device].take(size, now)

    def _is_common(self, piece: tuple[int, int]) -> bool:
        """Return true if a piece has the boundaries that every group member uses."""
        start, stop = piece
        frame = self.sender.largest_frame(self.transport.max_payload_bytes) // BLOCK_BYTES
        return start % frame == 0 and (stop == start + frame or stop == self.transfer.blocks)

    def dismiss(self, device: str) -> None:
        """Stop serving a device that has the whole payload or disconnected."""
        self._fanout.drop(device)
        self._wake.set()

    async def run(self) -> None:
        """Send requested pieces until cancelled."""
        while True:
            self._wake.clear()
            for (start, stop), audience in self._fanout.due(self.clock()):
                await self._send(start, stop, audience)
            while self._leavers:
                await self._dismiss_from_group(self._leavers.pop())
            try:
                async with asyncio.timeout(self._fanout.patience_left_s(self.clock())):
                    await self._wake.wait()
            except TimeoutError:
                self._leavers += self._fanout.remove_laggards(self.clock())

    async def _send(self, start: int, stop: int, audience: str) -> None:
        everyone = audience == ALL and self.is_shared
        receiver = EVERYONE if everyone else audience or (self.group or self.devices)[0]
        frame = self.sender.frame(start, stop)
        try:
            await self.transport.publish(topic(self.site, receiver, self.channel), frame, assured=False)
            self.bytes_sent += len(frame)
        except Unreachable as error:
            log.debug("block %d not sent, the device requests it again: %s", start, error)
            await asyncio.sleep(RETRY_S)

    async def _dismiss_from_group(self, device: str) -> None:
        log.info("device %s delays the group and is served alone", device)
        leave = wire.encode(Leave(digest=self.digest))
        try:
            await self.transport.publish(topic(self.site, device, self.channel), leave)
        except Unreachable as error:
            log.debug("leave message not sent: %s", error)


def group_audiences(trees: Mapping[str, T]) -> list[tuple[T, list[str]]]:
    """Group devices whose trees share the same leaves; each group shares one transmission."""
    groups: dict[tuple[tuple[str, int], ...], tuple[T, list[str]]] = {}
    for device, tree in sorted(trees.items()):
        key = tuple((name, id(leaf)) for name, leaf in sorted(tree.items()))
        groups.setdefault(key, (tree, []))[1].append(device)
    return list(groups.values())
