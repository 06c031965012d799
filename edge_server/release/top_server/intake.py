"""Features of requests on their way here: one request a device, asked for until they are whole, within bounds.

A newer request of a device takes the place of its older one. What all devices together may have here is bounded in
bytes, and in requests; one beyond that is refused, and its device may say so at once.
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
class Held:
    """A request that is here, wholly or in part.

    Attributes:
        request: What its device said last of it.
        due: When its device waits no longer.
        receiver: Takes its features; None once they are whole.
        features: The payload, once whole.
    """

    request: TopRequest
    due: float
    receiver: Receiver[MemorySink] | None
    features: memoryview | None = None
    whole_at: float = 0.0

    @property
    def key(self) -> tuple[str, int, bytes]:
        """What tells it from others of its device."""
        return self.request.instance, self.request.number, self.request.params.digest


@dataclass
class Intake:
    """The requests that are here.

    Attributes:
        policy: How features are received; its limit is that of one request.
        most_bytes: Of the features of all requests.
        most_requests: That are here at once.
    """

    site: str
    transport: Transport
    clock: Clock
    policy: Policy
    most_bytes: int
    most_requests: int
    held: dict[str, Held] = field(default_factory=dict)
    bytes_in: int = 0
    _paces: dict[str, Pace] = field(default_factory=dict)
    _expected: dict[str, Allowance] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Bytes that the features of all requests take, or will when they are here."""
        return sum(pending.request.params.size for pending in self.held.values())

    def awaits(self, device: str) -> bool:
        """Tell whether frames of a device may come: it has offered features, or was told that it may send some."""
        return device in self.held or (device in self._expected and self._expected[device].take(0))

    async def offer(self, device: str, request: TopRequest) -> None:
        """Take a request, or hear of it again.

        Raises:
            WireError: It is larger than is taken, or there is no room for it; no memory was taken.
        """
        now, before = self.clock(), self.held.get(device)
        due = now + request.deadline_s
        if before and before.key == (request.instance, request.number, request.params.digest):
            before.due = due
            if before.receiver:
                before.receiver.note_new_offer(request.pushed, now)
                await self._ask(device, before.receiver)
            return
        self.drop(device)
        frames.check(request.params, limit=self.policy.limit)
        if len(self.held) >= self.most_requests or self.held_bytes + request.params.size > self.most_bytes:
            raise WireError(f"{len(self.held)} requests are being served; ask again a little later", reason="busy")
        pace = self._pace(device)
        receiver = Receiver(request.params, MemorySink, self.policy, pace, now, pushed=request.pushed)
        self.held[device] = Held(request, due, receiver)
        await self._ask(device, receiver)

    async def take(self, device: str, data: bytes) -> tuple[bool, Held | None]:
        """Take a frame; tell whether it was of any use, and return the request if its features are whole by it.

        Raises:
            WireError: It is damaged or does not fit; or the whole is not what was offered.
        """
        frame, pending = frames.decode(data), self.held.get(device)
        is_expected = device in self._expected and self._expected[device].take(frame.data.nbytes)
        if pending is None or pending.receiver is None or frame.digest != pending.receiver.transfer.digest:
            return is_expected, None  # of a request that is over
        self.bytes_in += len(data)
        is_new = pending.receiver.take(frame, self.clock())
        if not pending.receiver.complete:
            await self._ask(device, pending.receiver)
            return is_new or is_expected, None
        await self._finish(device, pending, pending.receiver)
        return True, pending if pending.features is not None else None

    async def _finish(self, device: str, pending: Held, receiver: Receiver[MemorySink]) -> None:
        """Take the whole payload; ask for all of it anew where its digest does not hold.

        Raises:
            WireError: It came damaged as often as is tried.
        """
        try:
            pending.features = receiver.finish()
        except WireError:
            if receiver.is_hopeless:
                self.drop(device)
                raise
            await self._ask(device, receiver)
        else:
            pending.receiver, pending.whole_at = None, self.clock()

    async def look(self) -> list[str]:
        """Ask anew for what does not come, and drop what nobody waits for; return the devices whose requests were."""
        now = self.clock()
        late = [device for device, pending in self.held.items() if pending.receiver and pending.due <= now]
        for device in late:
            self.drop(device)
        for device, pending in list(self.held.items()):
            if pending.receiver and not pending.receiver.remaining_s(now):
                pending.receiver.time_out(now)
                await self._ask(device, pending.receiver)
        return late

    def drop(self, device: str) -> None:
        """Forget the request of a device."""
        self.held.pop(device, None)

    def room(self, device: str) -> Room:
        """Return what a device may send unasked of its next features; that much is expected of it then."""
        room = push_credit(self._pace(device), self._window)
        self._expect(device).ask((0, room.blocks))
        return room

    @property
    def _window(self) -> int:
        return self.policy.share(sum(1 for pending in self.held.values() if pending.receiver))

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
                log.debug("not asked, %s will offer again: %s", device, error)
