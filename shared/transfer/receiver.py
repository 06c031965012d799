"""Receive a payload: request blocks, detect timeouts, verify the digest.

One engine for models, updates, features and gradients, from one sender or from many that share a budget. It does no
IO: frames and the time are inputs, and the caller sends the returned `Want`. Bytes go into a sink, a file (`to_file`)
or memory (`in_memory`). The sender may send as much of the next payload unrequested as `push_credit` allows; the
remaining blocks are requested, and requested again after a timeout.
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
"""Windows of one sender, requested and not yet received, that are remembered."""

TRANSIT_S = 1.5
"""Longest time for which a request may be in transit when a message of its receiver crosses it."""

S = TypeVar("S", bound="Sink")

_MISSING, _REQUESTED, _RECEIVED = 0, 1, 2


class Sink(Protocol):
    """Destination of one payload's blocks."""

    @property
    def have(self) -> bytes:
        """One byte per block, 1 if an earlier process received it; empty for none."""

    def put(self, start: int, data: memoryview) -> None:
        """Store a frame's bytes, from block `start` on: whole blocks, except for the payload's last."""

    def to_view(self) -> memoryview:
        """Return the payload, once every block has arrived; the caller owns its memory."""

    def remove(self) -> None:
        """Drop what has been received."""


@dataclass(frozen=True)
class Policy:
    """Limits of receiving payloads.

    Attributes:
        window: Most frames of one sender in flight.
        patience_s: Shortest timeout in seconds after which requested frames count as lost.
        limit: Largest accepted payload in bytes.
        frame_bytes: Most payload bytes per requested frame.
        budget: Most frames of all senders together in flight; each sender has at least two.
        attempts: How often a payload with a wrong digest is fetched.
    """

    window: int
    patience_s: float
    limit: int
    frame_bytes: int = MAX_FRAME_BYTES
    budget: int = MAX_WINDOW
    attempts: int = 3

    def new_allowance(self) -> Allowance:
        """Return a new sender's allowance; windows may overlap while a sender is offline."""
        return Allowance(EXPECTED_WINDOWS * self.window * self.frame_bytes)

    def share(self, senders: int) -> int:
        """Return the window of each of `senders` senders."""
        return max(2, min(self.window, self.budget // max(1, senders)))

    def pace(self, now: float, frame_bytes: int = MAX_FRAME_BYTES, *, small: bool = True) -> Pace:
        """Return the pace of a sender from which nothing has arrived yet.

        Args:
            frame_bytes: The sender's largest frame.
            small: Start with small frames: a broker disconnects a client whose frame outlasts the keep-alive interval.
        """
        pace = Pace(self.patience_s, now, min(self.frame_bytes, frame_bytes))
        if small:
            pace.begin_small()
        return pace


class Receiver(Generic[S]):
    """One incoming payload.

    Args:
        sink: Creates the sink, or reopens that of an earlier process; called again for a payload that arrived damaged.
        pace: Pace of this sender; may outlive the payload, so that the next transfer starts with it.
        now: Current time in monotonic seconds.
        pushed: Blocks that arrive unrequested.

    Attributes:
        bytes_received: Bytes on the wire, including repeated and damaged frames.

    Raises:
        WireError: It is too large or invalid; no sink was created.
        OSError: The sink could not be created.
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
        frames.check_transfer(transfer, limit=policy.limit)
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
        """True if all blocks have arrived."""
        return self._assembly.complete

    @property
    def lacking(self) -> int:
        """Number of missing blocks."""
        return self._assembly.lacking

    @property
    def is_hopeless(self) -> bool:
        """True if all attempts produced a wrong digest."""
        return self._damaged >= self._policy.attempts

    def take(self, frame: Frame, now: float) -> bool:
        """Store a frame; return whether anything in it was new. Frames of other payloads are ignored.

        Raises:
            WireError: It does not fit; its bytes are counted nevertheless.
            OSError: The sink cannot store it.
        """
        if frame.digest != self.transfer.digest:
            self.pace.note_size(frame.data.nbytes)
            return False
        self.bytes_received += frame.size
        start, stop = self._assembly.span(frame)
        if self._assembly.holds(start, stop):
            return False
        self.sink.put(start, frame.data)
        self._assembly.accept(frame)
        self.pace.note_frame(now, frame.data.nbytes)
        self._flows = True
        return True

    def want(self, window: int = MAX_WINDOW) -> Want | None:
        """Return the next request, with at most `window` frames in flight; None for nothing yet."""
        frame_bytes = min(self.pace.frame_bytes, self.transfer.frame_bytes)
        ranges = self._assembly.ask(self.pace.window(min(window, self._policy.window)), frame_bytes)
        return Want(digest=self.transfer.digest, frame_bytes=frame_bytes, ranges=ranges) if ranges else None

    def remaining_s(self, now: float) -> float:
        """Return the seconds until requested frames count as lost; 0 if they do."""
        return self.pace.remaining_s(now)

    def time_out(self, now: float) -> None:
        """Treat requested frames as lost after a timeout: `want` requests them again, in smaller frames if needed."""
        self.pace.time_out(now)
        self._forget()

    def note_new_offer(self, pushed: int, now: float) -> None:
        """Note that the sender has repeated its offer: frames in flight are lost, and it sends `pushed` blocks again.

        A sender that pushes nothing has only waited long for an answer. While frames arrive, nothing is lost: requested
        again, they would all come twice over a link that is slow, not broken.
        """
        if pushed <= 0 and self._flows and self.remaining_s(now):
            return
        self.lost(now)
        if pushed > 0:
            self._assembly.expect(pushed)

    def note_waiting_sender(self, now: float) -> None:
        """Note that the sender has repeated its offer without pushing blocks.

        It sends in order, so frames that it was asked for a while ago would have arrived before that message: if none
        did, none will. Then a little is requested, each time it repeats the offer.
        """
        if self.pace.silent_s(now) >= TRANSIT_S and not self._flows:
            self.pace.doubt(now)
            self._forget()

    def lost(self, now: float) -> None:
        """Note that the sender is back from an outage: frames in flight are lost."""
        self.pace.note_outage(now)
        self._forget()

    def reroute(self, pace: Pace) -> None:
        """Continue at another pace by another route; frames in flight are lost."""
        pace.limit(self.pace.ceiling)
        self.pace = pace
        self._forget()

    def _forget(self) -> None:
        self._assembly.forget()
        self._flows = False

    def finish(self) -> memoryview:
        """Verify and return the whole payload, as its sink holds it.

        Raises:
            WireError: Its digest is wrong, so it is dropped. Unless that is hopeless, all blocks are missing again.
            OSError: The sink cannot be read, or not be created again.
        """
        content = self.sink.to_view()
        if payload.digest([content]) == self.transfer.digest:
            return content
        self.sink.remove()
        self._damaged += 1
        if not self.is_hopeless:
            self._begin()
        raise WireError("digest of the whole payload is wrong", reason="digest")


class Assembly:
    """Block states of one transfer: missing, requested, received. Knows neither bytes nor time.

    Args:
        have: One byte per block, 1 if an earlier process received it; empty for none.
    """

    def __init__(self, transfer: Transfer, have: bytes = b"") -> None:
        self.transfer = transfer
        self._blocks = bytearray(have.replace(b"\1", b"\2")) or bytearray(transfer.blocks)
        self.lacking = self._blocks.count(_MISSING)
        self._asked = self._next = 0
        self._window = FIRST_WINDOW

    @property
    def complete(self) -> bool:
        """True if all blocks have arrived."""
        return self.lacking == 0

    def expect(self, stop: int) -> None:
        """Note that the blocks before `stop` arrive unrequested; call it before any request.

        The window starts at its maximum then: a sender that pushes blocks knows the link.
        """
        stop = min(stop, self.transfer.blocks)
        lacking = self._blocks.count(_MISSING, 0, stop)
        self._blocks[:stop] = self._blocks[:stop].replace(bytes([_MISSING]), bytes([_REQUESTED]))
        self._asked, self._next, self._window = self._asked + lacking, stop, MAX_WINDOW

    def accept(self, frame: Frame) -> bool:
        """Note a frame; return whether anything in it is new.

        Raises:
            WireError: It does not fit the transfer.
        """
        start, stop = self.span(frame)
        new = stop - start - self._blocks.count(_RECEIVED, start, stop)
        self._asked -= self._blocks.count(_REQUESTED, start, stop)
        self._blocks[start:stop] = bytes([_RECEIVED]) * (stop - start)
        self.lacking -= new
        return new > 0

    def holds(self, start: int, stop: int) -> bool:
        """Check whether all of these blocks have arrived."""
        return self._blocks.count(_RECEIVED, start, stop) == stop - start

    def span(self, frame: Frame) -> tuple[int, int]:
        """Return the range of blocks that a frame carries.

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
        """Return ranges of blocks to request now: none while more than half a window is in flight.

        The first windows are small, so that little is sent twice if a link turns out to be slow or broken.

        Args:
            window: Most frames in flight.
            frame_bytes: Payload bytes per frame.
        """
        frame = frame_bytes // BLOCK_BYTES
        window = min(window, self._window) * frame
        room = window - self._asked
        if self.complete or 2 * room < window:
            return []
        self._window = min(2 * self._window, MAX_WINDOW)
        ranges: list[tuple[int, int]] = []
        while room > 0 and len(ranges) < MAX_WINDOW and (start := self._blocks.find(_MISSING, self._next)) >= 0:
            end, stop = self._run_end(start, room), start + room
            if stop < end:
                stop -= stop % frame  # so that devices on one transmission request the same frames
            if stop <= start:
                break
            stop = min(stop, end)
            self._blocks[start:stop] = bytes([_REQUESTED]) * (stop - start)
            self._asked += stop - start
            self._next, room = stop, room - (stop - start)
            ranges.append((start, stop))
        return ranges

    def _run_end(self, start: int, room: int) -> int:
        """Return the end of the run of missing blocks from `start` on, looking no further than needed."""
        limit = min(start + room + 1, len(self._blocks))
        ends = [self._blocks.find(state, start, limit) for state in (_REQUESTED, _RECEIVED)]
        return min((end for end in ends if end >= 0), default=limit)

    def forget(self) -> None:
        """Treat all requested blocks as lost; the next `ask` starts at the first missing block."""
        self._blocks = self._blocks.replace(bytes([_REQUESTED]), bytes([_MISSING]))
        self._asked, self._next, self._window = 0, 0, FIRST_WINDOW


class Allowance:
    """Flood allowance of one sender: bytes requested from it, or granted unrequested, and not yet received.

    Traffic within it is no flood, even if it is useless: a sender that reconnects is asked again for blocks that may be
    in flight, and a payload may be obsolete before it arrives.

    Args:
        most: Upper limit in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._left = most, 0

    def ask(self, *ranges: tuple[int, int]) -> None:
        """Add blocks that may come."""
        blocks = sum(stop - start for start, stop in ranges)
        self._left = min(self._most, self._left + blocks * BLOCK_BYTES)

    def take(self, size: int) -> bool:
        """Count received bytes; return whether any were expected."""
        is_expected = self._left > 0
        self._left = max(0, self._left - size)
        return is_expected


def push_credit(pace: Pace, window: int) -> Room:
    """Return the credit for unrequested blocks of the next payload: `window` frames, if the link's pace allows."""
    return Room(blocks=pace.room(window) * (pace.frame_bytes // BLOCK_BYTES), frame_bytes=pace.frame_bytes)
