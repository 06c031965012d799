"""Frames: read, checked against a transfer, and written where they belong in a spool's file, or in memory.

An input is a few frames in a row: a byte that names the transfer, and how much of it was announced unasked, then each
frame behind its length in three bytes.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from random import Random

import xxhash

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Transfer
from shared.protocol.payload import digest
from shared.transfer import frames as chunks
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.to_file import NOTED_BYTES, FileSink
from tests.fuzz.trees import cut_and_spliced
from tests.fuzz.wires import golden

HEAD = struct.Struct("<2sBB16sII")
SIZES = (1, 1024, 5000, (1 << 20) + 1500)
"""Bytes of the transfers; the last is noted on disk, block by block."""
TRANSFERS = [Transfer(digest=bytes([size % 251]) * 16, size=size, frame_bytes=1024) for size in SIZES]
MOST = 4
POLICY = Policy(64, 1.0, 2 * NOTED_BYTES, frame_bytes=1024)


@cache
def folder() -> Path:
    """Return a folder for the spools of this process, in memory where there is one."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
    place = tempfile.TemporaryDirectory(prefix="fieldfleet-fuzz-", dir=memory if memory.is_dir() else None)
    KEPT.append(place)
    return Path(place.name)


KEPT: list[tempfile.TemporaryDirectory[str]] = []


def spooled(transfer: Transfer) -> Receiver[FileSink]:
    """Return a receiver into the file of this process, as far as that has come."""
    return Receiver(transfer, partial(FileSink, folder() / "spool"), POLICY, POLICY.pace(0.0), 0.0)


def frame(transfer: Transfer, start: int, blocks: int) -> bytes:
    """Return an honest frame: each byte of a transfer is a function of its place."""
    begin, end = start * BLOCK_BYTES, min((start + blocks) * BLOCK_BYTES, transfer.size)
    return chunks.encode(transfer, start, [memoryview(bytes([start % 256]) * (end - begin))])


def row(transfer: int, frames: list[bytes]) -> bytes:
    """Return frames as one input."""
    return bytes([transfer]) + b"".join(len(one).to_bytes(3, "little") + one for one in frames)


def cut(data: bytes) -> Iterator[bytes]:
    """Yield the frames of an input."""
    place = 1
    for _ in range(MOST):
        if place >= len(data):
            return
        length = int.from_bytes(data[place : place + 3], "little")
        yield data[place + 3 : place + 3 + length]
        place += 3 + length


def seeds() -> list[bytes]:
    """Return every frame of a transfer in order, some twice, overlapping ones, one of the last, and the golden one."""
    five = TRANSFERS[2]
    return [
        row(0, [golden()["frame"], frame(TRANSFERS[0], 0, 1)]),
        row(1, [frame(TRANSFERS[1], 0, 1)]),
        row(2, [frame(five, start, 1) for start in (0, 1, 2, 4)]),
        row(2, [frame(five, 3, 2), frame(five, 0, 4), frame(five, 3, 2)]),
        row(2 + 3 * len(TRANSFERS), [frame(five, 0, 3), frame(five, 4, 1)]),
        row(3, [frame(TRANSFERS[3], 0, 3), frame(TRANSFERS[3], 1024, 2)]),
    ]


def read(data: bytes) -> str:
    """Frames or WireErrors; what was accepted stands in the file, and what lacks is counted right."""
    transfer = TRANSFERS[(data[0] if data else 0) % len(TRANSFERS)]
    spool = spooled(transfer)
    here = bytearray(transfer.blocks)
    try:
        words = [_written(spool, transfer, one, here) for one in cut(data)]
        assert spool.lacking == here.count(0)
        assert spool.complete == (0 not in here)
        want = spool.want(4)
        asked = want.ranges if want else []
        assert all(0 <= start < stop <= transfer.blocks and 1 not in here[start:stop] for start, stop in asked)
        assert spool.sink.path.stat().st_size == transfer.size
        if transfer.size >= NOTED_BYTES:
            spool.sink.close()
            spool = spooled(transfer)
            assert spool.lacking == here.count(0)
        if transfer.size < NOTED_BYTES:
            _in_memory(transfer, data, here)
    finally:
        spool.sink.remove()
    return ", ".join(words) or "nothing"


def _in_memory(transfer: Transfer, data: bytes, here: bytearray) -> None:
    """The same blocks come as in the file, whatever was announced, and after a silence what lacks is asked for."""
    pushed = data[0] // len(TRANSFERS) if data else 0
    receiving = Receiver(transfer, MemorySink, POLICY, POLICY.pace(0.0), 0.0, pushed=pushed)
    for one in cut(data):
        with suppress(WireError):
            receiving.take(chunks.decode(one), 0.0)
    assert receiving.complete == (0 not in here)
    receiving.time_out(0.0)
    want = receiving.want(4)
    assert (want is None) == receiving.complete
    assert all(1 not in here[start:stop] for start, stop in (want.ranges if want else ()))
    if receiving.complete:
        with suppress(WireError):
            assert digest([receiving.finish()]) == transfer.digest


def _written(spool: Receiver[FileSink], transfer: Transfer, data: bytes, here: bytearray) -> str:
    try:
        found = chunks.decode(data)
        again = chunks.encode(
            Transfer(digest=found.digest, size=max(1, found.count) * BLOCK_BYTES, frame_bytes=1024),
            found.start,
            [found.data],
        )
        assert not found.count or chunks.decode(again) == found
        if found.digest != transfer.digest:
            return "of another transfer"
        new = spool.take(found, 0.0)
    except WireError as error:
        return error.reason
    stop = found.start - -len(found.data) // BLOCK_BYTES
    assert found.start < stop <= transfer.blocks
    assert new == (0 in here[found.start : stop])
    here[found.start : stop] = b"\1" * (stop - found.start)
    if new:
        with spool.sink.path.open("rb") as file:
            file.seek(found.start * BLOCK_BYTES)
            assert file.read(len(found.data)) == found.data
    return "accepted: new" if new else "accepted: again"


def single_seeds() -> list[bytes]:
    """Return a frame of a few bytes, and the golden one."""
    return [chunks.encode(TRANSFERS[2], 4, [memoryview(b"abcde")]), golden()["frame"]]


def read_single(data: bytes) -> str:
    """A frame or a WireError."""
    try:
        found = chunks.decode(data)
    except WireError as error:
        return f"{error.reason}: {error}"
    assert found.size == len(data)
    return "accepted: frame"


def mutate(data: bytes, random: Random) -> bytes:
    """Damage one frame, mostly with a checksum that holds; or repeat, drop and shuffle frames; or damage the bytes."""
    frames = list(cut(data)) or [golden()["frame"]]
    place = random.randrange(len(frames))
    match random.randrange(8):
        case 0:
            return cut_and_spliced(data, random)
        case 1:
            frames.insert(place, random.choice(frames))
        case 2:
            random.shuffle(frames)
        case 3:
            del frames[place]
        case 4:
            transfer = TRANSFERS[data[0] % len(TRANSFERS)] if data else TRANSFERS[0]
            frames.insert(place, frame(transfer, random.randrange(transfer.blocks), random.choice((1, 1, 2, 3))))
        case _:
            frames[place] = _forged(frames[place], random)
    return row(data[0] if random.random() < 0.9 and data else random.randrange(4), frames)


def _forged(data: bytes, random: Random) -> bytes:
    """Change a field of the header or the length, and make the checksum hold again."""
    if len(data) < chunks.HEADER_BYTES or random.random() < 0.2:
        return cut_and_spliced(data, random)
    fields, body = list(HEAD.unpack_from(data)), data[chunks.HEADER_BYTES :]
    match random.randrange(6):
        case 0:
            fields[3] = random.choice(TRANSFERS).digest
        case 1 | 2:
            fields[4] = random.choice((0, 1, 4, 5, fields[4] ^ 1, (1 << 32) - 1, random.getrandbits(32)))
        case 3:
            fields[5] = random.choice((0, 1, 5, *(one.blocks for one in TRANSFERS), random.getrandbits(32)))
        case 4:
            body = random.choice((b"", body[:-1], body + b"x", body * 2, body[:1024], body[:904]))
        case _:
            fields[random.choice((1, 2))] = random.randrange(256)
    head = HEAD.pack(*fields)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body)) + body
