"""What the server says while no round is open, and what it could not say when one was opened."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.fleet.hub import Server
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Update
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import SITE, moved, site

pytestmark = pytest.mark.virtual_time


async def test_no_offer_is_settled_before_it_is_known_which_run_goes_on():
    """A server that came back hears devices before it has read its journal: a verdict would throw updates away.

    Found by chaos: the offers that piled up at the broker were all late in the milliseconds after its start.
    """
    broker = MemoryTransport()
    server = Server(SITE, broker, asyncio.get_running_loop().time, inline, was_run=lambda _run: True)
    offer = wire.encode(Update(run="run", round=4, device="a", params=None, failure="none"))
    async with broker.subscribe(topic(SITE, "a", "ack")) as acks, server.listening():
        heard = []
        for run in ("", "run", "another"):
            server.rounds.runs = {run} - {""}
            await broker.publish(topic(SITE, "a", "update"), offer)
            await asyncio.sleep(1)
            heard.append(len([*acks.drain()]))
        assert (heard[0], heard[1], heard[2]) == (0, 0, 1)


class Reconnecting(MemoryTransport):
    """What devices say comes through; what the server tells them does not until it is connected, or never."""

    denies = False

    def __init__(self) -> None:
        super().__init__()
        self.connected = asyncio.Event()
        self.tries = 0

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        self.tries += topic.endswith("/task")
        if topic.endswith("/task") and (self.denies or not self.connected.is_set()):
            raise Unreachable("not connected")
        await super().publish(topic, payload, retain=retain, assured=assured)


async def test_tasks_that_found_no_broker_are_given_when_it_is_back(tmp_path):
    """A round that is opened by statuses which came a moment before the connection was in use.

    They come no second time: the round's deadline passed, and its devices had never heard of it.
    """
    broker = Reconnecting()
    async with site(tmp_path, broker, rounds=1, cohort="min_devices = 2", round="deadline_s = 60.0") as here:
        broker.connected.set()
        await asyncio.sleep(1)  # it waits for its devices
        broker.connected.clear()
        puppets = [await here.device(name) for name in "ab"]
        await asyncio.sleep(2)
        broker.connected.set()
        for puppet in puppets:
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        [closed] = (await here.ended())[1]
        assert closed.arrived == ("a", "b")
        assert asyncio.get_running_loop().time() < 10


async def test_a_broker_that_denies_tasks_is_not_asked_ten_times_a_second(tmp_path):
    """It is there, so that there is nothing to wait for: tries are further and further apart."""
    broker = Reconnecting()
    broker.denies = True
    broker.connected.set()
    async with site(tmp_path, broker, rounds=1, cohort="min_devices = 1", round="deadline_s = 100.0") as here:
        await here.device("a")
        await asyncio.sleep(99)
        assert 5 < broker.tries < 15
