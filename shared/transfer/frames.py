"""Frames: how a payload travels in pieces, and what its receiver still lacks.

    F C <major> 0 | digest of the payload, 16 bytes | u32 first block | u32 blocks of the payload | u64 XXH3-64 | data

The checksum covers the header before it and the data. A payload is counted in blocks of 1 KiB, of which a frame carries
as many as the link and the broker bear: a transfer goes on when that number changes, and after either side restarted.
The receiver asks for blocks and never for more than its window; what does not come is asked for again, so that frames
themselves may be lost anywhere.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Transfer, Want

MAJOR = 1
FRAME_BYTES = 256 * 1024
MAX_FRAME_BYTES = 4 << 20
FIRST_WINDOW = 1
MAX_WINDOW = 64
DIGEST_BYTES = 16

_HEAD = struct.Struct("<2sBB16sII")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass(frozen=True)
class Frame:
    """A run of blocks of a payload that has `count` of them, from block `start`."""

    digest: bytes
    start: int
    count: int
    data: memoryview

    @property
    def size(self) -> int:
        """Its bytes on the wire."""
        return HEADER_BYTES + self.data.nbytes


def encode(transfer: Transfer, start: int, data: Iterable[memoryview]) -> bytes:
    """Return a frame of a transfer; `data` holds its bytes from block `start` on, in order, and is copied once.

    Args:
        transfer: Whose frame it is.
        start: Its first block.
        data: Its bytes.
    """
    pieces = list(data)
    head = _HEAD.pack(b"FC", MAJOR, 0, transfer.digest, start, transfer.blocks)
    return b"".join([head, _checksum(head, *pieces), *pieces])


def is_frame(data: bytes) -> bool:
    """Tell a frame from a message by its first two bytes."""
    return data[:2] == b"FC"


def decode(data: bytes) -> Frame:
    """Parse one frame; its data is a view.

    Raises:
        WireError: It is not a frame of our version, is too long, or its checksum does not hold.
    """
    view = memoryview(data)
    if not HEADER_BYTES <= view.nbytes <= HEADER_BYTES + MAX_FRAME_BYTES:
        raise WireError(
            f"frame of {view.nbytes} bytes", reason="truncated" if view.nbytes < HEADER_BYTES else "oversized"
        )
    magic, major, _, digest, start, count = _HEAD.unpack_from(view)
    if magic != b"FC":
        raise WireError("neither a message nor a frame")
    if major != MAJOR:
        raise WireError(f"frame version {major}, this side reads {MAJOR}", reason="version")
    body = view[HEADER_BYTES:]
    if _checksum(view[: _HEAD.size], body) != view[_HEAD.size : HEADER_BYTES]:
        raise WireError(f"frame at block {start}: checksum does not hold", reason="checksum")
    return Frame(digest, start, count, body)


def _checksum(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return _CHECKSUM.pack(state.intdigest())


def check(transfer: Transfer, *, limit: int, remedy: str = "") -> None:
    """Refuse a transfer that nobody should allocate for.

    Args:
        transfer: What is to come.
        limit: Most bytes that are taken.
        remedy: What to do where it is larger, for people.

    Raises:
        WireError: Its size is above `limit` bytes or its frames are not of a sane size.
    """
    if len(transfer.digest) != DIGEST_BYTES:
        raise WireError(f"digest of {len(transfer.digest)} bytes, {DIGEST_BYTES} are needed")
    if not 0 < transfer.size <= limit:
        problem = f"payload of {transfer.size} bytes, at most {limit} are taken"
        raise WireError(f"{problem}; {remedy}" if remedy else problem, reason="oversized")
    if not is_frame_size(transfer.frame_bytes):
        raise WireError(f"frames of {transfer.frame_bytes} bytes", reason="oversized")


def is_frame_size(frame_bytes: int) -> bool:
    """Tell whether frames may carry that much: whole blocks, and no more than anybody would allocate for."""
    return BLOCK_BYTES <= frame_bytes <= MAX_FRAME_BYTES and frame_bytes % BLOCK_BYTES == 0


_LACKING, _ASKED, _HERE = 0, 1, 2


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


def largest_frame(frame_bytes: int, max_payload_bytes: int) -> int:
    """Return how much of a payload to put into a frame where messages may have `max_payload_bytes`."""
    room = (max_payload_bytes - HEADER_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    return max(BLOCK_BYTES, min(frame_bytes, room))


def pieces(want: Want, transfer: Transfer, most_bytes: int) -> list[tuple[int, int]]:
    """Cut what is wanted into runs of blocks, a frame each, `MAX_WINDOW` of them at most.

    Args:
        want: What the receiver lacks.
        transfer: Of what.
        most_bytes: What the sender can put into a frame.

    Raises:
        WireError: The ranges are not ascending, or overlap, or are more than anybody asks for at once; or one names
            what does not exist, or no frame may be of that size.
    """
    if not is_frame_size(want.frame_bytes):
        raise WireError(f"frames of {want.frame_bytes} bytes are wanted", reason="shape")
    if len(want.ranges) > MAX_WINDOW:
        raise WireError(f"{len(want.ranges)} ranges are wanted, at most {MAX_WINDOW} are sent at once", reason="shape")
    frame, asked = min(want.frame_bytes, most_bytes) // BLOCK_BYTES, 0
    found: list[tuple[int, int]] = []
    for start, stop in want.ranges:
        if not asked <= start < stop <= transfer.blocks:
            raise WireError(f"blocks {start} to {stop} of {transfer.blocks}, after {asked}", reason="shape")
        starts = range(start, stop, frame)[: MAX_WINDOW - len(found)]
        found.extend((begin, min(begin + frame, stop)) for begin in starts)
        asked = stop
    return found


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
