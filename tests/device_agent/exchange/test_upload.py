"""Updates on their way out: offered, sent as asked, kept until settled; every second is virtual."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise

import msgspec
import pytest

from device_agent.exchange.token_bucket import TokenBucket
from device_agent.exchange.upload import FIRST_PATIENCE_S, LAST_PATIENCE_S
from shared.errors import Unreachable
from shared.protocol.messages import PAYLOAD, Ack, Status, Update, Want
from shared.transfer import frames
from shared.transport.memory import MemoryTransport
from tests.device_agent.server_side import DATA, DEVICE, PAST_JITTER_S, ack

pytestmark = pytest.mark.virtual_time


def online(*, there: bool = True) -> Status:
    return Status(device="_server", session=1, instance="x", online=there)


async def test_what_waits_is_offered_at_start_and_a_new_one_when_woken(desk, describe) -> None:
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        assert desk.rounds == [1]
        assert desk.offers[0].params == describe(DATA)
        desk.put(2, DATA, describe(DATA))
        desk.delivery.wake.set()
        await asyncio.sleep(0.1)
        assert desk.rounds == [1, 1, 2]


async def test_states_of_runs_that_the_server_says_are_over_go(desk, tmp_path) -> None:
    """Two files of a model's size stayed of every run, on every board, for ever."""
    states = desk.delivery.outbox.states
    for run in ("long-ago", "long-ago@000002", "before", "before@000007", "now"):
        (states / run).write_bytes(b"a model")
    async with desk.running():
        over = Status(device="_server", session=1, instance="x", online=True, ended=("before", "long-ago"))
        await desk.tell(over)
        assert sorted(path.name for path in states.iterdir()) == ["before", "now"]


async def test_exactly_the_frames_that_are_wanted_are_sent(desk, describe) -> None:
    """Also a second time, and the short last one; every byte is counted."""
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        digest = describe(DATA).digest
        assert desk.frames == []
        await desk.tell(Want(digest=digest, frame_bytes=1024, ranges=[(1, 3), (5, 6)]))
        assert desk.frames == [1, 2, 5]
        await desk.tell(Want(digest=digest, frame_bytes=1024, ranges=[(2, 3)]))
        assert desk.frames == [1, 2, 5, 2]
        assert desk.delivery.uploads.bytes_sent == 3 * 1024 + 17 + 4 * frames.HEADER_BYTES


@pytest.mark.parametrize(
    ("knows", "rate", "is_inline"), [((PAYLOAD,), None, True), ((), None, False), ((PAYLOAD,), 1e6, False)]
)
async def test_a_small_payload_is_inside_the_update_if_the_server_knows(desk, describe, knows, rate, is_inline) -> None:
    """Frames alone are paced to a rate. The payload counts as sent, and is sent in frames on request."""
    desk.delivery.bucket = TokenBucket(rate)
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        desk.delivery.uploads.clock = asyncio.get_running_loop().time
        await desk.tell(msgspec.structs.replace(online(), knows=knows))
        assert desk.offers[-1].payload == (DATA if is_inline else b"")
        assert desk.delivery.uploads.bytes_sent == (len(DATA) + frames.HEADER_BYTES) * is_inline
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 6)]), 5.0)
        assert desk.frames == list(range(6))


async def test_two_updates_of_the_same_content_answer_once(desk, describe) -> None:
    """A training that moves nothing gives the same payload every round: its frames are not sent for each of them."""
    desk.put(1, DATA, describe(DATA))
    desk.put(2, DATA, describe(DATA))
    async with desk.running():
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 6)]))
        assert desk.frames == list(range(6))


@pytest.mark.parametrize("verdict", ["accepted", "duplicate", "late", "refused"])
async def test_a_settled_update_leaves_the_outbox_and_is_silent(desk, describe, caplog, verdict) -> None:
    """Whatever the verdict; a refusal is an error in the log, with its reason; the other update still waits."""
    desk.put(1, DATA, describe(DATA))
    desk.put(2, DATA, describe(DATA))
    caplog.set_level(logging.INFO)
    async with desk.running():
        await desk.tell(ack(1, verdict, "shape"))
        assert not desk.outbox.has("trial", 1, b"")
        assert desk.outbox.has("trial", 2, b"")
        await asyncio.sleep(PAST_JITTER_S)
        assert desk.rounds == [1, 2, 2]
    errors = [record.args for record in caplog.records if record.levelno >= logging.ERROR]
    assert errors == ([(1, "shape")] if verdict == "refused" else [])


async def test_an_update_is_kept_until_it_is_settled(desk, describe) -> None:
    """Frames that were sent settle nothing; an acknowledgement of another run, round or kind does not either."""
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 6)]))
        await desk.tell(ack(7))
        await desk.tell(Ack(run="other", round=1, device=DEVICE, verdict="accepted"))
        assert desk.outbox.has("trial", 1, b"")


async def test_a_server_that_comes_back_is_offered_everything_anew(desk, describe) -> None:
    """At once, not after the patience; a server that goes is offered nothing."""
    desk.put(1, DATA, describe(DATA))
    desk.put(2, DATA, describe(DATA))
    async with desk.running():
        await desk.tell(online(there=False))
        assert desk.rounds == [1, 2]
        await desk.tell(online())
        assert desk.rounds == [1, 2, 1, 2]


async def test_silence_is_answered_by_offering_again_in_growing_pauses(desk, describe) -> None:
    """From 2 s up to 30 s, each jittered by a quarter, so that a fleet does not speak in step."""
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        await asyncio.sleep(200)
    pauses = [after - before for before, after in pairwise(desk.moments)]
    expected = FIRST_PATIENCE_S
    for pause in pauses:
        assert 0.75 * expected <= pause <= 1.25 * expected
        expected = min(2 * expected, LAST_PATIENCE_S)
    assert len(pauses) > 5
    assert len(set(pauses[-3:])) == 3


async def test_a_sign_of_life_makes_pauses_short_again(desk, describe) -> None:
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        await asyncio.sleep(60)
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)]))
        before = len(desk.offers)
        await asyncio.sleep(PAST_JITTER_S)
        assert len(desk.offers) == before + 1


async def test_an_empty_outbox_is_silent(desk) -> None:
    async with desk.running():
        await asyncio.sleep(1000)
    assert desk.offers == []


async def test_a_want_for_what_is_not_here_is_harmless(desk, describe) -> None:
    """An unknown digest, a failure without payload, a payload that has gone from the disk: the next want is served."""
    desk.outbox.add(Update(run="trial", round=1, device=DEVICE, params=None, failure="no"))
    desk.put(2, DATA, describe(DATA))
    desk.put(3, b"other", describe(b"other"))
    async with desk.running():
        await desk.tell(Want(digest=bytes(16), frame_bytes=1024, ranges=[(0, 1)]))
        (desk.outbox.entries()[2].payload).unlink()
        await desk.tell(Want(digest=describe(b"other").digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert desk.frames == []
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert desk.frames == [0]


async def test_an_acknowledgement_nobody_waits_for_is_harmless(desk, describe) -> None:
    """With an empty outbox, and twice for one update: the next update goes out as ever."""
    async with desk.running():
        await desk.tell(ack(1))
        desk.put(1, DATA, describe(DATA))
        desk.delivery.wake.set()
        await asyncio.sleep(0.1)
        await desk.tell(ack(1))
        await desk.tell(ack(1))
        desk.put(2, DATA, describe(DATA))
        desk.delivery.wake.set()
        await asyncio.sleep(0.1)
        assert desk.rounds == [1, 2]


async def test_a_broker_that_is_away_only_delays(desk, describe) -> None:
    """An offer and a frame that cannot be sent are no end: the offer is repeated, the frame asked for again."""
    refusing = [True]

    class Shaky(MemoryTransport):
        async def publish(self, topic: str, payload: bytes, **options: bool) -> None:
            if refusing[0] and topic.endswith("/update"):
                raise Unreachable("away")
            await super().publish(topic, payload, **options)

    desk.transport = desk.delivery.transport = Shaky()
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 2)]))
        assert desk.offers == []
        assert desk.frames == []
        refusing[0] = False
        await asyncio.sleep(PAST_JITTER_S)
        assert desk.rounds == [1]
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 2)]))
        assert desk.frames == [0, 1]


async def test_ending_it_leaves_no_task_behind(desk, describe) -> None:
    """Nothing that it started waits on for the inbox after it was cancelled."""
    desk.put(1, DATA, describe(DATA))
    async with desk.running():
        pass
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
