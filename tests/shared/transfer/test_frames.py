"""Frames: damage detected, absurd headers refused, losses requested again."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Transfer, Want
from shared.protocol.payload import Scattered
from shared.transfer import frames as chunks
from shared.transfer.frames import HEADER_BYTES, MAX_FRAME_BYTES, Frame
from shared.transfer.receiver import Assembly

MANY = settings(max_examples=150, derandomize=True, deadline=None)
DIGEST = bytes(range(16))


def transfer(blocks: float, frame_blocks: int = 1) -> Transfer:
    return Transfer(digest=DIGEST, size=int(blocks * BLOCK_BYTES), frame_bytes=frame_blocks * BLOCK_BYTES)


def piece(of: Transfer, start: int, stop: int | None = None) -> Frame:
    """Return the frame of blocks `start` to `stop`, one block by default, as it comes out of `decode`."""
    stop = start + 1 if stop is None else stop
    length = min(stop * BLOCK_BYTES, of.size) - start * BLOCK_BYTES
    return Frame(of.digest, start, of.blocks, memoryview(bytes(length)))


def wanted(ranges, frame_blocks: int = 1) -> Want:
    return Want(digest=DIGEST, frame_bytes=frame_blocks * BLOCK_BYTES, ranges=ranges)


@MANY
@given(st.lists(st.binary(max_size=2500), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 4))
def test_frames_carry_a_payload(parts, frame_blocks, sent_blocks):
    """Cut from scattered parts, in smaller frames than announced or not, and laid in a row, they are the payload."""
    source = Scattered([memoryview(part) for part in parts])
    whole = Transfer(digest=DIGEST, size=source.size, frame_bytes=frame_blocks * BLOCK_BYTES)
    cut = chunks.pieces(wanted([(0, whole.blocks)], frame_blocks), whole, sent_blocks * BLOCK_BYTES)
    encoded = [chunks.encode(whole, a, source.read(a * BLOCK_BYTES, (b - a) * BLOCK_BYTES)) for a, b in cut]
    frames = [chunks.decode(data) for data in encoded]
    assert b"".join(frame.data for frame in frames) == b"".join(parts)
    assert [(frame.digest, frame.start, frame.count) for frame in frames] == [
        (DIGEST, start, whole.blocks) for start in range(0, whole.blocks, min(frame_blocks, sent_blocks))
    ]
    assert all(frame.data.obj is data for frame, data in zip(frames, encoded, strict=True))
    assert all(len(data) == HEADER_BYTES + frame.data.nbytes for frame, data in zip(frames, encoded, strict=True))


def test_the_largest_frame_is_read():
    largest = chunks.encode(transfer(4096, 4096), 0, [memoryview(bytes(MAX_FRAME_BYTES))])
    assert chunks.is_frame(largest)
    assert chunks.decode(largest).data.nbytes == MAX_FRAME_BYTES


@settings(max_examples=120, derandomize=True, deadline=None)
@given(
    blocks=st.floats(0.01, 60),
    window=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 32),
)
def test_assembly_completes_through_loss_disorder_duplicates_and_restarts(blocks, window, sizes, seed):
    """A receiver that asks, gets a random part of it in random order, some twice, forgets on silence, and is restarted.

    The frame size changes on the way. It never has more than its window under way, never asks for what it has, and ends
    with every block.
    """
    whole = transfer(max(blocks, 1 / BLOCK_BYTES))
    assembly, have, rounds, random = Assembly(whole), set(), 0, Random(seed)
    under_way: set[int] = set()
    while not assembly.complete:
        rounds += 1
        frame = random.choice(sizes)
        ranges = assembly.ask(window, frame * BLOCK_BYTES)
        asked = {block for start, stop in ranges for block in range(start, stop)}
        assert sum(stop - start for start, stop in ranges) == len(asked)
        assert not asked & (have | under_way)
        under_way |= asked
        assert not asked or len(under_way) <= window * frame
        cut = chunks.pieces(wanted(ranges, frame), whole, BLOCK_BYTES * random.choice(sizes))
        sent = [one for one in cut if random.random() > 0.4] * random.choice([1, 2])
        random.shuffle(sent)
        for start, stop in sent:
            new = set(range(start, stop)) - have
            assert assembly.accept(piece(whole, start, stop)) == bool(new)
            have |= new
        under_way -= have
        if random.random() < 0.1:
            assembly = Assembly(whole, bytes(block in have for block in range(whole.blocks)))
            under_way.clear()
        elif not sent:
            assembly.forget()
            under_way.clear()
        assert assembly.lacking == whole.blocks - len(have)
        assert rounds < 5000
    assert have == set(range(whole.blocks))
    assert assembly.ask(window, BLOCK_BYTES) == []


def test_assembly_asks_again_only_at_half_a_window():
    """With a window of 4: nothing more until two have come, then two more. A block nobody asked for counts as well."""
    whole = transfer(10)
    assembly = Assembly(whole)
    assembly.expect(0)  # past its beginning
    assert assembly.ask(4, BLOCK_BYTES) == [(0, 4)]
    assert assembly.accept(piece(whole, 1))
    assert assembly.ask(4, BLOCK_BYTES) == []
    assert assembly.accept(piece(whole, 0))
    assert assembly.accept(piece(whole, 5))
    assert assembly.ask(4, BLOCK_BYTES) == [(4, 5), (6, 7)]
    assembly.forget()
    assert assembly.ask(4, BLOCK_BYTES) == [(2, 3)]


def test_assembly_begins_small_and_begins_again_after_silence():
    """Windows of 1, 2, 4, 8, then the 10 that are allowed, filled up when half has come; after silence, 1 again."""
    whole = transfer(1000, 10)
    assembly = Assembly(whole)
    starts = []
    for _ in range(5):
        ((start, stop),) = assembly.ask(10, whole.frame_bytes)
        starts.append((start, stop))
        for block in range(start, stop, 10):
            assembly.accept(piece(whole, block, block + 10))
    assert starts == [(0, 10), (10, 30), (30, 70), (70, 150), (150, 250)]
    assert assembly.ask(10, whole.frame_bytes) == [(250, 350)]
    for block in range(250, 290, 10):
        assembly.accept(piece(whole, block, block + 10))
    assert assembly.ask(10, whole.frame_bytes) == []
    assembly.accept(piece(whole, 290, 300))
    assert assembly.ask(10, whole.frame_bytes) == [(350, 400)]
    assembly.forget()
    assert assembly.ask(10, whole.frame_bytes) == [(300, 310)]


def test_what_is_asked_for_ends_where_a_common_frame_does():
    """After an odd piece came alone, the others are again those that everybody asks for: multiples of the frame."""
    whole = transfer(100, 8)
    assembly = Assembly(whole)
    assembly.expect(0)  # past its beginning
    assembly.accept(piece(whole, 0, 3))
    assert assembly.ask(2, whole.frame_bytes) == [(3, 16)]
    for start, stop in ((3, 8), (8, 16)):
        assembly.accept(piece(whole, start, stop))
    assert assembly.ask(2, whole.frame_bytes) == [(16, 32)]


def test_hostile_ranges_are_cut_at_the_limit():
    """A huge range is at most 64 frames; the same one a hundred thousand times is refused; no memory for more."""
    huge, again = wanted([(5, 1 << 40)]), wanted([(0, 2)] * 100_000)
    tracemalloc.start()
    try:
        assert chunks.pieces(huge, transfer(1 << 40), BLOCK_BYTES) == [(n, n + 1) for n in range(5, 69)]
        with pytest.raises(WireError):
            chunks.pieces(again, transfer(10), BLOCK_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("frame_bytes", "message_bytes", "largest"),
    [(256 << 10, 1 << 30, 256 << 10), (256 << 10, 65_536, 63 << 10), (1024, 1 << 20, 1024), (256 << 10, 10, 1024)],
)
def test_the_largest_frame_leaves_room_for_its_header(frame_bytes, message_bytes, largest):
    """Whole blocks, what the broker takes; never none, so that the refusal is the broker's to give."""
    assert chunks.largest_frame(frame_bytes, message_bytes) == largest


def test_a_payload_full_of_holes_is_asked_for_in_few_ranges():
    """Every second block is here, as a hostile sender may arrange: a Want stays a small message, and asking goes on."""
    whole = transfer(100_000, 4096)
    assembly = Assembly(whole, bytes([0, 1]) * 50_000)
    assembly.expect(0)  # past its beginning
    ranges = assembly.ask(16, whole.frame_bytes)
    assert ranges == [(start, start + 1) for start in range(0, 128, 2)]
    for start, stop in ranges:
        assembly.accept(piece(whole, start, stop))
    assert assembly.ask(16, whole.frame_bytes)[0] == (128, 129)
