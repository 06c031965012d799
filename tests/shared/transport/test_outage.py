"""The broker goes away and comes back: what callers see meanwhile, and that everything works as before afterwards."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from edge_server.fleet import broker as brokers
from shared.errors import Unreachable
from shared.transport import mqtt
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.naming import names_all, naming

pytestmark = pytest.mark.broker


async def lost(*transports: MqttTransport) -> None:
    """Wait until they have noticed."""
    while any(transport.connected.is_set() for transport in transports):  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def published(transport: MqttTransport, topic: str, payload: bytes) -> None:
    """Publish as everybody who must does: again, until it is accepted."""
    while True:
        with suppress(Unreachable):
            return await transport.publish(topic, payload)
        await asyncio.sleep(0.02)


async def test_killed_and_restarted(mortal, kill_broker):
    """After kill -9 and a start on the same port, every open subscription is renewed and messages flow, three times.

    The broker has forgotten everything: it is the client that subscribes again, also to what was opened meanwhile and
    not to what was closed meanwhile.
    """
    async with mortal.transport("a").running() as a, mortal.transport("b").running() as b:
        async with a.subscribe("one/+") as one, a.subscribe("gone") as gone:
            for cycle in (b"0", b"1", b"2"):
                async with mortal.alive() as broker:
                    await asyncio.gather(a.connected.wait(), b.connected.wait())
                    await published(b, "one/x", cycle)
                    assert await anext(one) == ("one/x", cycle)
                    await kill_broker(broker)
                await lost(a, b)
        async with a.subscribe("late") as late, mortal.alive():
            await asyncio.gather(a.connected.wait(), b.connected.wait())
            for topic in ("one/x", "gone", "late"):
                await published(b, topic, b"after")
            assert await anext(late) == ("late", b"after")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(gone), 0.05)


async def test_publishing_while_the_broker_is_away(mortal, kill_broker):
    """Before it ever was there and after it died, assured or not: Unreachable at once, nothing is kept for later."""
    async with mortal.transport("a").running() as a:
        for assured in (True, False):
            with pytest.raises(Unreachable, match=naming(f"127.0.0.1:{mortal.port}")):
                await a.publish("x", b"early", assured=assured)
        async with mortal.alive() as broker:
            await a.connected.wait()
            await kill_broker(broker)
        await lost(a)
        for assured in (True, False):
            with pytest.raises(Unreachable):
                await a.publish("x", b"during", assured=assured)
        async with mortal.alive(), a.subscribe("#") as inbox:
            await published(a, "x", b"after")
            assert (await anext(inbox))[1] == b"after"


async def test_a_publication_under_way_ends_with_the_broker(mortal, kill_broker):
    """A broker that hangs accepts nothing; when it dies, whoever waits for its answer is told, and does not hang."""
    async with mortal.alive() as broker, mortal.transport("a").running() as a:
        await a.connected.wait()
        broker.process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(a.publish("x", b"?"))
        opening = asyncio.create_task(a.subscribe("x").__aenter__())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert not opening.done()
        await kill_broker(broker)
        with pytest.raises(Unreachable):
            await waiting
        await opening  # not an error: it is renewed on reconnecting


async def test_says_so_once_a_state(mortal, kill_broker, caplog):
    """One warning for each outage, however often is tried; one line for each connection."""
    caplog.set_level(logging.INFO, "shared.transport.mqtt")
    async with mortal.transport("a").running() as a:
        while not caplog.records:  # noqa: ASYNC110 - what is waited for is a line of the log
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.7)  # several attempts
        async with mortal.alive() as broker:
            await a.connected.wait()
            await kill_broker(broker)
        await lost(a)
        await asyncio.sleep(0.7)
    away, connected, lost_ = [record for record in caplog.records if record.name == mqtt.__name__]
    assert [record.levelname for record in (away, connected, lost_)] == ["WARNING", "INFO", "WARNING"]
    assert all(names_all(record.getMessage(), f"127.0.0.1:{mortal.port}") for record in (away, connected, lost_))


async def test_a_connection_that_hangs_is_given_up(tmp_path):
    """A broker that stops without closing its sockets, as behind a dead link: found out within two keepalives."""
    async with brokers.run_private_broker(tmp_path) as broker:
        a = MqttTransport(Broker(port=broker.port, keepalive_s=1), "a")
        async with a.running():
            await a.connected.wait()
            broker.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(60.0):  # a keepalive of a minute, which is usual, would take longer
                await lost(a)
            broker.process.send_signal(signal.SIGCONT)
            await a.connected.wait()


async def test_leaving_leaves_nothing_behind(mortal, kill_broker):
    """No task and no socket: left while connected, in an outage, and while trying for the first time."""
    descriptors, tasks = open_files(), asyncio.all_tasks()
    async with mortal.transport("a").running():
        await asyncio.sleep(0.05)
    async with mortal.alive() as broker:
        async with mortal.transport("b").running() as b:
            await b.connected.wait()
        async with mortal.transport("c").running() as c:
            await c.connected.wait()
            await kill_broker(broker)
            await lost(c)
    assert asyncio.all_tasks() == tasks
    while open_files() != descriptors:  # noqa: ASYNC110 - an attempt that was given up ends on a thread of its own
        await asyncio.sleep(0.01)


def test_an_error_in_the_block_leaves_as_itself(mortal, real):
    """Not in a group with the connection's own tasks."""

    async def use() -> None:
        async with mortal.alive(), mortal.transport("a").running() as a:
            await a.connected.wait()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        real(use())


def test_a_defect_of_the_connection_ends_the_block(real):
    """What is neither an outage nor a refusal is not slept over: a broken birth is an error in the block."""

    async def use() -> None:
        def presence():
            raise ZeroDivisionError

        async with MqttTransport(Broker(), "a", presence).running():
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        real(use())
