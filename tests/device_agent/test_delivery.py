"""Updates on their way out: offered, sent as asked, kept until settled; every second is virtual."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from device_agent import outbox as files
from device_agent.delivery import FIRST_PATIENCE_S, LAST_PATIENCE_S, Delivery
from device_agent.outbox import Outbox
from shared import chunks, wire
from shared.background import background
from shared.errors import Unreachable
from shared.messages import Ack, Status, Transfer, Update, Want
from shared.topics import topic
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport

SITE, DEVICE = "lab", "board"
DATA = Random(9).randbytes(5 * 1024 + 17)
PAST_JITTER_S = 1.5 * FIRST_PATIENCE_S


@dataclass
class Bench:
    """A device's outbox and delivery, and the server's ear beside them."""

    transport: MemoryTransport
    outbox: Outbox
    delivery: Delivery
    offers: list[Update] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    def put(self, number: int, data: bytes, transfer: Transfer) -> None:
        """Commit an update as a trainer does."""
        draft = self.outbox.draft("trial", number)
        (draft / files.PAYLOAD).write_bytes(data)
        files.write(draft, Update(run="trial", round=number, device=DEVICE, params=transfer))
        self.outbox.commit(draft)

    async def tell(self, message: Ack | Want | Status, pause_s: float = 0.1) -> None:
        """Say something as the server, and let the device act on it."""
        receiver, channel = ("_server", "status") if isinstance(message, Status) else (DEVICE, "ack")
        await self.transport.publish(topic(SITE, receiver, channel), wire.encode(message))
        await asyncio.sleep(pause_s)

    async def listen(self, inbox: Inbox) -> None:
        async for _, data in inbox:
            if wire.is_message(data):
                self.offers.append(wire.decode_as(Update, data))
                self.moments.append(asyncio.get_running_loop().time())
            else:
                frame = chunks.decode(data)
                assert frame.data == DATA[frame.index * 1024 : (frame.index + 1) * 1024]
                self.frames.append(frame.index)

    @asynccontextmanager
    async def running(self) -> AbstractAsyncContextManager[None]:
        async with (
            self.transport.subscribe(topic(SITE, DEVICE, "update")) as inbox,
            background(self.listen(inbox), self.delivery.run()),
        ):
            await asyncio.sleep(0.1)
            yield

    @property
    def rounds(self) -> list[int]:
        return [update.round for update in self.offers]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    transport, box = MemoryTransport(), Outbox(tmp_path / "outbox", tmp_path / "state")
    return Bench(transport, box, Delivery(transport, SITE, DEVICE, box))


@pytest.fixture
def live(bench: Bench, virtually) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run a story in virtual time while the delivery lives."""

    def run(story: Callable[[], Awaitable[None]]) -> None:
        async def routine() -> None:
            async with bench.running():
                await story()

        virtually(routine())

    return run


def ack(number: int, verdict: str = "accepted", reason: str = "") -> Ack:
    return Ack(run="trial", round=number, device=DEVICE, verdict=verdict, reason=reason)


def online(*, there: bool = True) -> Status:
    return Status(device="_server", session=1, instance="x", online=there)


def test_what_waits_is_offered_at_start_and_a_new_one_when_woken(bench, live, describe) -> None:
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        assert bench.rounds == [1]
        assert bench.offers[0].params == describe(DATA)
        bench.put(2, DATA, describe(DATA))
        bench.delivery.wake.set()
        await asyncio.sleep(0.1)
        assert bench.rounds == [1, 1, 2]

    live(story)


def test_exactly_the_frames_that_are_wanted_are_sent(bench, live, describe) -> None:
    """Also a second time, and the short last one; every byte is counted."""
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        digest = describe(DATA).digest
        assert bench.frames == []
        await bench.tell(Want(digest=digest, ranges=[(1, 3), (5, 6)]))
        assert bench.frames == [1, 2, 5]
        await bench.tell(Want(digest=digest, ranges=[(2, 3)]))
        assert bench.frames == [1, 2, 5, 2]
        assert bench.delivery.bytes_sent == 3 * 1024 + 17 + 4 * chunks.HEADER_BYTES

    live(story)


def test_two_updates_of_the_same_content_answer_once(bench, live, describe) -> None:
    """A training that moves nothing gives the same payload every round: its frames are not sent for each of them."""
    bench.put(1, DATA, describe(DATA))
    bench.put(2, DATA, describe(DATA))

    async def story() -> None:
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 6)]))
        assert bench.frames == list(range(6))

    live(story)


@pytest.mark.parametrize("ranges", [[(0, 7)], [(6, 7)], [(3, 3)], [(4, 2)], [(-1, 2)], []])
def test_frames_that_do_not_exist_are_not_sent(bench, live, describe, ranges) -> None:
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        await bench.tell(Want(digest=describe(DATA).digest, ranges=ranges))
        assert bench.frames == []
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 1)]))
        assert bench.frames == [0]

    live(story)


def test_a_want_for_what_is_not_here_is_harmless(bench, live, describe) -> None:
    """An unknown digest, a failure without payload, a payload that has gone from the disk: the next want is served."""
    bench.outbox.add(Update(run="trial", round=1, device=DEVICE, params=None, failure="no"))
    bench.put(2, DATA, describe(DATA))
    bench.put(3, b"other", describe(b"other"))

    async def story() -> None:
        await bench.tell(Want(digest=bytes(16), ranges=[(0, 1)]))
        (bench.outbox.entries()[2].payload).unlink()
        await bench.tell(Want(digest=describe(b"other").digest, ranges=[(0, 1)]))
        assert bench.frames == []
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 1)]))
        assert bench.frames == [0]

    live(story)


@pytest.mark.parametrize("verdict", ["accepted", "duplicate", "late", "refused"])
def test_a_settled_update_leaves_the_outbox_and_is_silent(bench, live, describe, caplog, verdict) -> None:
    """Whatever the verdict; a refusal is an error in the log, with its reason; the other update still waits."""
    bench.put(1, DATA, describe(DATA))
    bench.put(2, DATA, describe(DATA))
    caplog.set_level(logging.INFO)

    async def story() -> None:
        await bench.tell(ack(1, verdict, "shape"))
        assert not bench.outbox.has("trial", 1)
        assert bench.outbox.has("trial", 2)
        await asyncio.sleep(PAST_JITTER_S)
        assert bench.rounds == [1, 2, 2]

    live(story)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == (["round 1: the server refused the update: shape"] if verdict == "refused" else [])


def test_an_update_is_kept_until_it_is_settled(bench, live, describe) -> None:
    """Frames that were sent settle nothing; an acknowledgement of another run, round or kind does not either."""
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 6)]))
        await bench.tell(ack(7))
        await bench.tell(Ack(run="other", round=1, device=DEVICE, verdict="accepted"))
        assert bench.outbox.has("trial", 1)

    live(story)


def test_an_acknowledgement_nobody_waits_for_is_harmless(bench, live, describe) -> None:
    """With an empty outbox, and twice for one update: the next update goes out as ever."""

    async def story() -> None:
        await bench.tell(ack(1))
        bench.put(1, DATA, describe(DATA))
        bench.delivery.wake.set()
        await asyncio.sleep(0.1)
        await bench.tell(ack(1))
        await bench.tell(ack(1))
        bench.put(2, DATA, describe(DATA))
        bench.delivery.wake.set()
        await asyncio.sleep(0.1)
        assert bench.rounds == [1, 2]

    live(story)


def test_a_server_that_comes_back_is_offered_everything_anew(bench, live, describe) -> None:
    """At once, not after the patience; a server that goes is offered nothing."""
    bench.put(1, DATA, describe(DATA))
    bench.put(2, DATA, describe(DATA))

    async def story() -> None:
        await bench.tell(online(there=False))
        assert bench.rounds == [1, 2]
        await bench.tell(online())
        assert bench.rounds == [1, 2, 1, 2]

    live(story)


def test_silence_is_answered_by_offering_again_in_growing_pauses(bench, live, describe) -> None:
    """From 2 s up to 30 s, each jittered by a quarter, so that a fleet does not speak in step."""
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        await asyncio.sleep(200)

    live(story)
    pauses = [after - before for before, after in pairwise(bench.moments)]
    expected = FIRST_PATIENCE_S
    for pause in pauses:
        assert 0.75 * expected <= pause <= 1.25 * expected
        expected = min(2 * expected, LAST_PATIENCE_S)
    assert len(pauses) > 5
    assert len({round(pause / expected, 3) for pause in pauses[-3:]}) == 3


def test_a_sign_of_life_makes_pauses_short_again(bench, live, describe) -> None:
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        await asyncio.sleep(60)
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 1)]))
        before = len(bench.offers)
        await asyncio.sleep(PAST_JITTER_S)
        assert len(bench.offers) == before + 1

    live(story)


def test_an_empty_outbox_is_silent(bench, live) -> None:
    async def story() -> None:
        await asyncio.sleep(1000)

    live(story)
    assert bench.offers == []


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"FM\x09", b"FM\x01\xc1", wire.encode(Update(run="r", round=1, device="x", params=None)), bytes(2 << 20)],
    ids=["empty", "text", "version", "cut", "unexpected", "huge"],
)
def test_bytes_that_say_nothing_are_dropped(bench, live, describe, data) -> None:
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        await bench.transport.publish(topic(SITE, DEVICE, "ack"), data)
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 1)]))
        assert bench.frames == [0]

    live(story)


def test_a_broker_that_is_away_only_delays(bench, live, describe) -> None:
    """An offer and a frame that cannot be sent are no end: the offer is repeated, the frame asked for again."""
    refusing = [True]

    class Shaky(MemoryTransport):
        async def publish(self, topic: str, payload: bytes, **options: bool) -> None:
            if refusing[0] and topic.endswith("/update"):
                raise Unreachable("away")
            await super().publish(topic, payload, **options)

    bench.transport = bench.delivery.transport = Shaky()
    bench.put(1, DATA, describe(DATA))

    async def story() -> None:
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 2)]))
        assert bench.offers == []
        assert bench.frames == []
        refusing[0] = False
        await asyncio.sleep(PAST_JITTER_S)
        assert bench.rounds == [1]
        await bench.tell(Want(digest=describe(DATA).digest, ranges=[(0, 2)]))
        assert bench.frames == [0, 1]

    live(story)


def test_ending_it_leaves_no_task_behind(bench, virtually, describe) -> None:
    """Nothing that it started waits on for the inbox after it was cancelled."""
    bench.put(1, DATA, describe(DATA))

    async def routine() -> None:
        async with bench.running():
            pass
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtually(routine())
