"""Presence recovers after a lost birth or a false death."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest

from edge_server.fleet import broker
from edge_server.fleet.hub import Server
from shared.protocol import wire
from shared.protocol.messages import Message, Report, Status, Update, Want
from shared.protocol.topics import parse_channel, topic
from shared.runtime.clock import monotonic
from shared.runtime.executor import inline
from shared.transport.base import Broker, Inbox
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session
from tests.edge_server.harness import SITE, moved, site

PATIENCE_S = 300.0
WORDS = {
    "want": Want(digest=bytes(16), frame_bytes=1024, ranges=[(0, 1)]),
    "update": Update(run="another", round=1, device="pi", params=None),
}


def status(session: int, *, online: bool, instance: str = "pi") -> Status:
    return Status(device="pi", session=session, instance=instance, online=online)


async def say(transport: MemoryTransport, channel: str, message: Message, *, retain: bool = False) -> None:
    await transport.publish(topic(SITE, "pi", channel), wire.encode(message), retain=retain)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("false", [status(1, online=False), status(1 << 40, online=False, instance="z")])
@pytest.mark.parametrize("channel", WORDS)
@pytest.mark.virtual_time
async def test_whoever_speaks_is_here(tmp_path, channel, false):
    """What is never retained proves it at once, and the device is given its task again."""
    async with site(tmp_path, rounds=1) as here:
        board, other = await here.device("pi"), await here.device("other")
        first = await board.task()
        await say(here.broker, "status", false, retain=True)
        assert here.server.fleet.online == ("other",)
        await say(here.broker, channel, WORDS[channel])
        assert here.server.fleet.online == ("other", "pi")
        assert await board.task() == msgspec.structs.replace(first, payload=b"")
        assert len(list(board.acks.drain())) == (channel == "update")
        for puppet, task in ((board, first), (other, await other.task())):
            await puppet.answer(task, moved(here.plan, 0.5))
        assert (await here.ended())[1][0].arrived == ("other", "pi")


@pytest.mark.virtual_time
async def test_two_reports_prove_it_but_not_one(tmp_path):
    """The first may be the retained one of a device that is gone; one that is gone for good stays gone."""
    async with site(tmp_path) as here:
        await here.device("pi")
        await say(here.broker, "report", Report(device="pi", at=1.0, instance="pi"), retain=True)
        await say(here.broker, "status", status(1, online=False), retain=True)
        for at, online in ((1.0, ()), (2.0, ()), (2.0, ()), (3.0, ("pi",))):
            await say(here.broker, "report", Report(device="pi", at=at, instance="pi"), retain=True)
            assert here.server.fleet.online == online
        await say(here.broker, "status", status(1, online=False), retain=True)
        assert here.server.fleet.online == ()


class Lossy(MemoryTransport):
    """A broker whose queue to the server is full: births are retained and not delivered."""

    def listening(self, topic: str) -> list[Inbox]:
        return [] if parse_channel(topic) == "status" else super().listening(topic)


@pytest.mark.virtual_time
async def test_a_device_whose_birth_was_lost_is_asked_for(tmp_path):
    """By its next report: the broker has its birth, and is asked for it; not more often than it can answer."""
    async with site(tmp_path, Lossy(), rounds=1) as here:
        boards = [await here.device(name) for name in ("pi", "other")]
        await asyncio.sleep(1.0)
        assert here.server.fleet.online == ()
        for board in boards:
            for at in range(3):
                await board.say(Report(device=board.name, at=float(at), instance=board.name), "report")
        await asyncio.sleep(1.0)
        assert here.server.fleet.online == ("other", "pi")
        for board in boards:
            await board.answer(await board.task(), moved(here.plan, 0.5))
        assert (await here.ended())[1][0].arrived == ("other", "pi")


@pytest.mark.broker
@pytest.mark.parametrize("kind", ["mosquitto", "embedded"])
@pytest.mark.parametrize("said", ["death", "nothing", "a later death", "another's death"])
async def test_an_agent_that_is_said_to_be_gone_says_that_it_is_not(tmp_path, kind, said):
    """It watches what the broker retains of it; a server that starts then, and knows that alone, finds it here."""
    if kind == "mosquitto" and not broker.find_mosquitto():
        pytest.skip("mosquitto is not installed")
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        running = await stack.enter_async_context(broker.run_private_broker(tmp_path, embedded=kind == "embedded"))
        place = Broker(port=running.port, version=3 if kind == "embedded" else 5)
        session = Session(tmp_path / "session", "pi", SITE, "boot")
        agent = MqttTransport(place, "pi", session.presence)
        heard = MqttTransport(place, "server")
        for client in (heard, agent):
            await stack.enter_async_context(client.running())
            await client.connected.wait()
        server = Server(SITE, heard, monotonic, inline)
        await stack.enter_async_context(server.listening())
        await _until(server, online=True)
        words = {
            "death": wire.encode(status(1, online=False, instance="boot")),
            "nothing": b"",
            "a later death": wire.encode(status(1 << 40, online=False, instance="boot")),
            "another's death": wire.encode(status(1 << 40, online=False, instance="z")),
        }
        await heard.publish(topic(SITE, "pi", "status"), words[said], retain=True)
        if words[said]:
            await _until(server, online=False)
        await _until(server, online=True)
        later = Server(SITE, heard, monotonic, inline)
        await asyncio.sleep(1.5)
        await stack.enter_async_context(later.listening())
        await _until(later, online=True)


async def _until(server: Server, *, online: bool) -> None:
    while bool(server.fleet.online) != online:
        server.presence.changed.clear()
        await server.presence.changed.wait()
