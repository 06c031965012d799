"""Fetching parameters over a transport that loses and damages, and from a server that is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import Unreachable, WireError
from shared.protocol import payload, wire
from shared.protocol.messages import Transfer, Want
from shared.runtime.clock import VirtualLoop
from shared.runtime.tasks import background
from shared.transfer import frames
from shared.transport.memory import MemoryTransport
from tests.device_agent.sender import DATA, OTHER, Sender, download


def test_a_damaged_frame_is_dropped_and_asked_again(sender, fetch) -> None:
    """One bit of the body, one of the header, a frame cut short, one of another version, and no frame at all."""
    damages = {
        0: lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        1: lambda frame: frame[:20] + bytes([frame[20] ^ 1]) + frame[21:],
        2: lambda frame: frame[:100],
        3: lambda frame: frame[:2] + b"\x09" + frame[3:],
        4: lambda _frame: b"",
        5: lambda _frame: b"hello",
        6: lambda _frame: wire.encode(Want(digest=bytes(16), frame_bytes=1024, ranges=[])),
        7: lambda _frame: b"FM\x01\xc1",
    }
    sender.reply = lambda frame, index, asked: damages[index](frame) if index in damages and asked == 1 else frame
    assert fetch()[0] == DATA
    assert sorted(sender.asked) == sorted([*range(20), *damages])


def test_frames_that_do_not_fit_the_transfer_are_dropped(sender, fetch, describe, cut) -> None:
    """Another payload's frames, and frames of ours with a false count or length, reach neither file nor count."""

    def wrong(frame: bytes, index: int, asked: int) -> bytes:
        if asked > 1 or index > 2:
            return frame
        if index == 0:
            return cut(OTHER, describe(OTHER), 0)
        if index == 1:
            return frames.encode(describe(DATA + bytes(9999)), index, [memoryview(frame)[frames.HEADER_BYTES :]])
        return frames.encode(sender.transfer, index, [memoryview(b"short")])

    sender.reply = wrong
    assert fetch()[0] == DATA
    assert sorted(sender.asked) == sorted([*range(20), 0, 1, 2])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=st.tuples(st.integers(0, 2**32), st.floats(0, 0.6), st.integers(1, 12_000)))
def test_whatever_is_lost_damaged_or_doubled_the_file_is_right(
    tmp_path_factory, describe, cut, make_task, case
) -> None:
    """Property: for any pattern of losses, bit flips and duplicates the fetched bytes are the ones sent."""
    seed, loss, size = case
    random, transport, data = Random(seed), MemoryTransport(), Random(seed).randbytes(size)
    folder = tmp_path_factory.mktemp("any")

    def reply(frame: bytes, _index: int, _asked: int) -> bytes | None:
        if random.random() < loss:
            place = random.randrange(len(frame))
            return random.choice([None, frame[:place] + bytes([frame[place] ^ 0x10]) + frame[place + 1 :]])
        return frame

    async def routine() -> Path:
        one = Sender(transport, describe(data), cut, data, reply)
        two = Sender(transport, describe(data), cut, data, reply)
        async with background(one.run(), two.run()):
            path, _ = await download(transport, folder).fetch(make_task(params=one.transfer))
            return path

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(routine()).read_bytes() == data


def test_a_whole_that_is_damaged_is_fetched_again(sender, fetch) -> None:
    """Every checksum holds and yet the digest does not: all is asked for a second time, and every byte counts."""
    right = sender.cut

    def wrong(data: bytes, transfer: Transfer, index: int) -> bytes:
        return right(bytes(len(DATA)) if sender.asked.count(index) == 1 else data, transfer, index)

    sender.cut = wrong
    data, received = fetch()
    assert data == DATA
    assert sorted(sender.asked) == sorted([*range(20)] * 2)
    assert received == 2 * (len(DATA) + 20 * frames.HEADER_BYTES)


def test_a_whole_that_stays_damaged_is_given_up(sender, fetch, tmp_path) -> None:
    """A server whose bytes never match its own digest costs a failed task, not an endless download."""
    sender.data = bytes(len(DATA))
    with pytest.raises(WireError, match="damaged 3 times"):
        fetch()
    assert len(sender.asked) == 3 * 20
    assert not (tmp_path / "params").exists()


@pytest.mark.parametrize(
    "transfer",
    [
        Transfer(digest=bytes(16), size=(1 << 20) + 1, frame_bytes=1024),
        Transfer(digest=bytes(16), size=1 << 62, frame_bytes=1024),
        Transfer(digest=bytes(16), size=0, frame_bytes=1024),
        Transfer(digest=bytes(16), size=-5, frame_bytes=1024),
        Transfer(digest=bytes(16), size=5000, frame_bytes=1),
        Transfer(digest=bytes(16), size=5000, frame_bytes=0),
        Transfer(digest=bytes(16), size=5000, frame_bytes=1 << 30),
        Transfer(digest=bytes(3), size=5000, frame_bytes=1024),
    ],
)
def test_an_absurd_transfer_is_refused_before_a_file_is_made(make_task, tmp_path, virtually, transfer) -> None:
    async def routine() -> None:
        await download(MemoryTransport(), tmp_path).fetch(make_task(params=transfer))

    with pytest.raises(WireError):
        virtually(routine())
    assert list(tmp_path.iterdir()) == []


def test_a_payload_of_exactly_the_limit_is_taken(sender, make_task, tmp_path, virtually) -> None:
    async def routine() -> None:
        async with background(sender.run()):
            await download(sender.transport, tmp_path, limit=len(DATA)).fetch(make_task(params=sender.transfer))

    virtually(routine())
    assert payload.digest([memoryview((tmp_path / "params").read_bytes())]) == sender.transfer.digest


def test_a_broker_that_is_away_is_waited_for(sender, make_task, tmp_path, virtually) -> None:
    """The first question cannot be sent: it is asked again every 2 s, not only when its frames count as lost."""

    class Shaky(MemoryTransport):
        refusals = 3

        async def publish(self, topic: str, payload: bytes, **options: bool) -> None:
            if topic.endswith("/want") and self.refusals:
                self.refusals -= 1
                raise Unreachable("away")
            await super().publish(topic, payload, **options)

    sender.transport = Shaky()

    async def routine() -> Path:
        async with background(sender.run()):
            return (await download(sender.transport, tmp_path).fetch(make_task(params=sender.transfer)))[0]

    assert virtually(routine()).read_bytes() == DATA
    assert set(sender.times) == {6.0}
