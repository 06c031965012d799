"""An update counts once, whole and in its own round, however often and in whatever order its frames come."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import msgspec
import pytest
import torch

from edge_server.journal.records import UpdateAccepted
from edge_server.rounds import collect_updates
from edge_server.rounds.collect_updates import Gather
from shared.errors import Unrecordable
from shared.protocol import payload
from shared.protocol.messages import BLOCK_BYTES, INLINE_BYTES, Ack, Status, Transfer, Want
from shared.transfer import frames
from tests.edge_server.harness import RUN, beginning, frame, moved, packed, site, update_for

pytestmark = pytest.mark.virtual_time

FAILED = {"bad": "no memory"}


async def test_an_update_offered_again_is_acknowledged_again_and_counted_once(tmp_path):
    """The acknowledgement may have been lost; the second offer carries other values, which must not count."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        task = await one.task()
        assert (await one.answer(task, moved(here.plan, 0.5))).verdict == "accepted"
        for _ in range(2):
            assert (await one.answer(task, moved(here.plan, 7.0), weight=100.0)).verdict == "duplicate"
        await two.answer(await two.task(), moved(here.plan, 0.0))
        state, rounds = await here.ended()
        for key, first in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], first + 0.25, rtol=0, atol=1e-6)
        records = [record for record in here.store.records() if isinstance(record, UpdateAccepted)]
        assert sorted(record.device for record in records) == ["one", "two"]
        [closed] = rounds
    assert closed.arrived == ("one", "two")
    assert closed.refused == {}
    assert set(closed.bytes_up) == {"one", "two"}
    assert closed.bytes_up["one"] == closed.bytes_up["two"] > 0


async def test_a_failure_counts_as_an_answer_and_is_told_again(tmp_path):
    """A round does not wait for a device that said it cannot; the other one's update decides."""
    async with site(tmp_path, rounds=1) as here:
        good, bad = await here.device("good"), await here.device("bad")
        task = await bad.task()
        failure = update_for(task, b"", params=None, failure="no memory")
        assert (await bad.offer(failure)).verdict == "accepted"
        assert (await bad.offer(failure)).verdict == "duplicate"
        await good.answer(await good.task(), moved(here.plan, 0.5))
        [closed], now = (await here.ended())[1], asyncio.get_running_loop().time()
    assert (closed.arrived, closed.failed, closed.outcome) == (("good",), FAILED, "aggregated")
    assert now < 1


async def test_an_update_for_a_round_that_is_over_is_late(tmp_path):
    """It is settled so that the device forgets it; it moves nothing."""
    async with site(tmp_path, round="deadline_s = 5.0") as here:
        slow, quick = await here.device("slow"), await here.device("quick")
        first = await slow.task()
        await quick.answer(await quick.task(), moved(here.plan, 0.5))
        second = await slow.task()
        assert (first.round, second.round) == (1, 2)
        late = await slow.answer(first, moved(here.plan, 9.0))
        await slow.answer(second, moved(here.plan, 0.5))
        await quick.answer(await quick.task(), moved(here.plan, 0.5))
        state, rounds = await here.ended()
        for key, leaf in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], leaf + 1.0, rtol=0, atol=1e-6)
    assert late.verdict == "late"
    assert [closed.arrived for closed in rounds] == [("quick",), ("quick", "slow")]
    assert not any(closed.refused for closed in rounds)


async def test_a_device_that_was_not_asked_is_refused(tmp_path):
    """Its update is of the open round, but it is not in the cohort."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        stranger = await here.device("zoe", online=False)
        task = await one.task()
        ack = await stranger.answer(msgspec.structs.replace(task, device="zoe"), moved(here.plan, 9.0))
        for puppet, its in ((one, task), (two, await two.task())):
            await puppet.answer(its, moved(here.plan, 0.5))
        [closed] = (await here.ended())[1]
    assert ack.verdict == "refused"
    assert closed.refused == {"unknown-device": 1}
    assert closed.arrived == ("one", "two")


async def test_frames_of_no_offer_and_of_another_transfer_are_passed_over(tmp_path):
    """They may be of a round that is over; frames that do not fit the offer are refused; the update is still taken."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        task = await one.task()
        data = packed(moved(here.plan, 0.5))
        other = Transfer(digest=bytes(16), size=len(data), frame_bytes=1024)
        update = update_for(task, data)
        assert update.params
        await one.say(frame(other, 0, data))
        await one.say(update)
        assert isinstance(await one.heard(), Want)
        await one.say(frame(other, 0, bytes(len(data))))
        longer = msgspec.structs.replace(update.params, size=9999)
        await one.say(frame(longer, 0, data))
        await one.say(frame(update.params, 0, data[:100]))
        assert (await one.offer(update, data)).verdict == "accepted"
        await two.answer(await two.task(), moved(here.plan, 0.5))
        [closed] = (await here.ended())[1]
    assert closed.refused == {"shape": 1, "truncated": 1}
    assert closed.arrived == ("one", "two")


async def test_what_is_damaged_on_its_way_is_taken_at_the_next_offer(tmp_path):
    """Every frame's checksum holds, the digest of the whole does not: nothing is stored, nobody is blamed.

    The server asks for it anew at once, and does not wait for the device to wonder.
    """
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        task = await one.task()
        data = packed(moved(here.plan, 0.5))
        update = update_for(task, data)
        assert update.params
        await one.say(update)
        await one.heard()
        for index in range(update.params.blocks):
            await one.say(frame(update.params, index, data[:-1] + b"!"))
        began = asyncio.get_running_loop().time()
        while (await one.heard()).ranges[0][0]:
            pass
        assert asyncio.get_running_loop().time() < began + 1
        assert (await one.offer(update, data)).verdict == "accepted"
        stored = (tmp_path / RUN / "updates" / "one").read_bytes()
        await two.answer(await two.task(), moved(here.plan, 0.5))
        [closed], is_stored = (await here.ended())[1], stored == data
    assert is_stored
    assert closed.refused == {"digest": 1}
    assert closed.arrived == ("one", "two")


async def test_a_frame_that_does_not_come_is_asked_for_again(tmp_path):
    """After a silence the server asks anew for what lacks, and for nothing that it has."""
    async with site(tmp_path, rounds=1, model='name = "mlp"\noptions = { hidden = 30 }') as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        assert update.params
        asked: Counter[int] = Counter()
        await one.say(update)
        while isinstance(message := await one.heard(), Want):
            for index, _ in frames.pieces(message, update.params, BLOCK_BYTES):
                asked[index] += 1
                if index != 1 or asked[1] == 3:
                    await one.say(frame(update.params, index, data))
        assert message == Ack(run=RUN, round=1, device="one", start=update.start, verdict="accepted")
        await two.answer(await two.task(), moved(here.plan, 0.5))
        await here.ended()
        assert asked == {index: 3 if index == 1 else 1 for index in range(9)}


async def test_who_offers_again_after_a_long_silence_is_asked_at_once(tmp_path):
    """By then the server had doubled its patience to a minute; the word of a device that is back ends that."""
    async with site(tmp_path, rounds=1, round="deadline_s = 500.0") as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        await one.say(update)
        await asyncio.sleep(100.0)
        assert len(list(one.acks.drain())) < 10
        began = asyncio.get_running_loop().time()
        assert (await one.offer(update, data)).verdict == "accepted"
        ended = asyncio.get_running_loop().time()
        await two.answer(await two.task(), moved(here.plan, 0.5))
        await here.ended()
        assert (ended - began) < 1.0


async def test_a_round_that_closes_keeps_no_half_update(tmp_path):
    """The deadline ends a transfer under way; its file is gone and the next round starts afresh."""
    async with site(tmp_path, round="deadline_s = 5.0", rounds=2) as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        assert update.params
        await one.say(update)
        assert isinstance(await one.heard(), Want)
        await one.say(frame(update.params, 0, data))
        await two.answer(await two.task(), moved(here.plan, 0.5))
        task = await one.task()
        assert not (tmp_path / RUN / "updates" / "one").exists()
        list(one.acks.drain())
        assert (await one.answer(task, moved(here.plan, 0.5))).verdict == "accepted"
        await two.answer(await two.task(), moved(here.plan, 0.5))
        rounds = (await here.ended())[1]
    assert [closed.arrived for closed in rounds] == [("two",), ("one", "two")]


@pytest.mark.parametrize(
    "second", [{"failure": "no", "params": None}, {"weight": float("nan")}], ids=["a failure", "a bad figure"]
)
async def test_a_device_counts_once_whatever_it_says_while_its_update_is_on_its_way(tmp_path, second):
    """It offers, then fails or is refused, and its frames come all the same: the round still waits for the other."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        await one.say(update)
        await one.heard()
        await one.say(msgspec.structs.replace(update, **second))
        assert isinstance(await one.heard(), Ack)
        for index in range(update.params.blocks):
            await one.say(frame(update.params, index, data))
        await asyncio.sleep(1)
        assert not list(one.acks.drain())
        await two.answer(await two.task(), moved(here.plan, 0.5))
        closed = (await here.ended())[1][0]
    assert closed.arrived == ("two",)
    assert set(closed.failed) == {"one"}


async def test_an_update_that_is_always_damaged_is_refused(tmp_path):
    """It rotted on its device: after three times over the link that is said, and the round goes on without it."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        for _ in range(2):
            await one.say(update)
            await one.heard()
            for index in range(update.params.blocks):
                await one.say(frame(update.params, index, data[:-1] + b"!"))
            await asyncio.sleep(1)
        verdict = (await one.offer(update, data[:-1] + b"!")).verdict
        await two.answer(await two.task(), moved(here.plan, 0.5))
        closed, verdicts = (await here.ended())[1][0], [verdict]
    assert verdicts == ["refused"]
    assert (closed.arrived, set(closed.failed)) == (("two",), {"one"})


async def test_content_that_comes_again_while_its_request_is_being_sent_is_stored_once(tmp_path, monkeypatch, caplog):
    """The connection to the broker is slow; the end of the first check must not end the account of the second."""
    request = Gather.handle_reconnect

    async def request_slowly(gather: Gather, device: str) -> None:
        await request(gather, device)
        await asyncio.sleep(1)

    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        data = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), data)
        await one.say(update)
        await one.heard()
        monkeypatch.setattr(Gather, "handle_reconnect", request_slowly)
        for content in (data[:-1] + b"!", data):
            for index in range(update.params.blocks):
                await one.say(frame(update.params, index, content))
            await asyncio.sleep(0.4)
        await asyncio.sleep(1)
        await two.answer(await two.task(), moved(here.plan, 0.5))
        closed = (await here.ended())[1][0]
    gc.collect()
    assert closed.arrived == ("one", "two")
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("session", [1, 2], ids=["the same session", "a new session"])
async def test_a_device_that_is_back_is_asked_at_once_for_what_was_under_way(tmp_path, session):
    """A new session has lost what was on its way to the broker; a status that is only repeated says nothing new."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        data, clock = packed(moved(here.plan, 0.5)), asyncio.get_running_loop().time
        update = update_for(await one.task(), data)
        await one.say(update)
        assert (await one.heard()).ranges[0][0] == 0
        began = clock()
        await one.status(online=True, session=session)
        assert (await one.heard()).ranges[0][0] == 0
        asked_s = clock() - began
        assert (await one.offer(update, data)).verdict == "accepted"
        await two.answer(await two.task(), moved(here.plan, 0.5))
        await here.ended()
        assert asked_s == pytest.approx(0.0 if session == 2 else 10.0, abs=0.5)


@pytest.mark.parametrize(
    ("announced", "most"), [(-1, INLINE_BYTES), (1, INLINE_BYTES), (20 << 10, INLINE_BYTES), (2**31, 1 << 40), (0, 100)]
)
async def test_content_in_an_update_that_is_not_the_announced_small_payload_is_not_stored(
    tmp_path, monkeypatch, announced, most
):
    """Accepted, it would be looked for in a file, which may be that of an earlier round or another device."""
    monkeypatch.setattr(collect_updates, "INLINE_BYTES", most)
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        content = packed(moved(here.plan, 0.5))
        update = update_for(await one.task(), content, payload=content)
        params = msgspec.structs.replace(update.params, size=len(content) + announced)
        await one.say(msgspec.structs.replace(update, params=params))
        reply = await one.heard()
        await two.answer(await two.task(), moved(here.plan, 0.5))
        closed, records = (await here.ended())[1][0], list(here.store.records())
    assert isinstance(reply, Want) or reply.verdict == "refused"
    assert closed.arrived == ("two",)
    assert [record.device for record in records if isinstance(record, UpdateAccepted)] == ["two"]


async def test_a_small_payload_inside_the_update_is_stored_without_frames(tmp_path):
    """A damaged one is requested in frames. The record does not carry it."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        task, data = await one.task(), packed(moved(here.plan, 0.5))
        assert payload.digest([memoryview(task.payload)]) == task.params.digest
        await one.say(update_for(task, data, payload=data))
        assert (await one.heard()).verdict == "accepted"
        task, data = await two.task(), packed(moved(here.plan, 1.5))
        assert (await two.offer(update_for(task, data, payload=data[:-1] + b"x"), data)).verdict == "accepted"
        state, rounds = await here.ended()
        for key, first in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], first + 1.0, rtol=0, atol=1e-6)
        [closed], records = rounds, [record for record in here.store.records() if isinstance(record, UpdateAccepted)]
    assert [record.update.payload for record in records] == [b"", b""]
    assert closed.bytes_up["one"] == records[0].update.params.size + frames.HEADER_BYTES <= closed.bytes_up["two"]


async def test_a_task_carries_no_payload_for_an_agent_that_does_not_know_it(tmp_path):
    async with site(tmp_path, rounds=1) as here:
        old, new = await here.device("old", online=False), await here.device("new")
        old_status = Status(device="old", session=1, instance="old", online=True)
        await old.say(old_status, "status")
        old, new = await old.task(), await new.task()
    assert old.params == new.params
    assert (old.payload, len(new.payload)) == (b"", new.params.size)


async def test_an_update_that_cannot_be_recorded_is_refused_without_those_of_its_transaction(tmp_path):
    devices = [f"device-{index}" for index in range(12)]
    async with site(tmp_path, rounds=1, cohort=f"min_devices = {len(devices)}") as here:
        sizes, extend = list[int](), here.store.extend

        def refuse_device_5(records, *payloads, **options) -> None:
            updates = [record.device for record in records if isinstance(record, UpdateAccepted)]
            if updates:
                sizes.append(len(updates))
            if devices[5] in updates:
                raise Unrecordable("UpdateAccepted cannot be recorded")
            extend(records, *payloads, **options)

        async def wait_for_disk(function, /, *args, **kwargs):
            await asyncio.sleep(0.02)
            return function(*args, **kwargs)

        here.store.extend, here.server.worker = refuse_device_5, wait_for_disk
        puppets = [await here.device(name) for name in devices]
        tree = moved(here.plan, 0.5)
        acks = await asyncio.gather(*[puppet.answer(await puppet.task(), tree) for puppet in puppets])
        [closed] = (await here.ended())[1]
        verdicts = {ack.device: ack.verdict for ack in acks}
    assert verdicts == dict.fromkeys(devices, "accepted") | {devices[5]: "refused"}
    assert closed.arrived == tuple(sorted({*devices} - {devices[5]}))
    assert closed.refused == {"unrecordable": 1}
    assert sizes == [12] + 12 * [1]
