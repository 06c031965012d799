"""Sender: frames within payload and window for any request."""

from __future__ import annotations

from random import Random

import pytest

from shared.errors import WireError
from shared.protocol.messages import BLOCK_BYTES, Room, Want
from shared.transfer.frames import HEADER_BYTES, MAX_FRAME_BYTES, MAX_WINDOW
from shared.transfer.sender import PieceQueue, Sender

ROOMY = 8 << 20
FRAME_BYTES = 4 * BLOCK_BYTES
DATA = Random(5).randbytes(41 * BLOCK_BYTES + 17)
SENDER = Sender.of_parts([memoryview(DATA)[:700], memoryview(DATA)[700:30_001], memoryview(DATA)[30_001:]], FRAME_BYTES)


@pytest.mark.parametrize(
    "ranges",
    [[(0, 43)], [(42, 43)], [(3, 3)], [(4, 2)], [(-1, 2)], [(0, 4), (41, 50)], [(0, 1 << 63)], [(-(1 << 63), 0)]],
)
def test_what_does_not_exist_is_not_sent(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(WireError) as caught:
        SENDER.answer(Want(digest=SENDER.transfer.digest, frame_bytes=1024, ranges=ranges), ROOMY)
    assert caught.value.reason == "shape"


@pytest.mark.parametrize(
    "frame_bytes", [0, -1024, 1, 1000, 1023, 1025, MAX_FRAME_BYTES + BLOCK_BYTES, 8 << 20, 1 << 63]
)
def test_frames_of_no_size_are_not_sent(frame_bytes: int) -> None:
    with pytest.raises(WireError) as caught:
        SENDER.answer(Want(digest=SENDER.transfer.digest, frame_bytes=frame_bytes, ranges=[(0, 1)]), ROOMY)
    assert caught.value.reason == "shape"


def test_an_endless_want_is_answered_with_a_window_of_frames() -> None:
    """Everything at once: no more frames than a window has, no larger. As many ranges as a message carries: refused."""
    endless = Sender.of_parts([memoryview(bytes(100 * FRAME_BYTES))], FRAME_BYTES)
    greedy = Want(digest=endless.transfer.digest, frame_bytes=4 << 20, ranges=[(0, endless.transfer.blocks)])
    sizes = [len(frame) for frame in endless.answer(greedy, ROOMY)]
    assert sizes == [FRAME_BYTES + HEADER_BYTES] * MAX_WINDOW
    with pytest.raises(WireError):
        SENDER.answer(Want(digest=SENDER.transfer.digest, frame_bytes=4 << 20, ranges=[(0, 42)] * 10_000), ROOMY)
    assert list(SENDER.answer(Want(digest=b"", frame_bytes=1024, ranges=[]), ROOMY)) == []


@pytest.mark.parametrize(("blocks", "frame_bytes"), [(0, 4096), (-3, 4096), (7, 0), (7, 1000), (7, 8 << 20)])
def test_room_that_is_none_or_makes_no_sense_is_not_used(blocks: int, frame_bytes: int) -> None:
    told, frames = SENDER.push(Room(blocks=blocks, frame_bytes=frame_bytes), ROOMY)
    assert (told, list(frames)) == (0, [])


def test_no_more_frames_are_pushed_than_are_announced() -> None:
    """A broker that takes small messages and a generous receiver: 64 frames at most, and these are what is told."""
    sender = Sender.of_parts([memoryview(bytes(200 * BLOCK_BYTES))], FRAME_BYTES)
    told, frames = sender.push(Room(blocks=200, frame_bytes=FRAME_BYTES), BLOCK_BYTES + 100)
    assert (told, len(list(frames))) == (64, 64)


def test_many_parts_are_sent_as_if_they_were_one() -> None:
    """The digest, the size and each frame are those of the bytes in one run."""
    whole = Sender.of_parts([memoryview(DATA)], FRAME_BYTES)
    assert whole.transfer == SENDER.transfer
    want = Want(digest=whole.transfer.digest, frame_bytes=2048, ranges=[(0, 42)])
    assert list(whole.answer(want, ROOMY)) == list(SENDER.answer(want, ROOMY))


def test_a_wish_takes_the_place_of_what_overlaps_it_alone() -> None:
    """Of pieces of 4 that wait: one that begins within another, one that covers two, one that is asked for again."""
    waiting = PieceQueue()
    assert [waiting.add(start, start + 4) for start in (0, 4, 8, 12)] == 4 * [False], "nothing was in their place"
    assert not waiting.add(4, 8), "it is the same"
    assert waiting.add(6, 8)
    assert waiting.add(7, 13)
    assert waiting.take() == [(0, 4), (7, 13)]
