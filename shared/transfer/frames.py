"""Frame format: checksummed runs of a payload's blocks.

    F C <major> 0 | digest of the payload, 16 bytes | u32 first block | u32 blocks of the payload | u64 XXH3-64 | data

The checksum covers the header before it and the data. A payload is counted in blocks of 1 KiB, of which a frame carries
as many as link and broker allow: a transfer survives a change of that number, and a restart of either side. The
receiver requests blocks, at most a window of them; missing ones are requested again, so that any frame may be lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Transfer, Want

MAJOR = 1
FRAME_BYTES = 256 * 1024
MAX_FRAME_BYTES = 4 << 20
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
        """Size on the wire in bytes."""
        return HEADER_BYTES + self.data.nbytes


def encode(transfer: Transfer, start: int, data: Iterable[memoryview]) -> bytes:
    """Encode a frame of a transfer; `data` holds its bytes from block `start` on, in order, and is copied once."""
    pieces = list(data)
    head = _HEAD.pack(b"FC", MAJOR, 0, transfer.digest, start, transfer.blocks)
    return b"".join([head, _checksum([head, *pieces]), *pieces])


def is_frame(data: bytes) -> bool:
    """Distinguish a frame from a message by its first two bytes."""
    return data[:2] == b"FC"


def decode(data: bytes) -> Frame:
    """Decode one frame; its data is a view.

    Raises:
        WireError: It is not a frame of our version, is too long, or its checksum is wrong.
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
    if _checksum([view[: _HEAD.size], body]) != view[_HEAD.size : HEADER_BYTES]:
        raise WireError(f"frame at block {start}: checksum does not hold", reason="checksum")
    return Frame(digest, start, count, body)


def _checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return _CHECKSUM.pack(state.intdigest())


def check_transfer(transfer: Transfer, *, limit: int, remedy: str = "") -> None:
    """Refuse a transfer with implausible sizes, before memory is allocated.

    Args:
        limit: Most bytes of a payload.
        remedy: Advice for a larger payload, for the error.

    Raises:
        WireError: Its size is above `limit` or its frame size is invalid.
    """
    if len(transfer.digest) != DIGEST_BYTES:
        raise WireError(f"digest of {len(transfer.digest)} bytes, {DIGEST_BYTES} are needed")
    if not 0 < transfer.size <= limit:
        problem = f"payload of {transfer.size} bytes, the limit is {limit}"
        raise WireError(f"{problem}; {remedy}" if remedy else problem, reason="oversized")
    if not is_frame_size(transfer.frame_bytes):
        raise WireError(f"frames of {transfer.frame_bytes} bytes", reason="oversized")


def is_frame_size(frame_bytes: int) -> bool:
    """Check that a frame payload is a whole number of blocks within the limits."""
    return BLOCK_BYTES <= frame_bytes <= MAX_FRAME_BYTES and frame_bytes % BLOCK_BYTES == 0


def largest_frame(frame_bytes: int, max_payload_bytes: int) -> int:
    """Return the payload bytes per frame where messages may have `max_payload_bytes`."""
    room = (max_payload_bytes - HEADER_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    return max(BLOCK_BYTES, min(frame_bytes, room))


def pieces(want: Want, transfer: Transfer, most_bytes: int) -> list[tuple[int, int]]:
    """Cut requested blocks into runs, one per frame, at most `MAX_WINDOW` of them.

    Args:
        most_bytes: The sender's limit of a frame.

    Raises:
        WireError: The ranges are not ascending, overlap, are too many or beyond the payload; or the frame size is
            invalid.
    """
    if not is_frame_size(want.frame_bytes):
        raise WireError(f"frames of {want.frame_bytes} bytes are wanted", reason="shape")
    if len(want.ranges) > MAX_WINDOW:
        raise WireError(f"{len(want.ranges)} ranges are wanted, at most {MAX_WINDOW} are sent at once", reason="shape")
    frame, end = min(want.frame_bytes, most_bytes) // BLOCK_BYTES, 0
    runs: list[tuple[int, int]] = []
    for start, stop in want.ranges:
        if not end <= start < stop <= transfer.blocks:
            raise WireError(f"blocks {start} to {stop} of {transfer.blocks}, after {end}", reason="shape")
        starts = range(start, stop, frame)[: MAX_WINDOW - len(runs)]
        runs.extend((begin, min(begin + frame, stop)) for begin in starts)
        end = stop
    return runs
