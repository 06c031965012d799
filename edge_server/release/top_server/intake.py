"""Bounded receive buffer for feature payloads of collaborative inference requests.

Each device has at most one pending request; a newer one replaces it. A request beyond the limits is refused at once, so
that its device can fall back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.collaborative import TO_DEVICE, TopRequest
from shared.protocol.messages import Room
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Allowance, Policy, Receiver, push_credit
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class PendingRequest:
    """A request whose features are being received or await computation.

    Attributes:
        due: Deadline in monotonic seconds, after which the device stops waiting.
        receiver: Receives the features; None once they are complete.
        features: Encoded features, once complete.
        complete_at: Monotonic seconds at which the features were complete.
    """

    request: TopRequest
    due: float
    receiver: Receiver[MemorySink] | None
    features: memoryview | None = None
    complete_at: float = 0.0

    @property
    def key(self) -> tuple[str, int, bytes]:
        """Identity of the request among those of its device."""
        return self.request.instance, self.request.number, self.request.params.digest


@dataclass
class RequestBuffer:
    """Pending requests of all devices.

    Attributes:
        policy: Receiver settings; `policy.limit` bounds the bytes of one request.
        most_bytes: Limit of feature bytes of all pending requests together.
        most_requests: Limit of pending requests.
        bytes_in: Bytes of all frames received for pending requests.
    """

    site: str
    transport: Transport
    clock: Clock
    policy: Policy
    most_bytes: int
    most_requests: int
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    bytes_in: int = 0
    _paces: dict[str, Pace] = field(default_factory=dict)
    _expected: dict[str, Allowance] = field(default_factory=dict)

    @property
    def pending_bytes(self) -> int:
        """Feature bytes of all pending requests, received or not."""
        return sum(pending.request.params.size for pending in self.pending.values())

    def awaits(self, device: str) -> bool:
        """Check whether a device may send frames: it has a pending request or credit to send ahead."""
        return device in self.pending or (device in self._expected and self._expected[device].take(0))

    async def offer(self, device: str, request: TopRequest) -> None:
        """Accept a request and ask for its features; a repeated offer extends its deadline.

        Raises:
            WireError: The request exceeds a limit; no memory was allocated for it.
        """
        now, before = self.clock(), self.pending.get(device)
        due = now + request.deadline_s
        if before and before.key == (request.instance, request.number, request.params.digest):
            before.due = due
            if before.receiver:
                before.receiver.note_new_offer(request.pushed, now)
                await self._ask(device, before.receiver)
            return
        self.drop(device)
        frames.check_transfer(request.params, limit=self.policy.limit)
        if len(self.pending) >= self.most_requests or self.pending_bytes + request.params.size > self.most_bytes:
            raise WireError(f"{len(self.pending)} requests are being served; try again later", reason="busy")
        pace = self._pace(device)
        receiver = Receiver(request.params, MemorySink, self.policy, pace, now, pushed=request.pushed)
        self.pending[device] = PendingRequest(request, due, receiver)
        await self._ask(device, receiver)

    async def take(self, device: str, data: bytes) -> tuple[bool, PendingRequest | None]:
        """Take a frame; return whether it was useful, and the request if this frame completes it.

        Raises:
            WireError: The frame is damaged or does not fit, or the complete payload does not match its digest.
        """
        frame, pending = frames.decode(data), self.pending.get(device)
        is_expected = device in self._expected and self._expected[device].take(frame.data.nbytes)
        if pending is None or pending.receiver is None or frame.digest != pending.receiver.transfer.digest:
            return is_expected, None  # the frame belongs to a finished or replaced request
        self.bytes_in += len(data)
        is_new = pending.receiver.take(frame, self.clock())
        if not pending.receiver.complete:
            await self._ask(device, pending.receiver)
            return is_new or is_expected, None
        await self._finish(device, pending, pending.receiver)
        return True, pending if pending.features is not None else None

    async def _finish(self, device: str, pending: PendingRequest, receiver: Receiver[MemorySink]) -> None:
        """Finish a complete payload; request it again if its digest does not match.

        Raises:
            WireError: The payload was damaged in every attempt.
        """
        try:
            pending.features = receiver.finish()
        except WireError:
            if receiver.is_hopeless:
                self.drop(device)
                raise
            await self._ask(device, receiver)
        else:
            pending.receiver, pending.complete_at = None, self.clock()

    async def check_requests(self) -> list[str]:
        """Request overdue frames again and drop expired requests; return the devices of dropped requests."""
        now = self.clock()
        late = [device for device, pending in self.pending.items() if pending.receiver and pending.due <= now]
        for device in late:
            self.drop(device)
        for device, pending in list(self.pending.items()):
            if pending.receiver and not pending.receiver.remaining_s(now):
                pending.receiver.time_out(now)
                await self._ask(device, pending.receiver)
        return late

    def drop(self, device: str) -> None:
        """Drop a device's pending request."""
        self.pending.pop(device, None)

    def room(self, device: str) -> Room:
        """Grant a device credit to send the first frames of its next request without being asked."""
        room = push_credit(self._pace(device), self._window)
        self._expect(device).ask((0, room.blocks))
        return room

    @property
    def _window(self) -> int:
        return self.policy.share(sum(1 for pending in self.pending.values() if pending.receiver))

    def _pace(self, device: str) -> Pace:
        if device not in self._paces:
            self._paces[device] = self.policy.pace(self.clock())
        return self._paces[device]

    def _expect(self, device: str) -> Allowance:
        return self._expected.setdefault(device, self.policy.new_allowance())

    async def _ask(self, device: str, receiver: Receiver[MemorySink]) -> None:
        if want := receiver.want(self._window):
            self._expect(device).ask(*want.ranges)
            try:
                await self.transport.publish(topic(self.site, device, TO_DEVICE), wire.encode(want), assured=False)
            except Unreachable as error:
                log.debug("frames not requested, %s will offer again: %s", device, error)
