"""Fetching parameters over a transport that loses, damages and reorders; every second is virtual."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_agent.download import Download
from shared import chunks, payload, wire
from shared.background import background
from shared.clock import VirtualLoop
from shared.errors import Unreachable, WireError
from shared.messages import Leave, Transfer, Want
from shared.topics import topic
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport
from shared.worker import inline

SITE, DEVICE, WINDOW, PATIENCE_S = "lab", "board", 6, 2.0
DATA = Random(5).randbytes(20 * 1024 - 100)
OTHER = Random(6).randbytes(3 * 1024)


@dataclass
class Sender:
    """The server's side: answers each frame asked for as `reply` says; the arguments are index and how often asked."""

    transport: MemoryTransport
    transfer: Transfer
    cut: Callable[[bytes, Transfer, int], bytes]
    data: bytes = DATA
    reply: Callable[[bytes, int, int], bytes | None] = lambda frame, _index, _asked: frame
    pause_s: float = 0.0
    receiver: str = DEVICE
    asked: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent: int = 0
    most_under_way: int = 0

    async def run(self) -> None:
        async with self.transport.subscribe(topic(SITE, DEVICE, "want")) as inbox:
            waiting: asyncio.Queue[int] = asyncio.Queue()
            async with background(self._listen(inbox, waiting)):
                while True:
                    await self._send(await waiting.get())

    async def _listen(self, inbox: Inbox, waiting: asyncio.Queue[int]) -> None:
        async for _, data in inbox:
            want = wire.decode_as(Want, data)
            assert want.digest == self.transfer.digest
            for index in chunks.from_ranges(want.ranges, self.transfer.count, limit=chunks.MAX_RANGES):
                self.asked.append(index)
                waiting.put_nowait(index)
            self.times.append(asyncio.get_running_loop().time())
            self.most_under_way = max(self.most_under_way, len(self.asked) - self.sent)

    async def _send(self, index: int) -> None:
        await asyncio.sleep(self.pause_s)
        self.sent += 1
        frame = self.reply(self.cut(self.data, self.transfer, index), index, self.asked.count(index))
        if frame is not None:
            await self.transport.publish(topic(SITE, self.receiver, "model"), frame)


@pytest.fixture
def sender(describe, cut) -> Sender:
    return Sender(MemoryTransport(), describe(DATA), cut)


@pytest.fixture
def fetch(sender, make_task, tmp_path, virtually) -> Callable[..., tuple[bytes, int]]:
    """Fetch from the sender in virtual time; return what lies in the file, and the bytes that came for it."""

    def run(*others, **fields) -> tuple[bytes, int]:
        async def routine() -> tuple[Path, int]:
            async with background(sender.run(), *others):
                await asyncio.sleep(0)  # let the sender subscribe
                return await download(sender.transport, tmp_path).fetch(make_task(params=sender.transfer, **fields))

        path, received = virtually(routine())
        return path.read_bytes(), received

    return run


def download(transport: MemoryTransport, folder: Path, limit: int = 1 << 20) -> Download:
    clock = asyncio.get_running_loop().time
    return Download(
        *(transport, SITE, DEVICE, folder, inline, clock), window=WINDOW, patience_s=PATIENCE_S, limit=limit
    )


def test_each_frame_is_asked_once_where_nothing_is_lost(sender, fetch) -> None:
    data, received = fetch()
    assert data == DATA
    assert sender.asked == list(range(20))
    assert received == len(DATA) + 20 * chunks.HEADER_BYTES


def test_never_more_than_the_window_is_under_way_and_the_window_is_used(sender, fetch) -> None:
    sender.pause_s = 0.5
    assert fetch()[0] == DATA
    assert sender.most_under_way == WINDOW


def test_lost_frames_are_asked_again_after_the_patience_and_no_others(sender, fetch) -> None:
    sender.reply = lambda frame, index, asked: None if index in (3, 19) and asked < 2 else frame
    assert fetch()[0] == DATA
    assert sorted(sender.asked) == sorted([*range(20), 3, 19])
    assert [moment for moment in sender.times if moment] == [PATIENCE_S]


def test_pauses_double_while_nothing_comes_and_are_short_again_after_frames(sender, fetch) -> None:
    """The first three questions for a frame go unanswered, then frames come and one among them is missed soon."""
    sender.reply = lambda frame, index, asked: frame if asked > 3 and (index, asked) != (1, 4) else None
    assert fetch()[0] == DATA
    moments = sorted(set(sender.times))
    pauses = [after - before for before, after in pairwise(moments)]
    assert pauses[1:3] == [2 * pauses[0], 4 * pauses[0]]
    assert PATIENCE_S <= pauses[3] < pauses[0]


def test_on_a_slow_link_frames_are_not_asked_again_for_ever(sender, fetch) -> None:
    """A frame takes longer than the patience: only the first window is doubted, then the pace is known."""
    sender.pause_s = 2.5 * PATIENCE_S
    assert fetch()[0] == DATA
    assert len(sender.asked) <= 20 + 2 * WINDOW


def test_a_damaged_frame_is_dropped_and_asked_again(sender, fetch) -> None:
    """One bit of the body, one of the header, a frame cut short, one of another version, and no frame at all."""
    damages = {
        0: lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        1: lambda frame: frame[:20] + bytes([frame[20] ^ 1]) + frame[21:],
        2: lambda frame: frame[:100],
        3: lambda frame: frame[:2] + b"\x09" + frame[3:],
        4: lambda _frame: b"",
        5: lambda _frame: b"hello",
        6: lambda _frame: wire.encode(Want(digest=bytes(16), ranges=[])),
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
            return chunks.encode(describe(DATA + bytes(9999)), index, [memoryview(frame)[chunks.HEADER_BYTES :]])
        return chunks.encode(sender.transfer, index, [memoryview(b"short")])

    sender.reply = wrong
    assert fetch()[0] == DATA
    assert sorted(sender.asked) == sorted([*range(20), 0, 1, 2])


def test_frames_for_others_do_not_delay_asking_again(sender, fetch, describe, cut) -> None:
    """On the shared topic another payload's frames pass all the time: ours that are lost are asked again all the same."""

    async def traffic() -> None:
        frame = cut(OTHER, describe(OTHER), 0)
        while True:
            await asyncio.sleep(PATIENCE_S / 4)
            await sender.transport.publish(topic(SITE, "_all", "model"), frame)

    sender.reply = lambda frame, index, asked: None if index < WINDOW and asked < 2 else frame
    assert fetch(traffic(), shared=True)[0] == DATA
    assert max(sender.times) < 30


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.6), size=st.integers(1, 12_000))
def test_whatever_is_lost_damaged_or_doubled_the_file_is_right(
    tmp_path_factory, describe, cut, make_task, seed: int, loss: float, size: int
) -> None:
    """Property: for any pattern of losses, bit flips and duplicates the fetched bytes are the ones sent."""
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


def test_told_to_leave_the_shared_topic_it_goes_on_alone(sender, fetch) -> None:
    """Frames 0-3 come to all; then the word to leave; the rest comes on the device's own topic, and nothing is lost."""
    heard = []

    def reply(frame: bytes, index: int, asked: int) -> bytes:
        heard.append((sender.receiver, len(shared_listeners(sender.transport))))
        if index < 4:
            return frame
        if sender.receiver == "_all":
            sender.receiver = DEVICE
            return wire.encode(Leave(digest=sender.transfer.digest))
        return frame

    sender.receiver = "_all"
    sender.reply = reply
    assert fetch(shared=True)[0] == DATA
    assert heard[0] == ("_all", 1)
    assert heard[-1] == (DEVICE, 0)


def test_a_word_to_leave_another_payload_is_no_word_for_us(sender, fetch) -> None:
    listeners = []

    def reply(frame: bytes, index: int, asked: int) -> bytes:
        listeners.append(len(shared_listeners(sender.transport)))
        return wire.encode(Leave(digest=bytes(16))) if index == 2 and asked == 1 else frame

    sender.reply = reply
    assert fetch(shared=True)[0] == DATA
    assert set(listeners) == {1}


def shared_listeners(transport: MemoryTransport) -> list[object]:
    return [patterns for patterns, _ in transport._inboxes if topic(SITE, "_all", "model") in patterns]


def test_a_fetch_that_is_cancelled_leaves_no_subscription_and_the_next_one_works(
    sender, make_task, tmp_path, virtually, describe
) -> None:
    """A newer task cuts the fetch of a larger payload short; the file then holds the newer one, no byte more."""

    async def routine() -> bytes:
        mine, newer = download(sender.transport, tmp_path), Sender(sender.transport, describe(OTHER), sender.cut, OTHER)
        sender.pause_s = 1.0
        async with background(sender.run()):
            fetching = asyncio.create_task(mine.fetch(make_task(params=sender.transfer)))
            await asyncio.sleep(6.5)
            fetching.cancel()
            await asyncio.wait({fetching})
            assert fetching.cancelled()
            assert not [patterns for patterns, _ in sender.transport._inboxes if topic(SITE, DEVICE, "model") in patterns]
        async with background(newer.run()):
            path, _ = await mine.fetch(make_task(round=2, params=newer.transfer))
            return path.read_bytes()

    assert virtually(routine()) == OTHER


def test_a_whole_that_is_damaged_is_fetched_again(sender, fetch) -> None:
    """Every frame's CRC holds and yet the digest does not: all of it is asked for a second time, and every byte counts."""
    right = sender.cut

    def wrong(data: bytes, transfer: Transfer, index: int) -> bytes:
        return right(bytes(len(DATA)) if sender.asked.count(index) == 1 else data, transfer, index)

    sender.cut = wrong
    data, received = fetch()
    assert data == DATA
    assert sorted(sender.asked) == sorted([*range(20)] * 2)
    assert received == 2 * (len(DATA) + 20 * chunks.HEADER_BYTES)


def test_a_whole_that_stays_damaged_is_given_up(sender, fetch, tmp_path) -> None:
    """A server whose bytes never match its own digest costs a failed task, not an endless download."""
    sender.data = bytes(len(DATA))
    with pytest.raises(WireError, match="damaged 3 times"):
        fetch()
    assert len(sender.asked) == 3 * 20
    assert not (tmp_path / "params").exists()


def test_a_fetch_cancelled_during_its_check_ends_after_the_check(sender, make_task, tmp_path) -> None:
    """The check reads the file on a thread: the next task must not begin to write it before that thread is through."""
    reading, may_go_on = threading.Event(), threading.Event()

    async def slow(function, /, *args, **kwargs):
        def run():
            reading.set()
            assert may_go_on.wait(10)
            return function(*args, **kwargs)

        return await asyncio.to_thread(run)

    async def routine() -> None:
        mine = replace(download(sender.transport, tmp_path), worker=slow)
        async with background(sender.run()):
            await asyncio.sleep(0)
            fetching = asyncio.create_task(mine.fetch(make_task(params=sender.transfer)))
            assert await asyncio.to_thread(reading.wait, 10)
            fetching.cancel()
            await asyncio.sleep(0.05)
            assert not fetching.done()
            may_go_on.set()
            await asyncio.wait({fetching})
            assert fetching.cancelled()

    asyncio.run(routine())


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
    """The first questions cannot be sent: they are asked again after the patience, as if their frames were lost."""

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
