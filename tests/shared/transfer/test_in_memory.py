"""One payload in memory, from a sender to a receiver that may miss anything on the way."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Room, Transfer
from shared.transfer import frames as chunks
from shared.transfer.frames import HEADER_BYTES
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import SMALLEST_FRAME_BYTES, Pace
from shared.transfer.receiver import Policy, Receiver, room
from shared.transfer.sender import Sender

ROOMY = 8 << 20
FRAME_BYTES = 4 * BLOCK_BYTES
POLICY = Policy(64, 2.0, 8 << 20, frame_bytes=FRAME_BYTES)
DATA = Random(5).randbytes(41 * BLOCK_BYTES + 17)
PARTS = [memoryview(DATA)[:700], memoryview(DATA)[700:30_001], memoryview(DATA)[30_001:]]


def begun(transfer: Transfer, pushed: int = 0, now: float = 0.0, pace: Pace | None = None) -> Receiver[MemorySink]:
    return Receiver(transfer, MemorySink, POLICY, pace or POLICY.pace(now, small=False), now, pushed=pushed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.7), st.integers(0, 50), st.integers(1, 9))
def test_whatever_is_lost_doubled_or_shuffled_the_whole_comes_and_only_what_lacks_is_asked_for(
    seed: int, loss: float, pushed: int, window: int
) -> None:
    """What is under way is never asked for twice without a silence, nor more than the window, or two frames."""
    random, offered = Random(seed), Sender.of_parts(PARTS, FRAME_BYTES)
    told, frames = offered.push(Room(blocks=pushed, frame_bytes=2048), ROOMY)
    assert told == min(pushed, 42)
    receiving, now, air = begun(offered.transfer, told), 0.0, list(frames)
    while not receiving.complete:
        random.shuffle(air)
        for data in air:
            for _ in range(random.choice([1, 1, 2])):
                if random.random() >= loss:
                    receiving.take(chunks.decode(data), now := now + 0.01)
        if not receiving.complete and (want := receiving.want(window)):
            assert sum(stop - start for start, stop in want.ranges) <= max(2, window) * FRAME_BYTES // BLOCK_BYTES
            air = list(offered.answer(want, ROOMY))
        else:
            air = []
            now += receiving.left_s(now)
            receiving.gave_up(now)
    assert receiving.finish() == DATA
    assert not receiving.finish().readonly


def test_what_is_pushed_whole_is_not_asked_for() -> None:
    offered = Sender.of_parts(PARTS, FRAME_BYTES)
    told, frames = offered.push(Room(blocks=1000, frame_bytes=FRAME_BYTES), ROOMY)
    receiving = begun(offered.transfer, told)
    assert receiving.want(16) is None
    sizes = []
    for data in frames:
        sizes.append(len(data) - HEADER_BYTES)
        receiving.take(chunks.decode(data), 0.1)
        assert receiving.want(16) is None
    assert sizes == [FRAME_BYTES] * 10 + [BLOCK_BYTES + 17]
    assert receiving.finish() == DATA
    assert receiving.bytes_received == len(DATA) + 11 * HEADER_BYTES


def test_behind_a_push_the_rest_is_asked_for_at_once_in_a_whole_window() -> None:
    """A sender that was given room knows the link: no window of one frame first."""
    offered = Sender.of_parts(PARTS, FRAME_BYTES)
    told, frames = offered.push(Room(blocks=8, frame_bytes=FRAME_BYTES), ROOMY)
    receiving = begun(offered.transfer, told)
    for data in frames:
        receiving.take(chunks.decode(data), 0.01)
    assert receiving.want(5).ranges == [(8, 28)]


def test_an_offer_again_while_frames_come_has_none_sent_twice() -> None:
    """Behind a link that takes seconds for a push, a sender wonders where its answer is; nothing of it is lost."""
    offered = Sender.of_parts(PARTS, FRAME_BYTES)
    told, frames = offered.push(Room(blocks=20, frame_bytes=FRAME_BYTES), ROOMY)
    receiving = begun(offered.transfer, told)
    data = next(frames)
    receiving.take(chunks.decode(data), 0.1)
    receiving.offered_again(0, 0.2)
    assert receiving.want(5) is None
    receiving.offered_again(0, 0.2 + receiving.left_s(0.2))
    assert receiving.want(5).ranges == [(4, 8)]


@pytest.mark.parametrize("why", ["none came yet", "a silence", "an outage", "it pushes anew"])
def test_an_offer_again_where_no_frames_come_has_what_lacks_sent_anew(why: str) -> None:
    """At once, a frame first: the word of a sender is quicker than the receiver's patience."""
    offered = Sender.of_parts(PARTS, FRAME_BYTES)
    told, frames = offered.push(Room(blocks=20, frame_bytes=FRAME_BYTES), ROOMY)
    receiving = begun(offered.transfer, told)
    if why != "none came yet":
        data = next(frames)
        receiving.take(chunks.decode(data), 0.1)
    if why == "a silence":
        receiving.gave_up(9.0)
    elif why == "an outage":
        receiving.lost(0.2)
    receiving.offered_again(8 if why == "it pushes anew" else 0, 9.1 if why == "a silence" else 0.2)
    expected = {"none came yet": [(0, 4)], "it pushes anew": [(8, 24)]}
    assert receiving.want(5).ranges == expected.get(why, [(4, 8)])


@pytest.mark.parametrize(("blocks", "frame_bytes"), [(0, 4096), (-3, 4096), (7, 0), (7, 1000), (7, 8 << 20)])
def test_room_that_is_none_or_makes_no_sense_is_not_used(blocks: int, frame_bytes: int) -> None:
    told, frames = Sender.of_parts(PARTS, FRAME_BYTES).push(Room(blocks=blocks, frame_bytes=frame_bytes), ROOMY)
    assert (told, list(frames)) == (0, [])


def test_no_more_frames_are_pushed_than_are_announced() -> None:
    """A broker that takes small messages and a generous receiver: 64 frames at most, and these are what is told."""
    data = [memoryview(bytes(200 * BLOCK_BYTES))]
    told, frames = Sender.of_parts(data, FRAME_BYTES).push(Room(blocks=200, frame_bytes=FRAME_BYTES), BLOCK_BYTES + 100)
    assert (told, len(list(frames))) == (64, 64)


def test_a_receiver_has_room_once_it_knows_the_pace_and_no_more_than_three_seconds_of_it() -> None:
    """Derivation: frames of 16 KiB each second leave room for three; each 0.01 s, for all of the window."""
    slow, quick = Pace(2.0, 0.0, SMALLEST_FRAME_BYTES), Pace(2.0, 0.0, SMALLEST_FRAME_BYTES)
    assert room(slow, 16) == Room(blocks=0, frame_bytes=SMALLEST_FRAME_BYTES)
    slow.heard(1.0, SMALLEST_FRAME_BYTES)
    quick.heard(0.01, SMALLEST_FRAME_BYTES)
    assert room(slow, 16).blocks == 3 * 16
    assert room(quick, 16).blocks == 16 * 16


def test_time_between_two_payloads_is_no_silence() -> None:
    """A pace that outlives a payload: the next one's patience counts from its header, and the link is no slower."""
    pace = Pace(2.0, 0.0, FRAME_BYTES)
    for now in (0.0, 1000.0):
        offered = Sender.of_parts(PARTS, FRAME_BYTES)
        receiving = begun(offered.transfer, 42, now, pace)
        assert receiving.left_s(now) > 0
        for data in offered.push(Room(blocks=42, frame_bytes=FRAME_BYTES), ROOMY)[1]:
            receiving.take(chunks.decode(data), now + 0.1)
    assert pace.frame_bytes == FRAME_BYTES
    assert room(pace, 16).blocks == 64


def test_a_payload_whose_digest_fails_is_fetched_again() -> None:
    """Frames that hold, of bytes that are others: nothing of them is kept."""
    offered, other = Sender.of_parts(PARTS, FRAME_BYTES), bytes(len(DATA))
    receiving = begun(offered.transfer, 42)
    for start in range(0, 42, 4):
        data = memoryview(other)[start * BLOCK_BYTES : (start + 4) * BLOCK_BYTES]
        frame = chunks.encode(offered.transfer, start, [data])
        receiving.take(chunks.decode(frame), 0.0)
    with pytest.raises(WireError, match="digest"):
        receiving.finish()
    assert not receiving.complete
    for _ in range(12):
        if want := receiving.want(16):
            for frame in offered.answer(want, ROOMY):
                receiving.take(chunks.decode(frame), 0.0)
    assert receiving.finish() == DATA


def test_nothing_is_allocated_for_a_payload_that_is_too_large() -> None:
    huge = Transfer(digest=bytes(16), size=1 << 40, frame_bytes=FRAME_BYTES)
    with pytest.raises(WireError, match="at most"):
        begun(huge)


def test_a_sender_copies_one_frame_at_a_time_and_a_receiver_nothing_twice() -> None:
    """Of 4 MiB: the sender takes room for two frames at most, the receiver for the payload and little else."""
    data, frame_bytes = [memoryview(bytearray(4 << 20))], 64 * 1024
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        offered = Sender.of_parts(data, frame_bytes)
        told, frames = offered.push(Room(blocks=4096, frame_bytes=frame_bytes), ROOMY)
        sizes = [len(frame) for frame in frames]
        assert tracemalloc.get_traced_memory()[1] - before < 3 * frame_bytes
        receiving = begun(offered.transfer, told)
        for frame in offered.push(Room(blocks=4096, frame_bytes=frame_bytes), ROOMY)[1]:
            receiving.take(chunks.decode(frame), 0.0)
        assert receiving.finish().nbytes == 4 << 20
        assert tracemalloc.get_traced_memory()[1] - before < (4 << 20) + 4 * frame_bytes
    finally:
        tracemalloc.stop()
    assert len(sizes) == 64
