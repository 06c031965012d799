"""A payload received into a real file."""

from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from functools import partial
from pathlib import Path
from random import Random

import pytest

from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import BLOCK_BYTES, Transfer
from shared.protocol.payload import Scattered
from shared.transfer import frames as chunks
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.to_file import FileSink, view

FRAME = 1024


def sent(size: int, seed: int = 1, frame_bytes: int = FRAME) -> tuple[bytes, Transfer, list[bytes]]:
    """Return a payload, what describes it, and its frames as they come."""
    data = Random(seed).randbytes(size)
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=size, frame_bytes=frame_bytes)
    source, starts = Scattered([memoryview(data)]), range(0, transfer.blocks, frame_bytes // BLOCK_BYTES)
    return data, transfer, [chunks.encode(transfer, i, source.read(i * BLOCK_BYTES, frame_bytes)) for i in starts]


def spooled(path: Path, transfer: Transfer) -> Receiver[FileSink]:
    policy = Policy(64, 2.0, 1 << 30)
    return Receiver(transfer, partial(FileSink, path), policy, policy.pace(0.0, small=False), 0.0)


def fill(spool: Receiver[FileSink], frames: list[bytes]) -> list[bool]:
    return [spool.take(chunks.decode(frame), 0.0) for frame in frames]


@pytest.mark.parametrize("size", [1, FRAME, FRAME + 1, 10 * FRAME - 1])
def test_frames_in_any_order_and_twice(tmp_path, size):
    """The file is the payload; bytes on the wire are counted with headers and duplicates."""
    data, transfer, frames = sent(size)
    spool = spooled(tmp_path / "params", transfer)
    assert fill(spool, frames[::-1]) == [True] * len(frames)
    assert fill(spool, frames) == [False] * len(frames)
    assert spool.complete
    spool.sink.sync()
    spool.finish()
    assert view(tmp_path / "params") == data
    assert spool.bytes_received == 2 * sum(map(len, frames))


@pytest.mark.parametrize("earlier", [100, 5 * FRAME, 50 * FRAME])
def test_what_an_earlier_payload_left_does_not_show(tmp_path, earlier):
    """The same path, used again for a longer or a shorter payload, holds exactly the new one."""
    for seed, size in ((1, earlier), (2, 5 * FRAME + 7)):
        data, transfer, frames = sent(size, seed)
        spool = spooled(tmp_path / "params", transfer)
        fill(spool, frames)
        spool.finish()
        assert (tmp_path / "params").read_bytes() == data


def test_an_incomplete_payload_is_not_taken(tmp_path):
    """Zeros where a frame lacks are not the payload, even if somebody calls finish too early."""
    _, transfer, frames = sent(3 * FRAME)
    spool = spooled(tmp_path / "params", transfer)
    fill(spool, frames[:2])
    with pytest.raises(WireError):
        spool.finish()


LARGE, LARGE_FRAME = (2 << 20) + 333, 64 * 1024


def test_another_process_goes_on_where_this_one_was_killed(tmp_path):
    """After `kill -9` at a random frame, and again, with frames of another size: only what lacks is asked for."""
    data, transfer, frames = sent(LARGE, frame_bytes=LARGE_FRAME)
    path, random, written = tmp_path / "params", Random(4), 0
    while True:
        spool = spooled(path, transfer)
        assert spool.lacking == transfer.blocks - written * LARGE_FRAME // BLOCK_BYTES
        if written >= len(frames) // 2:
            break
        several = random.randint(1, 6)
        if (child := os.fork()) == 0:
            fill(spool, frames[written : written + several])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        spool.sink.close()
        written += several
    ((start, stop),) = spool.want().ranges
    assert start == written * LARGE_FRAME // BLOCK_BYTES
    assert stop <= transfer.blocks
    smaller = sent(LARGE, frame_bytes=16 * 1024)[2]
    assert any(fill(spool, smaller[4 * written :]))
    spool.finish()
    assert view(path) == data


def test_a_payload_that_is_all_here_is_asked_for_no_more(tmp_path):
    _, transfer, frames = sent(LARGE, frame_bytes=LARGE_FRAME)
    first = spooled(tmp_path / "params", transfer)
    fill(first, frames)
    first.finish()
    again = spooled(tmp_path / "params", transfer)
    assert again.complete
    again.finish()


@pytest.mark.parametrize("between", [LARGE, 10_000])
def test_what_is_known_of_one_payload_says_nothing_of_the_next(tmp_path, between):
    """A large or a small one came in between and overwrote the file: the first is fetched anew, from its start."""
    data, transfer, frames = sent(LARGE, frame_bytes=LARGE_FRAME)
    _, other, others = sent(between, seed=2, frame_bytes=LARGE_FRAME)
    path = tmp_path / "params"
    for one, its in ((transfer, frames), (other, others)):
        spool = spooled(path, one)
        fill(spool, its)
        spool.finish()
    spool = spooled(path, transfer)
    assert spool.lacking == transfer.blocks
    fill(spool, frames)
    spool.finish()
    assert view(path) == data


def test_a_note_of_another_payload_is_forgotten_for_the_next_process_too(tmp_path):
    """All of one is here, another begins and its process ends at once: whoever goes on with that lacks everything."""
    _, transfer, frames = sent(LARGE, frame_bytes=LARGE_FRAME)
    _, other, _ = sent(LARGE, seed=2, frame_bytes=LARGE_FRAME)
    path = tmp_path / "params"
    fill(spooled(path, transfer), frames)
    for _ in range(2):
        spool = spooled(path, other)
        assert spool.lacking == other.blocks
        spool.sink.close()


def damage_note(note: Path, how: str, path: Path) -> None:
    """Do to the note or to the file what a torn disk may."""
    body = note.read_bytes()
    match how:
        case "cut":
            note.write_bytes(body[: len(body) // 2])
        case "longer":
            note.write_bytes(body + b"\1")
        case "other bytes":
            note.write_bytes(body[:-5] + b"\7" + body[-4:])
        case "empty":
            note.write_bytes(b"")
        case "gone":
            note.unlink()
        case "a shorter file":
            os.truncate(path, 5000)
        case "no file":
            path.unlink()


@pytest.mark.parametrize("how", ["cut", "longer", "other bytes", "empty", "gone", "a shorter file", "no file"])
def test_a_note_that_cannot_be_right_is_begun_anew(tmp_path, how):
    data, transfer, frames = sent(LARGE, frame_bytes=LARGE_FRAME)
    path, note = tmp_path / "params", tmp_path / ".params"
    spool = spooled(path, transfer)
    fill(spool, frames[:9])
    spool.sink.close()
    damage_note(note, how, path)
    again = spooled(path, transfer)
    assert again.lacking == transfer.blocks
    fill(again, frames)
    again.finish()
    assert view(path) == data


def test_a_note_that_lies_costs_one_more_transfer(tmp_path):
    """After a power cut the note may say more than the file holds: the digest finds out, and all is fetched anew."""
    data, transfer, frames = sent(LARGE, frame_bytes=LARGE_FRAME)
    path = tmp_path / "params"
    spool = spooled(path, transfer)
    fill(spool, frames[:9])
    spool.sink.close()
    path.write_bytes(bytes(LARGE))
    spool = spooled(path, transfer)
    fill(spool, frames[9:])
    assert spool.complete
    with pytest.raises(WireError, match="digest"):
        spool.finish()
    assert spool.lacking == transfer.blocks
    fill(spool, frames)
    spool.finish()
    assert view(path) == data


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_full_disk_is_an_os_error_and_close_may_be_called_twice(tmp_path):
    """The kernel refuses files beyond 4 KiB: the caller sees OSError; every descriptor and the room are given back."""
    _, transfer, _ = sent(64 * FRAME)
    descriptors = open_files()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            spooled(tmp_path / "params", transfer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    spool = spooled(tmp_path / "params", transfer)
    spool.sink.close()
    spool.sink.close()
    assert open_files() == descriptors


def test_memory_does_not_grow_with_the_payload(tmp_path):
    """8 MiB pass through; the interpreter never holds more than some frames of them."""
    _, transfer, frames = sent(8 << 20)
    tracemalloc.start()
    try:
        spool = spooled(tmp_path / "params", transfer)
        fill(spool, frames)
        spool.finish()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_view_is_lazy_writable_and_private(tmp_path):
    """Tensors made from it may be changed in place; the file stays as it is. An empty file has an empty view."""
    path = tmp_path / "params"
    path.write_bytes(b"abc")
    seen = view(path)
    seen[0] = ord("z")
    assert (bytes(seen), path.read_bytes()) == (b"zbc", b"abc")
    path.write_bytes(b"")
    assert view(path).nbytes == 0
