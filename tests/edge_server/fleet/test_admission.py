"""What one sender may cost the others: messages are counted, bounded and taken in turn before any is decoded."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from edge_server.fleet import admission, fair_queue
from edge_server.fleet.admission import (
    MESSAGES,
    MESSAGES_PER_S,
    MOST_BYTES,
    MOST_STRANGERS,
    REFUSED,
    WASTED_BYTES,
    Admission,
)
from shared.errors import WireError
from shared.protocol.messages import Transfer
from shared.protocol.topics import topic
from shared.transfer import frames
from tests.edge_server.harness import SITE

pytestmark = pytest.mark.virtual_time

WINDOW = 1 << 20
FRAME = frames.encode(Transfer(digest=bytes(16), size=1 << 18, frame_bytes=1 << 18), 0, [memoryview(bytes(1 << 18))])


class Door:
    """An admission, and what it refused by device and reason."""

    def __init__(self, *, window_bytes: int = WINDOW, **options) -> None:
        self.refused = Counter[tuple[str, str]]()
        clock = asyncio.get_running_loop().time
        self.inside = Admission(clock, self._refuse, window_bytes=window_bytes, **options)

    def _refuse(self, device: str, error: WireError) -> None:
        self.refused[device, error.reason] += 1

    def put(self, device: str, channel: str, data: bytes, times: int = 1) -> None:
        for _ in range(times):
            self.inside.put((topic(SITE, device, channel), data))

    async def taken(self, number: int) -> list[str]:
        """Take so many deliveries; return whose they were."""
        return [(await anext(self.inside.queue))[0].split("/")[-2] for _ in range(number)]


async def test_what_one_device_may_say_at_once_and_for_ever():
    """More than its burst is dropped, however quickly the rest is read; a second later it may say a second's worth."""
    door = Door()
    for number in range(int(MESSAGES) + 100):
        door.put("flood", "update", b"offer")
        if number < MESSAGES:
            await door.taken(1)
    assert door.refused == {("flood", "flood"): 100}
    await asyncio.sleep(0.1)
    door.put("flood", "update", b"offer", times=int(MESSAGES_PER_S))
    assert door.inside.queue.waiting_bytes == pytest.approx(len(b"offer") * 0.1 * MESSAGES_PER_S, abs=5)


async def test_who_sends_nothing_of_use_is_read_more_rarely():
    door = Door()
    for _ in range(int(MESSAGES)):
        door.put("flood", "update", b"offer")
        door.put("good", "update", b"offer")
        if door.inside.queue.waiting_bytes:
            for device in await door.taken(door.inside.queue.waiting_bytes // len(b"offer")):
                if device == "flood":
                    door.inside.penalize(device)
    assert int(MESSAGES) - door.refused["flood", "flood"] == pytest.approx(MESSAGES / (1 + REFUSED), abs=1)
    assert not door.refused["good", "flood"]


async def test_of_one_device_only_so_many_messages_wait():
    door = Door()
    door.put("flood", "want", b"want", times=2 * fair_queue.WAITING_MESSAGES)
    assert door.refused == {("flood", "flood"): fair_queue.WAITING_MESSAGES}


async def test_others_wait_behind_one_message_of_a_flood():
    """In the order of each device, one of each in turn."""
    door = Door()
    door.put("flood", "update", b"offer", times=400)
    for number in (1, 2):
        door.put("good", "want", b"want %d" % number)
    assert await door.taken(4) == ["flood", "good", "flood", "good"]
    assert not door.refused


async def test_a_flood_of_frames_takes_a_bounded_part_of_memory():
    """Two windows, since what was asked for before may still come; the others' frames find room all the same."""
    door = Door()
    door.put("flood", "update", FRAME, times=2000)
    most = 2 * WINDOW + sum(MOST_BYTES.values())
    assert WINDOW <= door.inside.queue.waiting_bytes <= most
    door.put("good", "update", FRAME, times=WINDOW // len(FRAME))
    assert not door.refused["good", "flood"]
    assert await door.taken(2) == ["flood", "good"]


async def test_the_bytes_of_all_devices_together_are_bounded(monkeypatch):
    monkeypatch.setattr(fair_queue, "WAITING_BYTES", 4 * len(FRAME))
    door = Door()
    for number in range(6):
        door.put(f"device-{number}", "update", FRAME)
    assert door.inside.queue.waiting_bytes == 4 * len(FRAME)
    assert len(door.refused) == 2


@pytest.mark.parametrize("channel", MOST_BYTES)
async def test_a_message_is_as_long_as_its_channel_allows(channel):
    door = Door()
    door.put("pi", channel, bytes(MOST_BYTES[channel]))
    door.put("pi", channel, bytes(MOST_BYTES[channel] + 1))
    assert door.refused == {("pi", "oversized"): 1}
    assert door.inside.queue.waiting_bytes == MOST_BYTES[channel]


async def test_reports_of_all_devices_together_are_bounded(monkeypatch):
    """A device's next report takes the place of its last."""
    monkeypatch.setattr(admission, "REPORTS_BYTES", 1000)
    door = Door()
    for name in ("a", "b", "a", "c"):
        door.put(name, "report", bytes(500))
    assert door.refused == {("c", "oversized"): 1}
    door.put("a", "report", bytes(100))
    door.put("c", "report", bytes(400))
    assert door.refused == {("c", "oversized"): 1}


async def test_of_strangers_little_is_heard_and_not_of_many():
    """They are there, and settle what they did for earlier runs; the names of a few are kept."""
    door = Door(takes=lambda device: device == "pi")
    for number in range(10 * MOST_STRANGERS):
        for channel in ("status", "report", "want", "update", "features"):
            door.put(f"stranger-{number}", channel, b"word")
    door.put("pi", "report", b"word")
    assert len(await door.taken(2 * MOST_STRANGERS + 1)) == 2 * MOST_STRANGERS + 1
    assert door.inside.queue.waiting_bytes == 0
    assert {reason for _, reason in door.refused} == {"too-many-devices"}


async def test_what_no_device_says_is_passed_over():
    door = Door()
    for name in ("_server", "_all", "", "a b", "../x"):
        door.put(name, "status", b"word")
    assert door.inside.queue.waiting_bytes == 0
    assert not door.refused


async def test_a_channel_is_closed_for_twice_as_long_each_time_and_to_nobody_else():
    """What came of use and what an accident explains closes nothing; after long good conduct it begins anew."""
    door, lasted = Door(), []
    for pause_s in (0.0, 1.0, admission.LONGEST_CLOSED_S + 1):
        await asyncio.sleep(pause_s)
        began = asyncio.get_running_loop().time()
        door.inside.count_useless("clumsy", "update", WASTED_BYTES // 2)
        for _ in range(200):
            door.inside.count_useless("flood", "update", len(FRAME))
        assert door.inside.closed_to("update") == {"flood"}
        assert door.inside.closed_to("features") == set()
        while door.inside.closed_to("update"):  # noqa: ASYNC110 - nobody tells when it is over
            await asyncio.sleep(0.5)
        lasted.append(asyncio.get_running_loop().time() - began)
    assert lasted == [admission.CLOSED_S, 2 * admission.CLOSED_S, admission.CLOSED_S]


async def test_many_small_messages_of_no_use_close_a_channel_too():
    """By their number, long before their bytes do; whose time is over is known again by a few."""
    door = Door()
    loop = asyncio.get_running_loop()
    for most, seconds in (
        (admission.WASTED_MESSAGES, admission.CLOSED_S),
        (admission.AFTERWARDS, 2 * admission.CLOSED_S),
    ):
        for number in range(int(most) + 1):
            assert not door.inside.closed_to("update"), number
            door.inside.count_useless("flood", "update", 82)
        began = loop.time()
        while door.inside.closed_to("update"):
            door.inside.count_useless("flood", "update", 82)  # on its way when the broker was told
            await asyncio.sleep(0.5)
        assert loop.time() - began == seconds


@pytest.mark.parametrize(
    ("pieces", "size", "times", "pause_s"),
    [(16, 256 << 10, 2, 0.0), (16, 256 << 10, 100, 10.0), (64, 16 << 10, 100, 1.0), (100, 200, 100, 2.0)],
    ids=["a window of late frames, twice", "one after each pause", "small ones", "failures that are said again"],
)
async def test_what_an_honest_device_sends_in_vain_closes_nothing(pieces, size, times, pause_s):
    door = Door(window_bytes=16 << 18)
    for _ in range(times):
        for _ in range(pieces):
            door.inside.count_useless("pi", "update", size)
        assert not door.inside.closed_to("update")
        await asyncio.sleep(pause_s)


@pytest.mark.parametrize("channel", ["status", "report"])
async def test_births_and_reports_of_one_device_are_rare(channel):
    """Hundreds a second wrote as many lines into the log; who says less than that for ever is heard each time."""
    door = Door()
    for _ in range(2000):
        door.put("flood", channel, b"word")
        door.put("good", "want", b"word")
        await asyncio.sleep(0.001)
        await door.taken(door.inside.queue.waiting_bytes // len(b"word"))
    assert 2000 - door.refused["flood", "flood"] <= admission.RARE + 2 * admission.RARE_PER_S + 1
    assert door.inside.closed_to(channel) == {"flood"}
    assert not door.inside.closed_to("want")
    for _ in range(500):
        door.put("good", channel, b"word")
        await asyncio.sleep(0.5)
        await door.taken(door.inside.queue.waiting_bytes // len(b"word"))
    assert not door.refused["good", "flood"]
