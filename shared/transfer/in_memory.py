"""One payload of a split session on its way, in memory at both ends: a step's features up, or its gradient down.

Nothing is written to a disk, as it would be once a step. A sender puts as much of the next payload behind its header,
unasked, as the receiver said it has room for; the rest is asked for, as everywhere. Time and bytes are inputs: no IO.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import BLOCK_BYTES, Room, Transfer, Want
from shared.protocol.payload import Scattered
from shared.transfer import frames
from shared.transfer.frames import Assembly, Frame
from shared.transfer.pace import Pace


@dataclass(frozen=True)
class Sending:
    """A payload that its receiver may ask for; frames are cut from the tensors themselves.

    Attributes:
        transfer: What the receiver is told.
        source: The bytes, in place.
    """

    transfer: Transfer
    source: Scattered

    def answer(self, want: Want, max_payload_bytes: int) -> Iterator[bytes]:
        """Return the frames that are asked for, cut one at a time.

        Args:
            want: Of this payload.
            max_payload_bytes: What one message may carry now.

        Raises:
            WireError: It asks for what does not exist.
        """
        return self._frames(frames.pieces(want, self.transfer, self._most(max_payload_bytes)))

    def push(self, room: Room, max_payload_bytes: int) -> tuple[int, Iterator[bytes]]:
        """Return how many blocks go unasked into a receiver's room, and their frames."""
        blocks = min(room.blocks, self.transfer.blocks)
        if blocks <= 0 or not frames.is_frame_size(room.frame_bytes):
            return 0, iter(())
        unasked = Want(digest=self.transfer.digest, frame_bytes=room.frame_bytes, ranges=[(0, blocks)])
        pieces = frames.pieces(unasked, self.transfer, self._most(max_payload_bytes))
        return pieces[-1][1], self._frames(pieces)

    def _most(self, max_payload_bytes: int) -> int:
        return frames.largest_frame(self.transfer.frame_bytes, max_payload_bytes)

    def _frames(self, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        for start, stop in pieces:
            data = self.source.read(start * BLOCK_BYTES, (stop - start) * BLOCK_BYTES)
            yield frames.encode(self.transfer, start, data)


def sending(parts: Sequence[memoryview], frame_bytes: int) -> Sending:
    """Return a payload ready to be sent; its bytes are not copied, and must stay as they are.

    Args:
        parts: The payload, in order.
        frame_bytes: What of it to put into a frame at most.
    """
    source = Scattered(parts)
    return Sending(Transfer(digest=payload.digest(parts), size=source.size, frame_bytes=frame_bytes), source)


class Receiving:
    """A payload on its way here.

    Args:
        transfer: What is to come.
        pushed: Blocks of it that come unasked.
        pace: How fast frames come from this sender; outlives the payload, so that the next one begins as this ended.
        now: Seconds.
        limit: Most bytes that are taken.

    Raises:
        WireError: It is too large, or makes no sense.
    """

    def __init__(self, transfer: Transfer, pushed: int, pace: Pace, now: float, *, limit: int) -> None:
        frames.check(transfer, limit=limit)
        self.pace = pace
        self.bytes_received = 0
        self._assembly = Assembly(transfer)
        self._data = bytearray(transfer.size)
        self._flows = False
        pace.begins(now)
        if pushed > 0:
            self._assembly.expect(pushed)

    @property
    def transfer(self) -> Transfer:
        """What is to come."""
        return self._assembly.transfer

    @property
    def complete(self) -> bool:
        """Whether every block is here."""
        return self._assembly.complete

    def take(self, frame: Frame, size: int, now: float) -> bool:
        """Store a frame of `size` bytes on the wire; tell whether anything in it was new.

        Raises:
            WireError: It does not fit.
        """
        self.bytes_received += size
        start, _ = self._assembly.span(frame)
        if not self._assembly.accept(frame):
            return False
        offset = start * BLOCK_BYTES
        self._data[offset : offset + frame.data.nbytes] = frame.data
        self.pace.heard(now, frame.data.nbytes)
        self._flows = True
        return True

    def want(self, window: int) -> Want | None:
        """Return what to ask for now, with at most `window` frames under way; None for nothing yet."""
        frame_bytes = min(self.pace.frame_bytes, self.transfer.frame_bytes)
        ranges = self._assembly.ask(self.pace.window(window), frame_bytes)
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

    def lost(self, now: float) -> None:
        """Note that the sender is back from an outage: what was under way is lost."""
        self.pace.asked_anew(now)
        self._forget()

    def _forget(self) -> None:
        self._assembly.forget()
        self._flows = False

    def finish(self) -> memoryview:
        """Return the whole payload, in memory that is the caller's from now on.

        Raises:
            WireError: Its digest does not hold; nothing of it is kept, and it is to be asked for anew.
        """
        whole = memoryview(self._data)
        if payload.digest([whole]) != self.transfer.digest:
            self._assembly = Assembly(self.transfer)
            raise WireError("digest does not hold", reason="digest")
        return whole


def room(pace: Pace, window: int) -> Room:
    """Return what of the next payload may come unasked: as much as `window` frames and the link's pace allow."""
    return Room(blocks=pace.room(window) * (pace.frame_bytes // BLOCK_BYTES), frame_bytes=pace.frame_bytes)
