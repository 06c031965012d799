"""Split round with scripted devices: recovery, refusals, waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from edge_server.fleet.answers import OVER
from edge_server.journal.records import Rewound, RoundClosed, closed_rounds
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.split import gradient_store
from shared.errors import ConfigError
from shared.protocol import payload, wire
from shared.protocol.messages import BLOCK_BYTES, MISSED_STEPS, Features, Gradient, Room, Skip, Task, Transfer, Want
from shared.protocol.topics import topic
from shared.tensors.tree import Tree
from shared.transfer import frames
from shared.transport.base import Inbox
from tests.edge_server.harness import SITE, Puppet, Site, moved, packed, site, update_for, virtual
from tests.naming import log_messages, names_all, naming

pytestmark = [pytest.mark.usefixtures("plain_split"), pytest.mark.virtual_time]

STEPS, DEADLINE_S = 3, 10.0
SPLIT = {
    "algorithm": f'name = "plain-split"\noptions = {{ steps = {STEPS} }}',
    "round": f"deadline_s = 200.0\nstep_deadline_s = {DEADLINE_S}",
    "rounds": 1,
}


def features(step: int, *, width: int = 4, fill: float = 1.0) -> bytes:
    """Return a step's features of a batch of two, as they travel."""
    up = torch.full((2, width), fill * step)
    return packed({"features": up, "labels": torch.tensor([0, 1], dtype=torch.uint8), "noise": torch.zeros(())})


@dataclass
class Device:
    """A puppet with ears for gradients."""

    puppet: Puppet
    task: Task
    gradients: Inbox

    def offer(self, step: int, data: bytes, **changes: Any) -> Features:
        """Return an honest offer, but for the changes."""
        honest = Features(
            run=self.task.run,
            round=self.task.round,
            device=self.puppet.name,
            start=self.task.params.digest,
            step=step,
            params=Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=BLOCK_BYTES),
        )
        return msgspec.structs.replace(honest, **changes)

    async def say(self, message: Any) -> None:
        """Publish on the device's topic of features."""
        await self.puppet.say(message, "features")

    async def heard(self) -> Any:
        """Return the server's next word or frame."""
        async with asyncio.timeout(500.0):
            data = (await anext(self.gradients))[1]
        return frames.decode(data) if frames.is_frame(data) else wire.decode(data)

    async def give(self, step: int, data: bytes = b"", **changes: Any) -> Gradient | Skip:
        """Offer features and send what is asked for, until the answer is there."""
        data = data or features(step)
        offer = self.offer(step, data, **changes)
        await self.say(offer)
        while isinstance(word := await self.heard(), Want):
            for start, stop in frames.pieces(word, offer.params, BLOCK_BYTES):
                part = memoryview(data)[start * BLOCK_BYTES : stop * BLOCK_BYTES]
                await self.say(frames.encode(offer.params, start, [part]))
        assert isinstance(word, Gradient | Skip)
        return word

    async def finish(self, tree: Tree) -> None:
        """Deliver an update."""
        assert (await self.puppet.answer(self.task, tree)).verdict == "accepted"


@asynccontextmanager
async def two(folder: Any, **plan: Any) -> AsyncIterator[tuple[Site, Device, Device]]:
    """Run a server with two devices that have their tasks."""
    async with site(folder, **(SPLIT | plan)) as here:
        found = []
        for name in "ab":
            gradients = here.broker.subscribe(topic(SITE, name, "gradient"))
            inbox = await here.stack.enter_async_context(gradients)
            found.append((await here.device(name), inbox))
        devices = [Device(puppet, await puppet.task(), inbox) for puppet, inbox in found]
        yield here, *devices


async def rest(here: Site, *devices: Device, first: int = 1) -> RoundClosed:
    """Do the steps that are left, and deliver updates."""
    for step in range(first, STEPS + 1):
        words = await asyncio.gather(*(device.give(step) for device in devices))
        assert all(isinstance(word, Gradient) and word.step == step for word in words)
    await asyncio.gather(*(device.finish(client_part(here)) for device in devices))
    _, [closed] = await here.ended()
    return closed


async def test_steps_are_served_when_both_have_delivered_and_gradients_answer_their_features(tmp_path):
    async with two(tmp_path) as (here, a, b):
        giving = asyncio.create_task(a.give(1))
        await asyncio.sleep(DEADLINE_S / 2)
        assert not giving.done(), "a step is for all"
        mine, other = await b.give(1, features(1, fill=2.0)), await giving
        assert mine.answers == payload.digest([memoryview(features(1, fill=2.0))])
        assert other.answers == payload.digest([memoryview(features(1))])
        closed = await rest(here, a, b, first=2)
        assert (closed.steps, closed.missed, closed.refused) == (STEPS, {}, {})


async def test_a_gradient_is_given_again_as_often_as_the_features_are_offered_again(tmp_path):
    """The frames are asked for, or pushed into the room that the device has said it has."""
    async with two(tmp_path) as (here, a, b):
        first, _ = await asyncio.gather(a.give(1), b.give(1))
        await a.say(a.offer(1, features(1), room=Room(blocks=4, frame_bytes=1024)))
        again, frame = await a.heard(), await a.heard()
        assert msgspec.structs.replace(again, pushed=0) == first
        assert again.pushed == again.params.blocks == 1
        assert payload.digest([frame.data]) == first.params.digest
        await a.say(Want(digest=first.params.digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert (await a.heard()).data == frame.data
        await rest(here, a, b, first=2)


async def test_features_offered_again_while_they_come_are_not_asked_for_twice(tmp_path):
    """A device behind a slow link waits longer for an answer than it is patient, while its frames are under way."""
    async with two(tmp_path) as (here, a, b):
        data = bytes(64 * BLOCK_BYTES)
        offer = a.offer(1, data)
        await a.say(offer)
        asked = await a.heard()
        await a.say(frames.encode(offer.params, 0, [memoryview(data)[:BLOCK_BYTES]]))
        await a.say(offer)

        async def until_a_repetition(asked: Want) -> None:
            while asked.ranges[0][0] < (more := await a.heard()).ranges[0][0]:
                asked = more

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(until_a_repetition(asked), 0.5)
        assert (await a.heard()).ranges[0][0] == 1, "after a silence what lacks is asked for anew"
        await rest(here, a, b)


async def test_who_offers_and_sends_nothing_costs_a_deadline_and_is_told_where_the_others_are(tmp_path):
    clock = asyncio.get_running_loop().time
    async with two(tmp_path) as (here, a, b):
        began = clock()
        await b.say(b.offer(1, features(1)))
        assert isinstance(await a.give(1), Gradient)
        assert DEADLINE_S <= clock() - began < DEADLINE_S + 1
        told = [word for word in [await b.heard() for _ in range(2)] if isinstance(word, Skip)]
        assert [(word.step, word.offered) for word in told] == [(2, 1)]
        closed = await rest(here, a, b, first=2)
        assert closed.missed == {"b": 1}


def client_part(here: Site) -> Tree:
    """Return an update."""
    return {key: leaf for key, leaf in moved(here.plan, 0.5).items() if key < "3"}


BAD = {
    "oversized": {"params": Transfer(digest=bytes(16), size=1 << 30, frame_bytes=1024)},
    "shape": {"data": features(1, width=5)},
    "not-finite": {"data": features(1, fill=float("nan"))},
    "malformed": {"data": b"neither this nor that"},
    "codec": {"data": features(1).replace(b"dense", b"tense")},
    "large": {"data": features(1, fill=1e6)},
}


@pytest.mark.parametrize("reason", BAD)
async def test_features_that_cannot_be_used_spoil_nobody_elses_step(tmp_path, reason):
    """They are refused, the step goes on at once without that device, and it takes part in the next."""
    clock = asyncio.get_running_loop().time
    async with two(tmp_path) as (here, a, b):
        bad, began = asyncio.create_task(b.give(1, **BAD[reason])), clock()
        await asyncio.sleep(1)
        assert isinstance(await a.give(1), Gradient)
        assert clock() - began < 2, "it was waited for"
        word = await bad
        assert (word.step, word.offered) == (2, 1)
        closed = await rest(here, a, b, first=2)
        assert (closed.refused, closed.missed) == ({reason: 1}, {"b": 1})


@pytest.mark.parametrize("times", [6.0, 25.0, -25.0, 29.9])
async def test_features_some_times_too_large_are_refused_and_their_device_is_named(tmp_path, caplog, times):
    """Those of one in four that were 25 times as large halved the accuracy, within the bound of updates."""
    async with two(tmp_path) as (here, a, b):
        await asyncio.gather(a.give(1), b.give(1, features(1, fill=times)))
        closed = await rest(here, a, b, first=2)
        assert (closed.refused, closed.missed) == ({"large": 1}, {"b": 1})
    assert log_messages(caplog, "b", "round.most_norm")


async def test_a_plan_without_a_bound_takes_features_of_any_size(tmp_path):
    async with two(tmp_path, round=f"{SPLIT['round']}\nmost_norm = 0.0") as (here, a, b):
        words = await asyncio.gather(a.give(1), b.give(1, **BAD["large"]))
        assert all(isinstance(word, Gradient) for word in words)
        closed = await rest(here, a, b, first=2)
        assert (closed.refused, closed.missed) == ({}, {})


@pytest.mark.parametrize("tiny", [1e-9, 1e-3])
async def test_who_sends_tiny_features_does_not_have_the_others_refused(tmp_path, tiny):
    """Of two the lower one is the median: the honest device was refused in each step, as far beyond it."""
    async with two(tmp_path) as (here, a, b):
        for step in range(1, STEPS + 1):
            words = await asyncio.gather(a.give(step), b.give(step, features(step, fill=tiny)))
            assert all(isinstance(word, Gradient) and word.step == step for word in words)
        closed = await rest(here, a, b, first=STEPS + 1)
        assert (closed.refused, closed.missed) == ({}, {})


async def test_nonsense_about_features_is_counted_and_changes_nothing(tmp_path):
    async with two(tmp_path) as (here, a, b):
        await b.say(b.offer(1, features(1), device="a"))
        await b.say(b.offer(0, features(1)))
        await b.say(b.offer(STEPS + 1, features(1)))
        await b.say(b.offer(1, features(1), run="another"))
        await b.say(b"FC\x01short")
        await b.say(b.offer(1, features(1), start=bytes(16)))
        first, _ = await asyncio.gather(a.give(1), b.give(1))
        await a.say(Want(digest=first.params.digest, frame_bytes=1024, ranges=[(0, 99)]))
        closed = await rest(here, a, b, first=2)
        assert closed.refused == {"identity": 1, "step": 2, "unknown-run": 1, "truncated": 1, "shape": 1}
        assert closed.missed == {}


async def test_what_belongs_to_a_session_that_a_restart_lost_is_void(tmp_path):
    """An update of it is done anew; its device, at whatever step, is told to begin again."""
    async with two(tmp_path) as (here, a, b):
        assert (await a.puppet.answer(a.task, client_part(here))).verdict == "void"
        word = await b.give(STEPS)
        assert (word.step, word.offered) == (1, STEPS)
        closed = await rest(here, a, b)
        assert closed.arrived == ("a", "b")


async def test_a_device_that_fails_is_not_waited_for_and_one_whose_round_is_over_is_told_so(tmp_path):
    clock = asyncio.get_running_loop().time
    async with two(tmp_path, rounds=2) as (here, a, b):
        began = clock()
        giving = asyncio.create_task(a.give(1))
        await asyncio.sleep(1)
        failure = update_for(b.task, b"", params=None, failure="no memory")
        assert (await b.puppet.offer(failure)).verdict == "accepted"
        assert isinstance(await giving, Gradient)
        assert clock() - began < DEADLINE_S
        for step in range(2, STEPS + 1):
            assert isinstance(await a.give(step), Gradient)
        await a.finish(client_part(here))
        assert (await a.puppet.task()).round == 2
        word = await b.give(1)
        assert (word.step, word.offered) == (OVER, 1)
        [closed] = closed_rounds(here.store.records())
        assert (closed.failed, closed.missed) == ({"b": "no memory"}, {})


async def test_where_all_features_are_refused_the_round_ends_without_them(tmp_path):
    clock = asyncio.get_running_loop().time
    async with two(tmp_path) as (here, a, b):
        began = clock()
        for step in range(1, STEPS + 1):
            both = (one.give(step, features(step, fill=float("inf"))) for one in (a, b))
            assert [word.step for word in await asyncio.gather(*both)] == [step + 1, step + 1]
        assert clock() - began < 1
        closed = await rest(here, a, b, first=STEPS + 1)
        assert closed.missed == {"a": STEPS, "b": STEPS}


async def begun_anew(device: Device, *, steps: int = STEPS) -> list[tuple[int, bytes]]:
    """Return what a device is told that does its session once more from the first step; it goes where it is told."""
    told, step = list[Gradient | Skip](), 1
    while step <= steps:
        told.append(await device.give(step))
        step = step + 1 if isinstance(told[-1], Gradient) else told[-1].step
    return sent(told)


def sent(words: list[Any]) -> list[tuple[int, bytes]]:
    """Return step and digest of gradients; of a Skip the step alone."""
    return [(word.step, word.params.digest if isinstance(word, Gradient) else b"") for word in words]


@pytest.mark.parametrize("in_memory", [gradient_store.IN_MEMORY, 0])
async def test_who_begins_its_session_anew_is_answered_as_before_and_nobody_does_a_step_twice(
    tmp_path, monkeypatch, in_memory
):
    """In the middle of it, with features that have come, and when all steps are over; from memory, or out of a file."""
    monkeypatch.setattr(gradient_store, "IN_MEMORY", in_memory)
    async with two(tmp_path) as (here, a, b):
        given = [(await asyncio.gather(a.give(1), b.give(1)))[1]]
        delivered = b.offer(2, features(2))
        await b.say(delivered)
        assert isinstance(await b.heard(), Want)
        await b.say(frames.encode(delivered.params, 0, [memoryview(features(2))]))
        assert await begun_anew(b, steps=1) == sent(given)
        assert isinstance(await a.give(2), Gradient)
        given += [await b.give(2)]
        assert await begun_anew(b, steps=2) == sent(given)
        given += [(await asyncio.gather(a.give(3), b.give(3)))[1]]
        for _ in range(2):
            await asyncio.sleep(5)  # it takes a process so long; who begins anew all the time waits as long
            assert await begun_anew(b) == sent(given)
        closed = await rest(here, a, b, first=STEPS + 1)
        assert (closed.steps, closed.missed, closed.refused, closed.arrived) == (STEPS, {}, {}, ("a", "b"))


async def test_who_begins_anew_while_the_others_go_on_without_it_misses_these_steps_alone(tmp_path):
    async with two(tmp_path) as (here, a, b):
        await asyncio.gather(a.give(1), b.give(1))
        assert isinstance(await a.give(2), Gradient)
        told = asyncio.create_task(begun_anew(b))
        await asyncio.sleep(1)
        await a.give(3)
        assert [(step, digest != b"") for step, digest in await told] == [(1, True), (3, False), (3, True)]
        closed = await rest(here, a, b, first=STEPS + 1)
        assert closed.missed == {"b": 1}


def test_where_no_gradients_are_kept_an_update_of_a_session_begun_anew_too_late_does_not_count(tmp_path, caplog):
    """Its device says that it missed every step: its part is as it came. The round's record says so."""

    async def play() -> None:
        async with two(tmp_path, link=LinkConfig(frame_bytes=1024, kept_gradients_mb=0)) as (here, a, b):
            for step in range(1, STEPS + 1):
                await asyncio.gather(a.give(step), b.give(step))
            assert await begun_anew(b) == [(STEPS + 1, b"")]
            verdict = await b.puppet.answer(b.task, client_part(here), metrics={MISSED_STEPS: float(STEPS)})
            assert verdict.verdict == "refused"
            assert names_all(verdict.reason, STEPS)
            verdict = await a.puppet.answer(a.task, client_part(here), metrics={MISSED_STEPS: STEPS - 1.0})
            assert verdict.verdict == "accepted"
            _, [closed] = await here.ended()
            assert (closed.arrived, closed.refused, closed.missed) == (("a",), {"missed-steps": 1}, {})
            assert set(closed.failed) == {"b"}

    with caplog.at_level("INFO"):
        virtual(play())
    assert "link.kept_gradients_mb" in caplog.text


@pytest.mark.parametrize("section", [{"evaluation": "on_device = true"}, {"measure": "seconds = 1.0"}])
def test_a_plan_that_asks_split_devices_for_whole_models_is_refused(tmp_path, section):
    async def play() -> None:
        async with two(tmp_path, **section):
            pass

    with pytest.raises(ConfigError, match=naming("evaluation.on_device", "measure.seconds")):
        virtual(play())


def test_journals_without_what_split_rounds_record_are_read():
    """Of a round and of a step back as they were written before."""
    old = b'{"type":"RoundClosed","round":1,"outcome":"missed","arrived":[],"seconds":1.0}'
    assert msgspec.json.decode(old, type=RoundClosed).steps is None
    assert not msgspec.json.decode(b'{"type":"Rewound","round":1,"cause":""}', type=Rewound).reopened
