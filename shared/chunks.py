"""Frames: how a payload travels in pieces, and what its receiver still lacks.

    F C <major> 0 | digest of the payload, 16 bytes | u32 index | u32 count | u64 XXH3-64 | data

The checksum covers the header before it and the data. The receiver asks for frames and never for more than its window;
what does not come is asked for again, so that frames themselves may be lost anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from shared.errors import WireError
from shared.messages import Transfer

MAJOR = 1
FRAME_BYTES = 256 * 1024
MIN_FRAME_BYTES = 1024
MAX_FRAME_BYTES = 4 << 20
FIRST_WINDOW = 4
MAX_WINDOW = 64
DIGEST_BYTES = 16

_HEAD = struct.Struct("<2sBB16sII")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass(frozen=True)
class Frame:
    """One piece of a payload."""

    digest: bytes
    index: int
    count: int
    data: memoryview


def encode(transfer: Transfer, index: int, data: Iterable[memoryview]) -> bytes:
    """Return frame `index` of a transfer; `data` holds its bytes in order and is copied once."""
    pieces = list(data)
    head = _HEAD.pack(b"FC", MAJOR, 0, transfer.digest, index, transfer.count)
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
    magic, major, _, digest, index, count = _HEAD.unpack_from(view)
    if magic != b"FC":
        raise WireError("neither a message nor a frame")
    if major != MAJOR:
        raise WireError(f"frame version {major}, this side reads {MAJOR}", reason="version")
    body = view[HEADER_BYTES:]
    if _checksum(view[: _HEAD.size], body) != view[_HEAD.size : HEADER_BYTES]:
        raise WireError(f"frame {index}: checksum does not hold", reason="checksum")
    return Frame(digest, index, count, body)


def _checksum(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return _CHECKSUM.pack(state.intdigest())


def check(transfer: Transfer, *, limit: int) -> None:
    """Refuse a transfer that nobody should allocate for.

    Raises:
        WireError: Its size is above `limit` bytes or its frames are not of a sane size.
    """
    if len(transfer.digest) != DIGEST_BYTES:
        raise WireError(f"digest of {len(transfer.digest)} bytes, {DIGEST_BYTES} are needed")
    if not 0 < transfer.size <= limit:
        raise WireError(f"payload of {transfer.size} bytes, at most {limit} are taken", reason="oversized")
    if not MIN_FRAME_BYTES <= transfer.frame_bytes <= MAX_FRAME_BYTES:
        raise WireError(f"frames of {transfer.frame_bytes} bytes", reason="oversized")


class Assembly:
    """What of one transfer has come, what was asked for, and what to ask for next. Knows no bytes and no time."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._have = bytearray(transfer.count)
        self._asked: set[int] = set()
        self._next = 0
        self._window = FIRST_WINDOW
        self.lacking = transfer.count

    @property
    def complete(self) -> bool:
        """Whether every frame has come."""
        return self.lacking == 0

    def accept(self, frame: Frame) -> bool:
        """Note a frame; tell whether it is new.

        Raises:
            WireError: It does not fit the transfer.
        """
        transfer = self.transfer
        if frame.count != transfer.count or frame.index >= transfer.count:
            raise WireError(f"frame {frame.index} of {frame.count}, expected {transfer.count}", reason="shape")
        if frame.data.nbytes != min(transfer.frame_bytes, transfer.size - frame.index * transfer.frame_bytes):
            raise WireError(f"frame {frame.index} of {frame.data.nbytes} bytes", reason="truncated")
        self._asked.discard(frame.index)
        if self._have[frame.index]:
            return False
        self._have[frame.index] = 1
        self.lacking -= 1
        return True

    def ask(self, window: int) -> list[tuple[int, int]]:
        """Return ranges to ask for now: none while more than half a window is under way.

        The first windows are small, so that little is sent twice where a link turns out to be slow or broken.

        Args:
            window: Most frames under way.
        """
        window = min(window, self._window)
        room = window - len(self._asked)
        if self.complete or 2 * room < window:
            return []
        self._window *= 2
        wanted: list[int] = []
        while room > len(wanted) and (index := self._have.find(0, self._next)) >= 0:
            wanted.append(index)
            self._next = index + 1
        self._asked.update(wanted)
        return to_ranges(wanted)

    def forget(self) -> None:
        """Take everything asked for as lost; the next `ask` starts at the first frame that lacks."""
        self._asked.clear()
        self._next, self._window = 0, FIRST_WINDOW


def to_ranges(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending indices as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int]], count: int, *, limit: int) -> list[int]:
    """Return the indices below `count` that the ranges name, at most `limit` of them.

    Raises:
        WireError: A range is not ascending, or names what does not exist.
    """
    indices: list[int] = []
    for start, stop in ranges:
        if not 0 <= start < stop <= count:
            raise WireError(f"frames {start} to {stop} of {count}", reason="shape")
        indices.extend(range(start, min(stop, start + limit - len(indices))))
        if len(indices) >= limit:
            break
    return indices
