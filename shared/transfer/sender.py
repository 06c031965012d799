"""Send a payload: cut frames on request, or unrequested within the receiver's credit.

One engine for models, updates, features and gradients. It does no IO and has no state: the caller publishes the
returned frames in order, and the receiver requests lost ones again.
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
    """Bytes of a payload: `payload.Scattered`, over memory or a view of a file."""

    def read(self, offset: int, length: int) -> Iterable[memoryview]:
        """Return views of `length` bytes from `offset` in all, fewer at the end."""


@dataclass(frozen=True)
class Sender:
    """A payload that receivers may request; frames are cut from the source itself, one at a time.

    Attributes:
        transfer: Description for receivers: digest, size, and the largest frame.
        source: The bytes, not copied.
    """

    transfer: Transfer
    source: Source

    @classmethod
    def of_parts(cls, parts: Sequence[memoryview], frame_bytes: int) -> Sender:
        """Make a sender of a payload's parts, which are not copied and must not change.

        Args:
            parts: The payload, in order.
            frame_bytes: Most payload bytes per frame.
        """
        source = Scattered(parts)
        return cls(Transfer(digest=payload.digest(parts), size=source.size, frame_bytes=frame_bytes), source)

    def largest_frame(self, max_payload_bytes: int) -> int:
        """Return the payload bytes per frame where messages may have `max_payload_bytes`."""
        return frames.largest_frame(self.transfer.frame_bytes, max_payload_bytes)

    def pieces(self, want: Want, max_payload_bytes: int) -> list[tuple[int, int]]:
        """Cut a request into runs of blocks, one per frame.

        Args:
            max_payload_bytes: Current limit of one message.

        Raises:
            WireError: The request is invalid.
        """
        return frames.pieces(want, self.transfer, self.largest_frame(max_payload_bytes))

    def frame(self, start: int, stop: int) -> bytes:
        """Encode the frame of the blocks from `start` to `stop`."""
        data = self.source.read(start * BLOCK_BYTES, (stop - start) * BLOCK_BYTES)
        return frames.encode(self.transfer, start, data)

    def answer(self, want: Want, max_payload_bytes: int) -> Iterator[bytes]:
        """Yield the requested frames, cut one at a time.

        Args:
            max_payload_bytes: Current limit of one message.

        Raises:
            WireError: The request is invalid.
        """
        return self._cut(self.pieces(want, max_payload_bytes))

    def plan_push(self, room: Room, max_payload_bytes: int) -> list[tuple[int, int]]:
        """Cut the blocks that fit into the receiver's credit into runs, one per frame, from the first block on."""
        blocks = min(room.blocks, self.transfer.blocks)
        if blocks <= 0 or not frames.is_frame_size(room.frame_bytes):
            return []
        want = Want(digest=self.transfer.digest, frame_bytes=room.frame_bytes, ranges=[(0, blocks)])
        return self.pieces(want, max_payload_bytes)

    def push(self, room: Room, max_payload_bytes: int) -> tuple[int, Iterator[bytes]]:
        """Return the number of blocks sent unrequested within the receiver's credit, and their frames."""
        pieces = self.plan_push(room, max_payload_bytes)
        return pieces[-1][1] if pieces else 0, self._cut(pieces)

    def _cut(self, pieces: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        for start, stop in pieces:
            yield self.frame(start, stop)


class PieceQueue:
    """Queue of pieces for one receiver: at most a window, without overlaps.

    A new request in frames of another size replaces overlapping pieces of an earlier one.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: dict[int, int] = {}

    def add(self, start: int, stop: int) -> bool:
        """Queue a piece if there is room; return whether it replaced others."""
        first = bisect_left(self._starts, start)
        if first and self._stops[self._starts[first - 1]] > start:
            first -= 1
        last = bisect_left(self._starts, stop, lo=first)
        replaced = self._starts[first:last]
        if not replaced and len(self._starts) >= MAX_WINDOW:
            return False
        for each in replaced:
            del self._stops[each]
        self._starts[first:last] = [start]
        self._stops[start] = stop
        return replaced not in ([], [start])

    def pop(self, start: int) -> int:
        """Remove the piece that begins at `start`; return its end."""
        self._starts.remove(start)
        return self._stops.pop(start)

    def take(self) -> list[tuple[int, int]]:
        """Remove and return all pieces, in order."""
        pieces = [(start, self._stops[start]) for start in self._starts]
        self.clear()
        return pieces

    def clear(self) -> None:
        """Remove all pieces."""
        self._starts, self._stops = [], {}

    def __iter__(self) -> Iterator[int]:
        """Iterate over the pieces' starts, in order."""
        return iter(self._starts)

    def __contains__(self, start: int) -> bool:
        """Check whether a piece that begins at `start` is queued."""
        return start in self._stops

    def __len__(self) -> int:
        return len(self._starts)
