"""A payload received into a real file."""

from __future__ import annotations

import resource
import tracemalloc
from pathlib import Path
from random import Random

import pytest

from shared import chunks, payload
from shared.errors import WireError
from shared.messages import Transfer
from shared.payload import Scattered
from shared.spool import Spool, view

FRAME = 1024


def sent(size: int, seed: int = 1) -> tuple[bytes, Transfer, list[bytes]]:
    """Return a payload, what describes it, and its frames as they come."""
    data = Random(seed).randbytes(size)
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=size, frame_bytes=FRAME)
    source = Scattered([memoryview(data)])
    return data, transfer, [chunks.encode(transfer, i, source.read(i * FRAME, FRAME)) for i in range(transfer.count)]


def fill(spool: Spool, frames: list[bytes]) -> list[bool]:
    return [spool.write(chunks.decode(frame), len(frame)) for frame in frames]


@pytest.mark.parametrize("size", [1, FRAME, FRAME + 1, 10 * FRAME - 1])
def test_frames_in_any_order_and_twice(tmp_path, size):
    """The file is the payload; bytes on the wire are counted with headers and duplicates."""
    data, transfer, frames = sent(size)
    spool = Spool(tmp_path / "params", transfer)
    assert fill(spool, frames[::-1]) == [True] * len(frames)
    assert fill(spool, frames) == [False] * len(frames)
    assert spool.assembly.complete
    spool.sync()
    spool.finish()
    assert view(tmp_path / "params") == data
    assert spool.bytes_received == 2 * sum(map(len, frames))


@pytest.mark.parametrize("earlier", [100, 5 * FRAME, 50 * FRAME])
def test_what_an_earlier_payload_left_does_not_show(tmp_path, earlier):
    """The same path, used again for a longer or a shorter payload, holds exactly the new one."""
    for seed, size in ((1, earlier), (2, 5 * FRAME + 7)):
        data, transfer, frames = sent(size, seed)
        spool = Spool(tmp_path / "params", transfer)
        fill(spool, frames)
        spool.finish()
        assert (tmp_path / "params").read_bytes() == data


def test_a_damaged_payload_is_gone(tmp_path):
    """All frames came and their checksums hold, but the whole is not what the digest says: refused, nothing is left."""
    _, transfer, _ = sent(3 * FRAME)
    _, other, wrong = sent(3 * FRAME, seed=2)
    spool = Spool(tmp_path / "params", transfer)
    fill(spool, wrong)
    assert spool.assembly.complete
    with pytest.raises(WireError, match="params: digest does not hold") as caught:
        spool.finish()
    assert caught.value.reason == "digest"
    assert not (tmp_path / "params").exists()
    again = Spool(tmp_path / "params", other)
    fill(again, wrong)
    again.finish()


def test_an_incomplete_payload_is_not_taken(tmp_path):
    """Zeros where a frame lacks are not the payload, even if somebody calls finish too early."""
    _, transfer, frames = sent(3 * FRAME)
    spool = Spool(tmp_path / "params", transfer)
    fill(spool, frames[:2])
    with pytest.raises(WireError):
        spool.finish()


def test_a_frame_of_another_transfer_writes_nothing(tmp_path):
    """It is refused before the file is touched, but its bytes did come and are counted."""
    _, transfer, frames = sent(3 * FRAME)
    _, _, longer = sent(4 * FRAME, seed=2)
    spool = Spool(tmp_path / "params", transfer)
    fill(spool, frames[:1])
    before = (tmp_path / "params").read_bytes()
    with pytest.raises(WireError):
        fill(spool, longer[3:])
    spool.close()
    assert (tmp_path / "params").read_bytes() == before
    assert spool.bytes_received == len(frames[0]) + len(longer[3])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_full_disk_is_an_os_error_and_close_may_be_called_twice(tmp_path):
    """The kernel refuses files beyond 4 KiB: the caller sees OSError, and every descriptor is given back."""
    _, transfer, _ = sent(64 * FRAME)
    descriptors = open_files()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            Spool(tmp_path / "params", transfer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    spool = Spool(tmp_path / "params", transfer)
    spool.close()
    spool.close()
    assert open_files() == descriptors


def test_memory_does_not_grow_with_the_payload(tmp_path):
    """8 MiB pass through; the interpreter never holds more than some frames of them."""
    _, transfer, frames = sent(8 << 20)
    tracemalloc.start()
    try:
        spool = Spool(tmp_path / "params", transfer)
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
