"""Frames: what is damaged is noticed, what is insane is refused, and what is lost is asked for until all is here."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import chunks
from shared.chunks import HEADER_BYTES, MAX_FRAME_BYTES, MIN_FRAME_BYTES, Assembly, Frame
from shared.errors import WireError
from shared.messages import Transfer
from shared.payload import Scattered

MANY = settings(max_examples=150, derandomize=True, deadline=None)
DIGEST = bytes(range(16))


def transfer(size: int, frame_bytes: int = 10) -> Transfer:
    return Transfer(digest=DIGEST, size=size, frame_bytes=frame_bytes)


def piece(of: Transfer, index: int) -> Frame:
    """Return frame `index` as it comes out of `decode`."""
    length = min(of.frame_bytes, of.size - index * of.frame_bytes)
    return Frame(of.digest, index, of.count, memoryview(bytes(length)))


def reason_of(function, *args, **kwargs) -> str:
    with pytest.raises(WireError) as caught:
        function(*args, **kwargs)
    return caught.value.reason


@MANY
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5), st.integers(1, 40))
def test_frames_carry_a_payload(parts, frame_bytes):
    """Cut from scattered parts, decoded and laid in a row, the frames are the payload; their data are views."""
    source = Scattered([memoryview(part) for part in parts])
    whole = transfer(source.size, frame_bytes)
    encoded = [chunks.encode(whole, i, source.read(i * frame_bytes, frame_bytes)) for i in range(whole.count)]
    frames = [chunks.decode(data) for data in encoded]
    assert b"".join(frame.data for frame in frames) == b"".join(parts)
    assert [(frame.digest, frame.index, frame.count) for frame in frames] == [
        (DIGEST, index, whole.count) for index in range(whole.count)
    ]
    assert all(frame.data.obj is data for frame, data in zip(frames, encoded, strict=True))
    assert all(len(data) == HEADER_BYTES + frame.data.nbytes for frame, data in zip(frames, encoded, strict=True))


def test_every_changed_bit_is_noticed():
    """Header, checksum and data alike: no single flipped bit of a frame gets through."""
    data = chunks.encode(transfer(25), 2, [memoryview(b"abcde")])
    assert chunks.is_frame(data)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        expected = {0: "malformed", 1: "malformed", 2: "version"}.get(bit // 8, "checksum")
        assert reason_of(chunks.decode, bytes(damaged)) == expected


def test_truncated_and_oversized():
    """Shorter than a header, cut in the data, longer than any frame: the last is refused before it is checked."""
    data = chunks.encode(transfer(25), 2, [memoryview(b"abcde")])
    for length in range(len(data)):
        assert reason_of(chunks.decode, data[:length]) == ("truncated" if length < HEADER_BYTES else "checksum")
    largest = chunks.encode(transfer(MAX_FRAME_BYTES, MAX_FRAME_BYTES), 0, [memoryview(bytes(MAX_FRAME_BYTES))])
    assert chunks.decode(largest).data.nbytes == MAX_FRAME_BYTES
    assert reason_of(chunks.decode, largest + b"\0") == "oversized"


def test_another_version_with_a_right_checksum():
    head = struct.pack("<2sBB16sII", b"FC", 2, 0, DIGEST, 0, 1)
    assert reason_of(chunks.decode, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))) == "version"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": 0}, "oversized"),
        ({"size": -1}, "oversized"),
        ({"size": 1_000_001}, "oversized"),
        ({"frame_bytes": 0}, "oversized"),
        ({"frame_bytes": -5}, "oversized"),
        ({"frame_bytes": MIN_FRAME_BYTES - 1}, "oversized"),
        ({"frame_bytes": MAX_FRAME_BYTES + 1}, "oversized"),
        ({"digest": b""}, "malformed"),
        ({"digest": bytes(17)}, "malformed"),
    ],
    ids=repr,
)
def test_check_refuses_what_nobody_should_allocate(change, reason):
    fields = {"digest": DIGEST, "size": 1_000_000, "frame_bytes": MIN_FRAME_BYTES} | change
    chunks.check(Transfer(digest=DIGEST, size=1_000_000, frame_bytes=MIN_FRAME_BYTES), limit=1_000_000)
    assert reason_of(chunks.check, Transfer(**fields), limit=1_000_000) == reason


@settings(max_examples=120, derandomize=True, deadline=None)
@given(st.integers(1, 400), st.integers(1, 20), st.randoms(use_true_random=True))
def test_assembly_completes_through_loss_disorder_and_duplicates(size, window, random):
    """A receiver that asks, gets a random part of it in random order, some twice, and forgets on silence.

    It never has more than its window under way, never asks for what it has, and ends with every frame exactly once.
    """
    whole = transfer(size)
    assembly, have, rounds = Assembly(whole), set(), 0
    under_way: set[int] = set()
    while not assembly.complete:
        rounds += 1
        asked = [index for start, stop in assembly.ask(window) for index in range(start, stop)]
        under_way |= set(asked)
        assert len(under_way) <= window
        assert not have & set(asked)
        assert len(set(asked)) == len(asked)
        sent = [index for index in asked if random.random() > 0.4] * random.choice([1, 2])
        random.shuffle(sent)
        for index in sent:
            assert assembly.accept(piece(whole, index)) == (index not in have)
            have.add(index)
        under_way -= have
        if not sent:
            assembly.forget()
            under_way.clear()
        assert assembly.lacking == whole.count - len(have)
        assert rounds < 2000
    assert have == set(range(whole.count))
    assert assembly.ask(window) == []


def test_assembly_asks_again_only_at_half_a_window():
    """With a window of 4: nothing more until two have come, then two more. A frame nobody asked for counts as well."""
    whole = transfer(100)
    assembly = Assembly(whole)
    assert assembly.ask(4) == [(0, 4)]
    assert assembly.accept(piece(whole, 1))
    assert assembly.ask(4) == []
    assert assembly.accept(piece(whole, 0))
    assert assembly.accept(piece(whole, 5))
    assert assembly.ask(4) == [(4, 5), (6, 7)]
    assembly.forget()
    assert assembly.ask(4) == [(2, 5), (6, 7)]


def test_assembly_begins_small_and_begins_again_after_silence():
    """Windows of 4, 8, then the 10 that are allowed, filled up when half has come; after silence and forgetting, 4."""
    whole = transfer(1000)
    assembly = Assembly(whole)
    under_way = []
    for _ in range(4):
        assembly.ask(10)
        under_way.append(len(assembly._asked))
        for index in sorted(assembly._asked):
            assembly.accept(piece(whole, index))
    assert under_way == [4, 8, 10, 10]
    assert assembly.ask(10) == [(32, 42)]
    for index in range(32, 36):
        assembly.accept(piece(whole, index))
    assert assembly.ask(10) == []
    assembly.accept(piece(whole, 36))
    assert assembly.ask(10) == [(42, 47)]
    assembly.forget()
    assert assembly.ask(10) == [(37, 41)]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Frame(DIGEST, 3, 3, memoryview(bytes(5))), "shape"),
        (Frame(DIGEST, (1 << 32) - 1, 3, memoryview(bytes(5))), "shape"),
        (Frame(DIGEST, 2, 4, memoryview(bytes(5))), "shape"),
        (Frame(DIGEST, 2, 3, memoryview(bytes(10))), "truncated"),
        (Frame(DIGEST, 2, 3, memoryview(bytes(4))), "truncated"),
        (Frame(DIGEST, 0, 3, memoryview(bytes(11))), "truncated"),
    ],
)
def test_a_frame_that_does_not_fit_changes_nothing(frame, reason):
    """25 bytes in frames of 10 are 10, 10 and 5: any other index, count or length is refused."""
    assembly = Assembly(transfer(25))
    assert reason_of(assembly.accept, frame) == reason
    assert assembly.lacking == 3


@MANY
@given(st.sets(st.integers(0, 60)))
def test_ranges_and_back(indices):
    """Ascending indices as ranges, no two of which touch, and back."""
    ranges = chunks.to_ranges(sorted(indices))
    assert chunks.from_ranges(ranges, 61, limit=100) == sorted(indices)
    assert all(before[1] < after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize("bad", [(-1, 2), (2, 2), (3, 2), (0, 11), (10, 11), (0, 1 << 63), (-(1 << 63), 0)])
def test_ranges_that_name_nothing(bad):
    assert reason_of(chunks.from_ranges, [bad], 10, limit=100) == "shape"
    assert reason_of(chunks.from_ranges, [(0, 1), bad], 10, limit=100) == "shape"


def test_hostile_ranges_are_cut_at_the_limit():
    """A huge range, or the same one a million times: at most `limit` indices, and no memory for more."""
    tracemalloc.start()
    try:
        assert chunks.from_ranges([(5, 1 << 60)], 1 << 60, limit=3) == [5, 6, 7]
        assert chunks.from_ranges(((0, 2) for _ in range(1_000_000)), 10, limit=5) == [0, 1, 0, 1, 0]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
