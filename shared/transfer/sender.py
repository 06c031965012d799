"""Send a payload: frames cut from where its bytes lie, when a receiver asks for them or has room for them unasked.

One engine for whatever is sent: a model, an update, features, a gradient. It does no IO and keeps no state: what it
returns is to be published in order, and what does not arrive will be asked for again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.protocol import payload
from shared.protocol.messages import BLOCK_BYTES, Room, Transfer, Want
from shared.protocol.payload import Scattered
from shared.transfer import frames
from shared.transfer.frames import MAX_WINDOW


class Source(Protocol):
    """Where the bytes of a payload lie: `payload.Scattered`, over memory or the view of a file."""

    def read(self, offset: int, length: int) -> Iterable[memoryview]:
        """Return views that together are `length` bytes from `offset`, fewer where the end comes first."""


@dataclass(frozen=True)
class Sender:
    """A payload that receivers may ask for; frames are cut from the source itself, one at a time.

    Attributes:
        transfer: What receivers are told: digest, size, and the largest frame that goes out.
        source: The bytes, in place.
    """

    transfer: Transfer
    source: Source

    @classmethod
    def of_parts(cls, parts: Sequence[memoryview], frame_bytes: int) -> Sender:
        """Return a payload ready to be sent; its bytes are not copied, and must stay as they are.

        Args:
            parts: The payload, in order.
            frame_bytes: What of it to put into a frame at most.
        """
        source = Scattered(parts)
        return cls(Transfer(digest=payload.digest(parts), size=source.size, frame_bytes=frame_bytes), source)

    def largest_frame(self, max_payload_bytes: int) -> int:
        """Return how much of the payload goes into a frame where one message may have `max_payload_bytes`."""
        return frames.largest_frame(self.transfer.frame_bytes, max_payload_bytes)

    def pieces(self, want: Want, max_payload_bytes: int) -> list[tuple[int, int]]:
        """Return the runs of blocks that are asked for, a frame each.

        Args:
            max_payload_bytes: What one message may carry now.

        Raises:
            WireError: It asks for what does not exist.
        """
        return frames.pieces(want, self.transfer, self.largest_frame(max_payload_bytes))

    def frame(self, start: int, stop: int) -> bytes:
        """Return the frame of the blocks from `start` to `stop`."""
        data = self.source.read(start * BLOCK_BYTES, (stop - start) * BLOCK_BYTES)
        return frames.encode(self.transfer, start, data)

    def answer(self, want: Want, max_payload_bytes: int) -> Iterator[bytes]:
        """Return the frames that are asked for, cut one at a time.

        Args:
            max_payload_bytes: What one message may carry now.

        Raises:
            WireError: It asks for what does not exist.
        """
        return self._cut(self.pieces(want, max_payload_bytes))

    def unasked(self, room: Room, max_payload_bytes: int) -> list[tuple[int, int]]:
        """Return the runs of blocks that go unasked into a receiver's room, a frame each, from the first block on."""
        blocks = min(room.blocks, self.transfer.blocks)
        if blocks <= 0 or not frames.is_frame_size(room.frame_bytes):
            return []
        want = Want(digest=self.transfer.digest, frame_bytes=room.frame_bytes, ranges=[(0, blocks)])
        return self.pieces(want, max_payload_bytes)

    def push(self, room: Room, max_payload_bytes: int) -> tuple[int, Iterator[bytes]]:
        """Return how many blocks go unasked into a receiver's room, and their frames."""
        pieces = self.unasked(room, max_payload_bytes)
        return pieces[-1][1] if pieces else 0, self._cut(pieces)

    def _cut(self, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        for start, stop in pieces:
            yield self.frame(start, stop)


class WaitingPieces:
    """Pieces that wait to be sent to one receiver: at most a window of them, and none that overlap.

    A receiver that asks for blocks anew, in frames of another size, takes the place of its earlier wish.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}

    def add(self, start: int, stop: int) -> bool:
        """Let a piece wait, if there is room; tell whether others were taken out for it."""
        first = bisect_left(self._starts, start)
        if first and self._stops[self._starts[first - 1]] > start:
            first -= 1
        last = bisect_left(self._starts, stop, lo=first)
        gone = self._starts[first:last]
        if not gone and len(self._starts) >= MAX_WINDOW:
            return False
        for each in gone:
            del self._stops[each]
        self._starts[first:last] = [start]
        self._stops[start] = stop
        return gone not in ([], [start])

    def pop(self, start: int) -> int:
        """Take out the piece that begins there; return where it ends."""
        self._starts.remove(start)
        return self._stops.pop(start)

    def take(self) -> list[tuple[int, int]]:
        """Take out all, in order."""
        pieces = [(start, self._stops[start]) for start in self._starts]
        self.clear()
        return pieces

    def clear(self) -> None:
        """Forget all."""
        self._starts, self._stops = [], {}

    def __iter__(self) -> Iterator[int]:
        """Iterate where pieces begin, in order."""
        return iter(self._starts)

    def __contains__(self, start: int) -> bool:
        """Tell whether a piece that begins there waits."""
        return start in self._stops

    def __len__(self) -> int:
        return len(self._starts)
