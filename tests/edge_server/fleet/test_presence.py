"""Presence during an open round: late wills, and one ID on two boards."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from edge_server.fleet import broker, presence
from edge_server.fleet.hub import Server
from edge_server.rounds import check_plan
from shared.protocol.messages import Status, Task
from shared.runtime.clock import monotonic
from shared.runtime.executor import inline
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import Session
from tests.edge_server.harness import SITE, Puppet, moved, site
from tests.naming import names_all

PATIENCE_S = 300.0


async def say(puppet: Puppet, instance: str, session: int, *, online: bool = True) -> None:
    """Say what a process of that device says, and let the server hear it."""
    status = Status(device=puppet.name, session=session, instance=instance, online=online)
    await puppet.say(status, "status")
    await asyncio.sleep(0.1)


@pytest.mark.virtual_time
async def test_a_birth_that_comes_twice_is_told_once(tmp_path, caplog):
    """The broker is asked for the status of a device whose report came first, and tells it beside the usual way."""
    caplog.set_level("INFO")
    async with site(tmp_path, rounds=1) as here:
        board = await here.device("pi", online=False)
        for session in (1, 1, 2):
            await say(board, "a", session)
    assert [one.args for one in caplog.records if one.name == presence.__name__ and "pi" in one.args] == [
        ("pi", 1),
        ("pi", 2),
    ]


@pytest.mark.virtual_time
async def test_an_id_that_two_boards_use(tmp_path, caplog):
    """Their births take turns: told once with the remedy, counted in the round's record, and the round goes on."""
    async with site(tmp_path, rounds=1) as here:
        twin, other = await here.device("twin", online=False), await here.device("other", online=False)
        await say(twin, "a", 5)
        await say(other, "c", 1)
        first: Task = await twin.task()
        for session in (6, 7, 8):
            await say(twin, "b", session)
            await say(twin, "a", session)
        assert await twin.task() == first
        await twin.answer(first, moved(here.plan, 0.5))
        await other.answer(await other.task(), moved(here.plan, 0.5))
        [closed] = (await here.ended())[1]
    assert closed.refused == {"id-in-use": 5}
    assert closed.arrived == ("other", "twin")
    warnings = [record for record in caplog.records if record.name != check_plan.__name__]
    [warning] = [record.getMessage() for record in warnings if record.levelname == "WARNING"]
    assert names_all(warning, "twin")


@pytest.mark.broker
async def test_two_real_clients_of_one_id(tmp_path):
    """They take turns at the broker, whose wills come in between: found out soon, and the device counts as there."""
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        place = Broker(port=(await stack.enter_async_context(broker.run_private_broker(tmp_path))).port)
        heard = await stack.enter_async_context(MqttTransport(place, "server").running())
        server = Server(SITE, heard, monotonic, inline)
        await stack.enter_async_context(server.listening())
        await heard.connected.wait()
        for instance in ("a", "b"):
            session = Session(tmp_path / instance, "pi", SITE, instance)
            await stack.enter_async_context(MqttTransport(place, "pi", session.presence).running())
        while not (server.flood.refused["id-in-use"] and server.fleet.online):
            server.presence.changed.clear()
            await server.presence.changed.wait()
