"""Receive a payload: what to ask for next, how long to wait for it, and whether the whole is what was offered.

One engine for whatever is received: a model, an update, features, a gradient, from one sender or from many that share
a budget. It does no IO: frames and the time are inputs, a `Want` that it returns is to be sent. Bytes go into a sink,
a file (`to_file`) or memory (`in_memory`). The sender may put as much of the next payload behind its header, unasked,
as `room` says; the rest is asked for. What does not come within the link's patience is asked for anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import BLOCK_BYTES, Room, Transfer, Want
from shared.transfer import frames
from shared.transfer.frames import MAX_FRAME_BYTES, MAX_WINDOW, Frame
from shared.transfer.pace import Pace

FIRST_WINDOW = 1
EXPECTED_WINDOWS = 4
"""Of one sender, asked for and not come, that are remembered."""

ON_ITS_WAY_S = 1.5
"""For so long a wish for frames may have been under way itself, when its receiver says something that crosses it."""


class Sink(Protocol):
    """Where the blocks of one payload come together."""

    @property
    def have(self) -> bytes:
        """A byte a block, 1 where an earlier process has received it; empty for nothing."""

    def put(self, start: int, data: memoryview) -> None:
        """Store a frame's bytes, from block `start` on."""

    def whole(self) -> memoryview:
        """Return the payload, once every block is here."""

    def remove(self) -> None:
        """Part with what has come."""


S = TypeVar("S", bound=Sink)

_LACKING, _ASKED, _HERE = 0, 1, 2


@dataclass(frozen=True)
class Policy:
    """How payloads are received.

    Attributes:
        window: Most frames of one sender under way.
        patience_s: Least seconds without a frame after which what is under way counts as lost.
        limit: Largest payload that is taken, in bytes.
        frame_bytes: Most bytes of payload that a frame is asked for with.
        budget: Most frames of all senders together under way; each has two all the same.
        attempts: How often a payload is fetched whose digest does not hold.
    """

    window: int
    patience_s: float
    limit: int
    frame_bytes: int = MAX_FRAME_BYTES
    budget: int = MAX_WINDOW
    attempts: int = 3

    def expected(self) -> Expected:
        """Return the account of a sender of whom nothing was asked yet; windows may overlap while it is away."""
        return Expected(EXPECTED_WINDOWS * self.window * self.frame_bytes)

    def share(self, senders: int) -> int:
        """Return the frames that each of so many senders may have under way."""
        return max(2, min(self.window, self.budget // max(1, senders)))

    def pace(self, now: float, frame_bytes: int = MAX_FRAME_BYTES, *, small: bool = True) -> Pace:
        """Return the pace of a sender of whom nothing has come yet.

        Args:
            now: Seconds.
            frame_bytes: What the sender puts into a frame at most.
            small: Ask for small frames first: a broker hangs up on a client whose frame outlasts the keep-alive.
        """
        pace = Pace(self.patience_s, now, min(self.frame_bytes, frame_bytes))
        if small:
            pace.begin_small()
        return pace


class Receiver(Generic[S]):
    """One payload on its way here.

    Args:
        transfer: What is to come.
        sink: Makes the place where it goes, or finds the one that an earlier process made; called again for a payload
            that came damaged.
        policy: How it is received.
        pace: How fast frames come from this sender; may outlive the payload, so that the next begins as this ended.
        now: Seconds.
        pushed: Blocks of it that come unasked.

    Attributes:
        bytes_received: On the wire, with what came twice or damaged.

    Raises:
        WireError: It is too large, or makes no sense; no place was made for it.
        OSError: The sink could not be made.
    """

    def __init__(
        self,
        transfer: Transfer,
        sink: Callable[[Transfer], S],
        policy: Policy,
        pace: Pace,
        now: float,
        *,
        pushed: int = 0,
    ) -> None:
        frames.check(transfer, limit=policy.limit)
        self.transfer, self.pace, self.bytes_received = transfer, pace, 0
        self._make_sink, self._policy, self._damaged = sink, policy, 0
        self._begin()
        pace.begins(now)
        if pushed > 0:
            self._assembly.expect(pushed)

    def _begin(self) -> None:
        self.sink = self._make_sink(self.transfer)
        self._assembly = Assembly(self.transfer, self.sink.have)
        self._flows = False

    @property
    def complete(self) -> bool:
        """Whether every block is here."""
        return self._assembly.complete

    @property
    def lacking(self) -> int:
        """Blocks that are not here yet."""
        return self._assembly.lacking

    @property
    def is_hopeless(self) -> bool:
        """Whether it came damaged as often as is tried."""
        return self._damaged >= self._policy.attempts

    def take(self, frame: Frame, now: float) -> bool:
        """Store a frame; tell whether anything in it was new. A frame of another payload is passed over.

        Raises:
            WireError: It does not fit; its bytes count all the same.
            OSError: The sink does not take it.
        """
        if frame.digest != self.transfer.digest:
            self.pace.passed(frame.data.nbytes)
            return False
        self.bytes_received += frame.size
        start, stop = self._assembly.span(frame)
        if self._assembly.holds(start, stop):
            return False
        self.sink.put(start, frame.data)
        self._assembly.accept(frame)
        self.pace.heard(now, frame.data.nbytes)
        self._flows = True
        return True

    def want(self, window: int = MAX_WINDOW) -> Want | None:
        """Return what to ask for now, with at most `window` frames under way; None for nothing yet."""
        frame_bytes = min(self.pace.frame_bytes, self.transfer.frame_bytes)
        ranges = self._assembly.ask(self.pace.window(min(window, self._policy.window)), frame_bytes)
        return Want(digest=self.transfer.digest, frame_bytes=frame_bytes, ranges=ranges) if ranges else None

    def left_s(self, now: float) -> float:
        """Return the seconds until what is under way counts as lost; 0 if it does."""
        return self.pace.left_s(now)

    def gave_up(self, now: float) -> None:
        """Take what was under way for lost, after a silence: `want` asks for it anew, in smaller frames if need be."""
        self.pace.gave_up(now)
        self._forget()

    def offered_again(self, pushed: int, now: float) -> None:
        """Note that the sender has said anew what it has: what was under way is lost, and so many blocks come again.

        One that pushes nothing has only waited long for an answer. Where frames come meanwhile, nothing is lost: asked
        for again, they would all come twice over a link that is slow, not broken.
        """
        if pushed <= 0 and self._flows and self.left_s(now):
            return
        self.lost(now)
        if pushed > 0:
            self._assembly.expect(pushed)

    def waited_for(self, now: float) -> None:
        """Note that the sender has said anew what it has, and pushes nothing.

        It sends in order, so that whatever it was asked for a while ago went before that word: where nothing of it is
        here, nothing will come. A little is asked for then, as often as it says so.
        """
        if self.pace.silent_s(now) >= ON_ITS_WAY_S and not self._flows:
            self.pace.doubt(now)
            self._forget()

    def lost(self, now: float) -> None:
        """Note that the sender is back from an outage: what was under way is lost."""
        self.pace.asked_anew(now)
        self._forget()

    def reroute(self, pace: Pace) -> None:
        """Go on with what lacks at another pace: it comes another way, and what was under way is lost."""
        pace.limit(self.pace.ceiling)
        self.pace = pace
        self._forget()

    def _forget(self) -> None:
        self._assembly.forget()
        self._flows = False

    def finish(self) -> memoryview:
        """Return the whole payload, as its sink holds it.

        Raises:
            WireError: Its digest does not hold; nothing of it is kept. Unless that is hopeless, all lacks again.
            OSError: The sink cannot be read, or not be made anew.
        """
        whole = self.sink.whole()
        if payload.digest([whole]) == self.transfer.digest:
            return whole
        self.sink.remove()
        self._damaged += 1
        if not self.is_hopeless:
            self._begin()
        raise WireError("digest of the whole does not hold", reason="digest")


class Assembly:
    """What of one transfer has come, what was asked for, and what to ask for next. Knows no bytes and no time.

    Args:
        transfer: What is to come.
        have: A byte a block, 1 where an earlier process has received it; empty for nothing.
    """

    def __init__(self, transfer: Transfer, have: bytes = b"") -> None:
        self.transfer = transfer
        self._blocks = bytearray(have.replace(b"\1", b"\2")) or bytearray(transfer.blocks)
        self.lacking = self._blocks.count(_LACKING)
        self._asked = self._next = 0
        self._window = FIRST_WINDOW

    @property
    def complete(self) -> bool:
        """Whether every block has come."""
        return self.lacking == 0

    def expect(self, stop: int) -> None:
        """Note that the blocks before `stop` are under way unasked; to be said before anything was asked for.

        Whoever is sent so much needs no first window: its sender knows the link.
        """
        stop = min(stop, self.transfer.blocks)
        lacking = self._blocks.count(_LACKING, 0, stop)
        self._blocks[:stop] = self._blocks[:stop].replace(bytes([_LACKING]), bytes([_ASKED]))
        self._asked, self._next, self._window = self._asked + lacking, stop, MAX_WINDOW

    def accept(self, frame: Frame) -> bool:
        """Note a frame; tell whether anything in it is new.

        Raises:
            WireError: It does not fit the transfer.
        """
        start, stop = self.span(frame)
        new = stop - start - self._blocks.count(_HERE, start, stop)
        self._asked -= self._blocks.count(_ASKED, start, stop)
        self._blocks[start:stop] = bytes([_HERE]) * (stop - start)
        self.lacking -= new
        return new > 0

    def holds(self, start: int, stop: int) -> bool:
        """Tell whether every one of these blocks has come."""
        return self._blocks.count(_HERE, start, stop) == stop - start

    def span(self, frame: Frame) -> tuple[int, int]:
        """Return the blocks that a frame carries.

        Raises:
            WireError: It does not fit the transfer.
        """
        size, count = self.transfer.size, self.transfer.blocks
        stop = frame.start - -frame.data.nbytes // BLOCK_BYTES
        if frame.count != count or not frame.start < stop <= count:
            raise WireError(f"blocks {frame.start} to {stop} of {frame.count}, expected {count}", reason="shape")
        if frame.data.nbytes != min(stop * BLOCK_BYTES, size) - frame.start * BLOCK_BYTES:
            raise WireError(f"frame of {frame.data.nbytes} bytes at block {frame.start}", reason="truncated")
        return frame.start, stop

    def ask(self, window: int, frame_bytes: int) -> list[tuple[int, int]]:
        """Return ranges of blocks to ask for now: none while more than half a window is under way.

        The first windows are small, so that little is sent twice where a link turns out to be slow or broken.

        Args:
            window: Most frames under way.
            frame_bytes: Bytes of payload in a frame.
        """
        frame = frame_bytes // BLOCK_BYTES
        window = min(window, self._window) * frame
        room = window - self._asked
        if self.complete or 2 * room < window:
            return []
        self._window = min(2 * self._window, MAX_WINDOW)
        ranges: list[tuple[int, int]] = []
        while room > 0 and len(ranges) < MAX_WINDOW and (start := self._blocks.find(_LACKING, self._next)) >= 0:
            end, stop = self._run_end(start, room), start + room
            if stop < end:
                stop -= stop % frame  # so that devices on one transmission ask for the same frames
            if stop <= start:
                break
            stop = min(stop, end)
            self._blocks[start:stop] = bytes([_ASKED]) * (stop - start)
            self._asked += stop - start
            self._next, room = stop, room - (stop - start)
            ranges.append((start, stop))
        return ranges

    def _run_end(self, start: int, room: int) -> int:
        """Return where the blocks that lack from `start` on end, looking no further than needed."""
        limit = min(start + room + 1, len(self._blocks))
        ends = [self._blocks.find(state, start, limit) for state in (_ASKED, _HERE)]
        return min((end for end in ends if end >= 0), default=limit)

    def forget(self) -> None:
        """Take everything asked for as lost; the next `ask` starts at the first block that lacks."""
        self._blocks = self._blocks.replace(bytes([_ASKED]), bytes([_LACKING]))
        self._asked, self._next, self._window = 0, 0, FIRST_WINDOW


class Expected:
    """Bytes that one sender was asked for, or told to send unasked, and that have not come.

    What comes within them is no flood, also where it is of no use: a sender that connects anew is asked again for what
    may be under way, and a payload may be past before it is here.

    Args:
        most: Bytes; more are not remembered.
    """

    def __init__(self, most: int) -> None:
        self._most, self._left = most, 0

    def ask(self, *ranges: tuple[int, int]) -> None:
        """Note that these blocks may come."""
        blocks = sum(stop - start for start, stop in ranges)
        self._left = min(self._most, self._left + blocks * BLOCK_BYTES)

    def take(self, size: int) -> bool:
        """Count bytes that came; tell whether any were expected."""
        is_expected = self._left > 0
        self._left = max(0, self._left - size)
        return is_expected


def room(pace: Pace, window: int) -> Room:
    """Return what of the next payload may come unasked: as much as `window` frames and the link's pace allow."""
    return Room(blocks=pace.room(window) * (pace.frame_bytes // BLOCK_BYTES), frame_bytes=pace.frame_bytes)
