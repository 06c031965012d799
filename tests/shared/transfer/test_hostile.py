"""One sender, one receiver and everything that may go wrong between them, over both sinks; every second is virtual."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Room, Transfer
from shared.transfer import frames as chunks
from shared.transfer.frames import HEADER_BYTES, MAX_FRAME_BYTES, Frame
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import FIRST_S, LAST_S, SMALLEST_FRAME_BYTES, Pace
from shared.transfer.receiver import Policy, Receiver, push_credit
from shared.transfer.sender import Sender
from shared.transfer.to_file import FileSink

ROOMY = 8 << 20
FRAME_BYTES = 4 * BLOCK_BYTES
POLICY = Policy(64, 2.0, 8 << 20, frame_bytes=FRAME_BYTES)
DATA = Random(5).randbytes(41 * BLOCK_BYTES + 17)
OTHER = Random(6).randbytes(len(DATA))
PARTS = [memoryview(DATA)[:700], memoryview(DATA)[700:30_001], memoryview(DATA)[30_001:]]
SENDER = Sender.of_parts(PARTS, FRAME_BYTES)
ALL = Room(blocks=1000, frame_bytes=FRAME_BYTES)

Begin = Callable[..., Receiver]


@pytest.fixture(params=["memory", "file"])
def begin(request, tmp_path_factory) -> Begin:
    """Begin to receive a payload into memory, and into a file."""

    def begun(transfer=SENDER.transfer, pushed=0, now=0.0, pace=None, policy=POLICY) -> Receiver:
        place = tmp_path_factory.mktemp("sink") / "params"
        sink = MemorySink if request.param == "memory" else partial(FileSink, place)
        return Receiver(
            transfer, sink, policy, pace or policy.pace(now, transfer.frame_bytes, small=False), now, pushed=pushed
        )

    return begun


def stored(receiver: Receiver) -> bytes:
    """Return what lies in the sink, whole or not."""
    return receiver.sink.path.read_bytes() if isinstance(receiver.sink, FileSink) else bytes(receiver.sink.to_view())


def give(receiver: Receiver, sender: Sender, now: float = 0.0) -> None:
    """Answer whatever a receiver asks for, until it asks no more."""
    while want := receiver.want():
        for data in sender.answer(want, ROOMY):
            receiver.take(chunks.decode(data), now)


def forged(start: int, count: int, data: bytes, digest: bytes = SENDER.transfer.digest) -> Frame:
    """Return a frame whose checksum holds, whatever it says."""
    head = struct.pack("<2sBB16sII", b"FC", 1, 0, digest, start, count)
    return chunks.decode(head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + data)) + data)


def damaged(data: bytes, random: Random) -> bytes:
    """Flip a bit, or cut a frame short."""
    place = random.randrange(len(data))
    return random.choice([data[:place], data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.floats(0, 0.7), st.integers(0, 50), st.integers(1, 9))
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_whatever_is_lost_damaged_doubled_or_shuffled_the_whole_comes(
    tmp_path_factory, kind: str, seed: int, loss: float, pushed: int, window: int
) -> None:
    """What is under way is never asked for twice without a silence, nor more than the window, or two frames."""
    random, size = Random(seed), Random(seed).choice([1, BLOCK_BYTES, BLOCK_BYTES + 1, len(DATA)])
    sender = Sender.of_parts([memoryview(DATA)[:size]], FRAME_BYTES)
    told, frames = sender.push(Room(blocks=pushed, frame_bytes=2048), ROOMY)
    assert told == min(pushed, sender.transfer.blocks)
    sink = MemorySink if kind == "memory" else partial(FileSink, tmp_path_factory.mktemp("any") / "params")
    receiver, now, air = Receiver(sender.transfer, sink, POLICY, POLICY.pace(0.0), 0.0, pushed=told), 0.0, list(frames)
    while not receiver.complete:
        random.shuffle(air)
        for data in air:
            for _ in range(random.choice([1, 1, 2])):
                if random.random() >= loss:
                    receiver.take(chunks.decode(data), now := now + 0.01)
                elif random.random() < 0.5:
                    with pytest.raises(WireError):
                        chunks.decode(damaged(data, random))
        if not receiver.complete and (want := receiver.want(window)):
            assert sum(stop - start for start, stop in want.ranges) <= max(2, window) * FRAME_BYTES // BLOCK_BYTES
            air = list(sender.answer(want, random.choice([ROOMY, 2000])))  # a broker may take less from now on
        else:
            air = []
            now += receiver.remaining_s(now)
            receiver.time_out(now)
    assert receiver.finish() == DATA[:size]
    assert not receiver.finish().readonly


DAMAGES = {
    "a bit of the body": lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
    "a bit of the header": lambda frame: frame[:20] + bytes([frame[20] ^ 1]) + frame[21:],
    "cut short": lambda frame: frame[:100],
    "huge": lambda _: bytes(9 << 20),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_frame_is_refused_and_asked_for_again(begin: Begin, damage: str) -> None:
    receiver = begin()
    (data,) = SENDER.answer(receiver.want(), ROOMY)
    with pytest.raises(WireError):
        receiver.take(chunks.decode(DAMAGES[damage](data)), 0.1)
    assert (receiver.lacking, receiver.bytes_received) == (42, 0)
    receiver.time_out(receiver.remaining_s(0.0))
    assert receiver.want().ranges == [(0, 4)]


MISFITS = {
    "another number of blocks": (forged(0, 43, bytes(BLOCK_BYTES)), "shape"),
    "beyond the end": (forged(41, 42, bytes(2 * BLOCK_BYTES)), "shape"),
    "far beyond the end": (forged((1 << 32) - 1, 42, bytes(BLOCK_BYTES)), "shape"),
    "no bytes": (forged(0, 42, b""), "shape"),
    "half a block": (forged(0, 42, b"short"), "truncated"),
    "a block and a half": (forged(0, 42, bytes(1500)), "truncated"),
    "a block more than there are": (forged(0, 42, bytes(43 * BLOCK_BYTES)), "shape"),
    "all blocks filled up": (forged(0, 42, bytes(42 * BLOCK_BYTES)), "truncated"),
    "more than the last block": (forged(41, 42, bytes(18)), "truncated"),
    "less than the last block": (forged(41, 42, bytes(16)), "truncated"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_frame_that_does_not_fit_writes_nothing(begin: Begin, misfit: str) -> None:
    """It is refused before the sink is touched, is no sign of life, but its bytes did come and are counted."""
    receiver, (frame, reason) = begin(), MISFITS[misfit]
    want = receiver.want()
    before, left_s = stored(receiver), receiver.remaining_s(9.0)
    with pytest.raises(WireError) as caught:
        receiver.take(frame, 9.0)
    assert caught.value.reason == reason
    assert (receiver.lacking, receiver.bytes_received) == (42, frame.size)
    assert (stored(receiver), receiver.remaining_s(9.0)) == (before, left_s)
    for data in SENDER.answer(want, ROOMY):
        receiver.take(chunks.decode(data), 9.0)
    give(receiver, SENDER)
    assert receiver.finish() == DATA


def test_a_frame_of_another_payload_is_passed_over(begin: Begin) -> None:
    """On a topic common to all they pass all the time: no error, no byte of ours, no sign of life of our sender."""
    receiver, before = begin(), SENDER.transfer.size
    left_s = receiver.remaining_s(5.0)
    assert not receiver.take(chunks.decode(Sender.of_parts([memoryview(OTHER)], FRAME_BYTES).frame(0, 4)), 5.0)
    assert (receiver.lacking, receiver.bytes_received, receiver.remaining_s(5.0)) == (42, 0, left_s)
    assert receiver.transfer.size == before


def test_frames_that_overlap_and_come_twice_are_stored_once_and_counted_each_time(begin: Begin) -> None:
    """Of several sizes, in any order; what brings nothing new is no progress: patience does not begin anew."""
    receiver = begin()
    pieces = [(3, 5), (0, 4), (4, 9), (0, 9), (9, 42), (40, 42)]
    new = [receiver.take(chunks.decode(SENDER.frame(*piece)), 0.1) for piece in pieces]
    assert new == [True, True, True, False, True, False]
    left_s = receiver.remaining_s(1.0)
    assert not receiver.take(chunks.decode(SENDER.frame(0, 42)), 1.0)
    assert receiver.remaining_s(1.0) == left_s
    sizes = [min(stop * BLOCK_BYTES, len(DATA)) - start * BLOCK_BYTES + HEADER_BYTES for start, stop in pieces]
    assert receiver.bytes_received == sum(sizes) + len(DATA) + HEADER_BYTES
    assert receiver.finish() == DATA


def spoilt(receiver: Receiver) -> None:
    """Give a receiver frames that hold and fit, of bytes that are others."""
    for start in range(0, 42, 4):
        data = OTHER[start * BLOCK_BYTES : (start + 4) * BLOCK_BYTES]
        receiver.take(forged(start, 42, data), 0.0)


def test_a_payload_whose_digest_fails_is_fetched_again(begin: Begin) -> None:
    """Nothing of it is kept; its bytes count, and so does the next attempt's."""
    receiver = begin(pushed=42)
    spoilt(receiver)
    assert receiver.complete
    with pytest.raises(WireError) as caught:
        receiver.finish()
    assert caught.value.reason == "digest"
    assert (receiver.lacking, receiver.is_hopeless) == (42, False)
    assert stored(receiver) == bytes(len(DATA))
    give(receiver, SENDER)
    assert receiver.finish() == DATA
    assert receiver.bytes_received == 2 * (len(DATA) + 11 * HEADER_BYTES)


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_payload_that_stays_damaged_is_given_up(begin: Begin, attempts: int) -> None:
    """A sender whose bytes never match its own digest is asked so many times, and nothing of it stays."""
    receiver = begin(policy=replace(POLICY, attempts=attempts))
    for tried in range(attempts):
        assert not receiver.is_hopeless
        assert receiver.lacking == 42, tried
        spoilt(receiver)
        with pytest.raises(WireError, match="digest"):
            receiver.finish()
    assert receiver.is_hopeless
    if isinstance(receiver.sink, FileSink):
        assert list(receiver.sink.path.parent.iterdir()) == []


ABSURD = {
    "larger than the limit": ({"size": POLICY.limit + 1}, "oversized"),
    "far larger": ({"size": 1 << 62}, "oversized"),
    "empty": ({"size": 0}, "oversized"),
    "below nothing": ({"size": -5}, "oversized"),
    "frames of a byte": ({"frame_bytes": 1}, "oversized"),
    "frames of nothing": ({"frame_bytes": 0}, "oversized"),
    "frames below nothing": ({"frame_bytes": -5}, "oversized"),
    "frames of a byte less than a block": ({"frame_bytes": BLOCK_BYTES - 1}, "oversized"),
    "frames of a byte more than a block": ({"frame_bytes": BLOCK_BYTES + 1}, "oversized"),
    "frames above the largest": ({"frame_bytes": MAX_FRAME_BYTES + BLOCK_BYTES}, "oversized"),
    "huge frames": ({"frame_bytes": 1 << 30}, "oversized"),
    "no digest": ({"digest": b""}, "malformed"),
    "a short digest": ({"digest": bytes(3)}, "malformed"),
    "a long digest": ({"digest": bytes(17)}, "malformed"),
}


@pytest.mark.parametrize("absurd", ABSURD)
def test_an_absurd_payload_is_refused_before_a_place_is_made(absurd: str) -> None:
    fields, reason = ABSURD[absurd]
    made: list[Transfer] = []
    transfer = Transfer(**({"digest": bytes(16), "size": 5000, "frame_bytes": BLOCK_BYTES} | fields))
    with pytest.raises(WireError) as caught:
        Receiver(transfer, made.append, POLICY, POLICY.pace(0.0), 0.0)
    assert caught.value.reason == reason
    assert made == []


def test_a_payload_of_exactly_the_limit_is_taken(begin: Begin) -> None:
    receiver = begin(policy=Policy(64, 2.0, len(DATA)))
    give(receiver, SENDER)
    assert receiver.finish() == DATA


def test_a_silent_sender_is_asked_ever_more_rarely_in_ever_smaller_frames(begin: Begin) -> None:
    """Ten seconds at first, doubled to a minute at most; one frame each time; from the second silence on half of it."""
    sender = Sender.of_parts([memoryview(bytes(1 << 20))], 256 * 1024)
    receiver, now = begin(sender.transfer, policy=Policy(64, 2.0, 1 << 20)), 0.0
    pauses, asked = [], []
    for _ in range(8):
        want = receiver.want()
        asked.append(want.frame_bytes)
        assert want.ranges == [(0, want.frame_bytes // BLOCK_BYTES)]
        pauses.append(receiver.remaining_s(now))
        now += pauses[-1]
        assert receiver.remaining_s(now) == 0
        receiver.time_out(now)
    assert pauses == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, *[LAST_S] * 5]
    assert asked == [256 << 10, 256 << 10, 128 << 10, 64 << 10, 32 << 10, *[SMALLEST_FRAME_BYTES] * 3]


def test_frames_grow_again_when_the_link_is_quick_again(begin: Begin) -> None:
    sender = Sender.of_parts([memoryview(bytes(4 << 20))], 256 * 1024)
    policy = Policy(4, 2.0, 4 << 20)
    receiver, now, sizes = begin(sender.transfer, policy=policy, pace=policy.pace(0.0, 256 * 1024)), 0.0, []
    while want := receiver.want():
        sizes.append(want.frame_bytes)
        for data in sender.answer(want, ROOMY):
            receiver.take(chunks.decode(data), now := now + 0.01)
    assert sizes[0] == SMALLEST_FRAME_BYTES
    assert sizes == sorted(sizes)
    assert sizes[-1] == 256 * 1024
    assert receiver.finish() == bytes(4 << 20)


def test_a_sender_that_returns_is_asked_at_once_for_all_that_was_under_way(begin: Begin) -> None:
    """A frame first; and where nothing came since it returned the last time, in smaller frames: they may outlast it."""
    sender = Sender.of_parts([memoryview(bytes(1 << 20))], 128 * 1024)
    receiver = begin(sender.transfer, policy=Policy(8, 2.0, 1 << 20))
    (data,) = sender.answer(receiver.want(), ROOMY)
    receiver.take(chunks.decode(data), 0.1)
    assert receiver.want().ranges == [(128, 384)]
    asked = []
    for now in (1.0, 2.0, 3.0):
        receiver.lost(now)
        asked.append(receiver.want().ranges)
    assert asked == [[(128, 256)], [(128, 192)], [(128, 160)]]


def test_a_payload_that_comes_another_way_goes_on_with_what_lacks(begin: Begin) -> None:
    receiver = begin()
    (data,) = SENDER.answer(receiver.want(), ROOMY)
    receiver.take(chunks.decode(data), 0.1)
    assert receiver.want().ranges == [(4, 12)]
    receiver.reroute(POLICY.pace(5.0, small=False))
    assert receiver.remaining_s(5.0) == FIRST_S
    assert receiver.want().ranges == [(4, 8)]


def test_what_is_pushed_whole_is_not_asked_for(begin: Begin) -> None:
    told, frames = SENDER.push(ALL, ROOMY)
    receiver = begin(pushed=told)
    assert receiver.want(16) is None
    sizes = []
    for data in frames:
        sizes.append(len(data) - HEADER_BYTES)
        receiver.take(chunks.decode(data), 0.1)
        assert receiver.want(16) is None
    assert sizes == [FRAME_BYTES] * 10 + [BLOCK_BYTES + 17]
    assert receiver.finish() == DATA
    assert receiver.bytes_received == len(DATA) + 11 * HEADER_BYTES


def test_behind_a_push_the_rest_is_asked_for_at_once_in_a_whole_window(begin: Begin) -> None:
    """A sender that was given room knows the link: no window of one frame first."""
    told, frames = SENDER.push(Room(blocks=8, frame_bytes=FRAME_BYTES), ROOMY)
    receiver = begin(pushed=told)
    for data in frames:
        receiver.take(chunks.decode(data), 0.01)
    assert receiver.want(5).ranges == [(8, 28)]


def test_the_window_is_the_smaller_of_the_policys_and_what_a_sender_is_given(begin: Begin) -> None:
    for given_, expected in ((64, 3), (2, 2), (1, 2)):
        receiver = begin(pushed=4, policy=Policy(3, 2.0, 1 << 20, frame_bytes=FRAME_BYTES))
        receiver.take(chunks.decode(SENDER.frame(0, 4)), 0.01)
        ((start, stop),) = receiver.want(given_).ranges
        assert (start, stop - start) == (4, 4 * expected)


def test_an_offer_again_while_frames_come_has_none_sent_twice(begin: Begin) -> None:
    """Behind a link that takes seconds for a push, a sender wonders where its answer is; nothing of it is lost."""
    told, frames = SENDER.push(Room(blocks=20, frame_bytes=FRAME_BYTES), ROOMY)
    receiver = begin(pushed=told)
    receiver.take(chunks.decode(next(frames)), 0.1)
    receiver.note_new_offer(0, 0.2)
    assert receiver.want(5) is None
    receiver.note_new_offer(0, 0.2 + receiver.remaining_s(0.2))
    assert receiver.want(5).ranges == [(4, 8)]


def test_a_sender_that_waits_again_is_asked_for_a_little_at_once_whatever_the_silence_before(begin: Begin) -> None:
    """Not where the wish itself may be on its way, nor where frames come."""
    receiver, now = begin(policy=Policy(16, 1.0, 1 << 20, frame_bytes=FRAME_BYTES)), 0.0
    receiver.want()
    for _ in range(8):
        now += receiver.remaining_s(now)
        receiver.time_out(now)
        receiver.want()
    assert receiver.remaining_s(now) == LAST_S
    receiver.note_waiting_sender(now + 1.0)
    assert receiver.remaining_s(now + 1.0) == LAST_S - 1.0
    receiver.note_waiting_sender(now + 2.0)
    want = receiver.want()
    assert want
    assert want.ranges[0][0] == 0
    assert sum(stop - start for start, stop in want.ranges) * 1024 <= 2 * want.frame_bytes
    assert receiver.remaining_s(now + 2.0) <= FIRST_S
    receiver.take(chunks.decode(SENDER.frame(0, 4)), now + 3.0)
    left_s = receiver.remaining_s(now + 5.0)
    receiver.note_waiting_sender(now + 5.0)
    assert receiver.remaining_s(now + 5.0) == left_s


@pytest.mark.parametrize("why", ["none came yet", "a silence", "an outage", "it pushes anew"])
def test_an_offer_again_where_no_frames_come_has_what_lacks_sent_anew(begin: Begin, why: str) -> None:
    """At once, a frame first: the word of a sender is quicker than the receiver's patience."""
    told, frames = SENDER.push(Room(blocks=20, frame_bytes=FRAME_BYTES), ROOMY)
    receiver = begin(pushed=told)
    if why != "none came yet":
        receiver.take(chunks.decode(next(frames)), 0.1)
    if why == "a silence":
        receiver.time_out(9.0)
    elif why == "an outage":
        receiver.lost(0.2)
    receiver.note_new_offer(8 if why == "it pushes anew" else 0, 9.1 if why == "a silence" else 0.2)
    expected = {"none came yet": [(0, 4)], "it pushes anew": [(8, 24)]}
    assert receiver.want(5).ranges == expected.get(why, [(4, 8)])


def test_time_between_two_payloads_is_no_silence(begin: Begin) -> None:
    """A pace that outlives a payload: the next one's patience counts from its header, and the link is no slower."""
    pace = Pace(2.0, 0.0, FRAME_BYTES)
    for now in (0.0, 1000.0):
        receiver = begin(pushed=42, now=now, pace=pace)
        assert receiver.remaining_s(now) > 0
        for data in SENDER.push(ALL, ROOMY)[1]:
            receiver.take(chunks.decode(data), now + 0.1)
    assert pace.frame_bytes == FRAME_BYTES
    assert push_credit(pace, 16).blocks == 64


def test_a_sender_copies_one_frame_at_a_time_and_a_receiver_nothing_twice(begin: Begin) -> None:
    """Of 4 MiB: the sender takes room for two frames at most, the receiver for the payload, if at all, and little else.

    A file's receiver has the payload nowhere in the interpreter's memory.
    """
    data, frame_bytes = [memoryview(bytearray(4 << 20))], 64 * 1024
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        sender = Sender.of_parts(data, frame_bytes)
        told, frames = sender.push(Room(blocks=4096, frame_bytes=frame_bytes), ROOMY)
        assert [len(frame) for frame in frames] == [frame_bytes + HEADER_BYTES] * 64
        assert tracemalloc.get_traced_memory()[1] - before < 3 * frame_bytes
        receiver = begin(sender.transfer, told)
        for frame in sender.push(Room(blocks=4096, frame_bytes=frame_bytes), ROOMY)[1]:
            receiver.take(chunks.decode(frame), 0.0)
        assert receiver.finish().nbytes == 4 << 20
        in_file = isinstance(receiver.sink, FileSink)
        assert tracemalloc.get_traced_memory()[1] - before < (0 if in_file else 4 << 20) + 6 * frame_bytes
    finally:
        tracemalloc.stop()
