"""Fetching parameters: what is asked, when, on which topic, and from whom is wrong; every second is virtual."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Leave, Transfer
from shared.protocol.topics import topic
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transport.memory import MemoryTransport
from tests.device_agent.server_side import (
    DEVICE,
    DOWNLOAD_WINDOW,
    MODEL,
    OTHER,
    PATIENCE_S,
    SITE,
    ModelServer,
    download,
)
from tests.naming import naming


def test_each_frame_is_asked_once_where_nothing_is_lost(sender, fetch) -> None:
    data, received = fetch()
    assert data == MODEL
    assert sender.asked == list(range(20))
    assert received == len(MODEL) + 20 * frames.HEADER_BYTES


def test_a_payload_inside_the_task_needs_no_frames(sender, fetch) -> None:
    assert fetch(payload=MODEL) == (MODEL, len(MODEL) + frames.HEADER_BYTES)
    assert sender.asked == []


def test_a_damaged_payload_inside_the_task_is_fetched_in_frames(sender, fetch) -> None:
    assert fetch(payload=MODEL[:-1] + b"x")[0] == MODEL
    assert sender.asked == list(range(20))


def test_a_payload_that_the_disk_refuses_leaves_no_descriptor_open(fetch, monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output error"):
        fetch(payload=MODEL)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_never_more_than_the_window_is_under_way_and_the_window_is_used(sender, fetch) -> None:
    sender.pause_s = 0.5
    assert fetch()[0] == MODEL
    assert sender.most_under_way == DOWNLOAD_WINDOW


def test_lost_frames_are_asked_again_after_the_patience_and_no_others(sender, fetch) -> None:
    sender.reply = lambda frame, index, asked: None if index in (3, 19) and asked < 2 else frame
    assert fetch()[0] == MODEL
    assert sorted(sender.asked) == sorted([*range(20), 3, 19])
    assert [moment for moment in sender.times if moment] == [PATIENCE_S] * 2  # a small window at first


def test_pauses_double_while_nothing_comes_and_are_short_again_after_frames(sender, fetch) -> None:
    """The first three questions for a frame go unanswered, then frames come and one among them is missed soon."""
    sender.reply = lambda frame, index, asked: frame if asked > 3 and (index, asked) != (1, 4) else None
    assert fetch()[0] == MODEL
    moments = sorted(set(sender.times))
    pauses = [after - before for before, after in pairwise(moments)]
    assert pauses[1:3] == [2 * pauses[0], 4 * pauses[0]]
    assert PATIENCE_S <= pauses[3] < pauses[0]


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.virtual_time
async def test_a_server_that_gives_the_task_again_is_asked_at_once(sender, make_task, tmp_path, is_told) -> None:
    """After a hundred seconds in which nothing came the device waits for a minute, unless it hears of the server."""
    loop = asyncio.get_running_loop
    sender.reply = lambda frame, _index, _asked: frame if loop().time() > 95.0 else None
    async with background(sender.run()):
        await asyncio.sleep(0)
        fetching = download(sender.transport, tmp_path)
        ended = asyncio.create_task(fetching.fetch(make_task(params=sender.transfer)))
        await asyncio.sleep(95.5)
        if is_told:
            fetching.request_again()
        await ended
        assert (loop().time() < 96.5) is is_told


@pytest.mark.virtual_time
async def test_the_first_frame_of_a_later_fetch_is_waited_for_as_the_link_was_before(sender, make_task, tmp_path):
    """Ten seconds at first, three once it is known to be quick."""
    loop = asyncio.get_running_loop
    async with background(sender.run()):
        await asyncio.sleep(0)
        fetching, took = download(sender.transport, tmp_path), []
        for _ in range(2):
            began = loop().time()
            sender.reply = lambda frame, _index, _asked: frame if loop().time() > began + 0.5 else None  # noqa: B023
            await fetching.fetch(make_task(params=sender.transfer))
            took.append(loop().time() - began)
        first, second = took
    assert first >= 10.0
    assert second < 10.0


def test_on_a_slow_link_frames_are_not_asked_again_for_ever(sender, fetch) -> None:
    """A frame takes longer than the patience: only the first window is doubted, then the pace is known."""
    sender.pause_s = 2.5 * PATIENCE_S
    assert fetch()[0] == MODEL
    assert len(sender.asked) <= 20 + 2 * DOWNLOAD_WINDOW


def test_frames_for_others_do_not_delay_asking_again(sender, fetch, describe, cut) -> None:
    """On the shared topic another payload's frames pass all the time: ours that are lost are asked again even so."""

    async def traffic() -> None:
        frame = cut(OTHER, describe(OTHER), 0)
        while True:
            await asyncio.sleep(PATIENCE_S / 4)
            await sender.transport.publish(topic(SITE, "_all", "model"), frame)

    sender.reply = lambda frame, index, asked: None if index < DOWNLOAD_WINDOW and asked < 2 else frame
    assert fetch(traffic(), shared=True)[0] == MODEL
    assert max(sender.times) < 30


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
    assert fetch(shared=True)[0] == MODEL
    assert heard[0] == ("_all", 1)
    assert heard[-1] == (DEVICE, 0)


def test_a_word_to_leave_another_payload_is_no_word_for_us(sender, fetch) -> None:
    listeners = []

    def reply(frame: bytes, index: int, asked: int) -> bytes:
        listeners.append(len(shared_listeners(sender.transport)))
        return wire.encode(Leave(digest=bytes(16))) if index == 2 and asked == 1 else frame

    sender.reply = reply
    assert fetch(shared=True)[0] == MODEL
    assert set(listeners) == {1}


@pytest.mark.virtual_time
async def test_a_fetch_that_is_cancelled_leaves_no_subscription_and_the_next_one_works(
    sender, make_task, tmp_path, describe
) -> None:
    """A newer task cuts the fetch of a larger payload short; the file then holds the newer one, no byte more."""
    mine, newer = (
        download(sender.transport, tmp_path),
        ModelServer(sender.transport, describe(OTHER), sender.cut, OTHER),
    )
    sender.pause_s = 1.0
    async with background(sender.run()):
        fetching = asyncio.create_task(mine.fetch(make_task(params=sender.transfer)))
        await asyncio.sleep(6.5)
        fetching.cancel()
        await asyncio.wait({fetching})
        assert fetching.cancelled()
        assert sender.transport.listening(topic(SITE, DEVICE, "model")) == []
    async with background(newer.run()):
        path, _ = await mine.fetch(make_task(round=2, params=newer.transfer))
        assert path.read_bytes() == OTHER


async def test_a_fetch_cancelled_during_its_check_ends_after_the_check(sender, make_task, tmp_path) -> None:
    """The check reads the file on a thread: the next task must not begin to write it before that thread is through."""
    reading, may_go_on = threading.Event(), threading.Event()

    async def slow(function, /, *args, **kwargs):
        def run():
            reading.set()
            assert may_go_on.wait(10)
            return function(*args, **kwargs)

        return await asyncio.to_thread(run)

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


def test_a_whole_that_is_damaged_is_fetched_again(sender, fetch) -> None:
    """Every checksum holds and yet the digest does not: all is asked for a second time, and every byte counts."""
    right = sender.cut

    def wrong(data: bytes, transfer: Transfer, index: int) -> bytes:
        return right(bytes(len(MODEL)) if sender.asked.count(index) == 1 else data, transfer, index)

    sender.cut = wrong
    data, received = fetch()
    assert data == MODEL
    assert sorted(sender.asked) == sorted([*range(20)] * 2)
    assert received == 2 * (len(MODEL) + 20 * frames.HEADER_BYTES)


def test_a_whole_that_stays_damaged_is_given_up(sender, fetch, tmp_path) -> None:
    """A server whose bytes never match its own digest costs a failed task, not an endless download."""
    sender.data = bytes(len(MODEL))
    with pytest.raises(WireError, match=naming(3)) as raised:
        fetch()
    assert raised.value.reason == "digest"
    assert len(sender.asked) == 3 * 20
    assert not (tmp_path / "params").exists()


def test_an_absurd_transfer_is_refused_before_a_file_is_made(make_task, tmp_path, virtually) -> None:
    """One byte more than the limit; what else is absurd is tried at the receiver."""
    absurd = Transfer(digest=bytes(16), size=(1 << 20) + 1, frame_bytes=1024)

    async def routine() -> None:
        await download(MemoryTransport(), tmp_path).fetch(make_task(params=absurd))

    with pytest.raises(WireError):
        virtually(routine())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.virtual_time
async def test_a_broker_that_is_away_is_waited_for(sender, make_task, tmp_path) -> None:
    """The first question cannot be sent: it is asked again every 2 s, not only when its frames count as lost."""

    class Shaky(MemoryTransport):
        refusals = 3

        async def publish(self, topic: str, payload: bytes, **options: bool) -> None:
            if topic.endswith("/want") and self.refusals:
                self.refusals -= 1
                raise Unreachable("away")
            await super().publish(topic, payload, **options)

    sender.transport = Shaky()
    async with background(sender.run()):
        outcome = (await download(sender.transport, tmp_path).fetch(make_task(params=sender.transfer)))[0]
    assert outcome.read_bytes() == MODEL
    assert set(sender.times) == {6.0}


def shared_listeners(transport: MemoryTransport) -> list[object]:
    return transport.listening(topic(SITE, "_all", "model"))
