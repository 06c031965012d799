"""The link breaks while the broker lives on: the MQTT session holds what was promised meanwhile."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from shared.errors import Unreachable
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport

pytestmark = pytest.mark.broker
OVER_MQTT = pytest.mark.parametrize("site", ["mosquitto-5", "mosquitto-3", "embedded"], indirect=True)


class Relay:
    """A line to the broker that takes its time and that a test may cut."""

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self._to, self._delay_s = port, delay_s
        self._ends: list[asyncio.StreamWriter] = []
        self.broken = False
        self.bytes_carried = 0

    @asynccontextmanager
    async def laid(self):
        """Yield the near end's port while the block lasts."""
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            self.cut()
            server.close()

    def cut(self) -> None:
        """Reset every connection, in both directions, without a word."""
        for writer in self._ends:
            writer.transport.abort()
        self._ends.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.broken:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._ends += [writer, far_writer]
        await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer), return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(self._delay_s)
            self.bytes_carried += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


async def until_lost(transport: MqttTransport) -> None:
    """Wait until the transport has noticed, as callers do."""
    with suppress(Unreachable):
        while True:
            await transport.publish("x", b"")


@pytest.mark.parametrize("site", ["mosquitto-5", "mosquitto-3"], indirect=True)
async def test_assured_messages_wait_for_a_device_that_is_cut_off(site, take):
    """Published while the device's link is down, they come in order once it is back, without a new subscription.

    The embedded broker forgets what it could not deliver; there the next birth brings a task again.
    """
    relay = Relay(site.broker.port)
    async with relay.laid() as port, site.clients(1) as (server,):
        broker = Broker(port=port, version=site.broker.version)
        device = MqttTransport(broker, site.topic("device"))
        async with device.running(), device.subscribe(site.topic("task")) as inbox:
            await device.connected.wait()
            await server.publish(site.topic("task"), b"0")
            assert await take(inbox, 1) == [(site.topic("task"), b"0")]
            relay.broken = True
            relay.cut()
            await until_lost(device)
            for number in range(1, 6):
                await server.publish(site.topic("task"), str(number).encode())
            relay.broken = False
            await device.connected.wait()
            got: list[int] = []
            while got[-1:] != [5]:
                got.append(int((await anext(inbox))[1]))
            assert [number for number in got if number] == [
                1,
                2,
                3,
                4,
                5,
            ]  # 0 may come again: its answer was cut off


@OVER_MQTT
async def test_a_link_that_breaks_all_the_time_still_delivers(site):
    """Cut every few messages: with each publication repeated until it is accepted, everything arrives at least once."""
    relay = Relay(site.broker.port)
    async with relay.laid() as port, site.clients(1) as (server,), server.subscribe(site.topic("up")) as inbox:
        broker = Broker(port=port, version=site.broker.version)
        async with MqttTransport(broker, site.topic("device"), steady_s=0.0).running() as device:
            for number in range(20):
                if number % 5 == 4:
                    relay.cut()
                while True:
                    await device.connected.wait()
                    try:
                        await device.publish(site.topic("up"), str(number).encode())
                        break
                    except Unreachable:
                        await asyncio.sleep(0.01)
        missing = set(range(20))
        while missing:
            missing.discard(int((await anext(inbox))[1]))


@OVER_MQTT
async def test_subscriptions_opened_while_connecting(site, take):
    """Thirty are opened one after the other while the connection comes to be, over a line with 20 ms each way.

    Whichever moment each of them meets, in the end it hears what is published.
    """
    relay = Relay(site.broker.port, delay_s=0.02)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(relay.laid())
        (server,) = await stack.enter_async_context(site.clients(1))
        broker = Broker(port=port, version=site.broker.version)
        device = await stack.enter_async_context(MqttTransport(broker, site.topic("device")).running())
        inboxes = []
        for number in range(30):
            inboxes.append(await stack.enter_async_context(device.subscribe(site.topic(f"{number}"))))
            await asyncio.sleep(0.004)
        await device.connected.wait()
        for number, inbox in enumerate(inboxes):
            await server.publish(site.topic(f"{number}"), b"x")
            assert await take(inbox, 1) == [(site.topic(f"{number}"), b"x")]


@OVER_MQTT
async def test_what_nobody_listens_to_does_not_cross_the_line(site, take):
    """Once the block is left, the broker is told: a megabyte published to the old filter stays away from the device."""
    relay = Relay(site.broker.port)
    async with relay.laid() as port, site.clients(1) as (server,):
        device = MqttTransport(Broker(port=port, version=site.broker.version), site.topic("device"))
        async with device.running(), device.subscribe(site.topic("end")) as end:
            await device.connected.wait()
            async with device.subscribe(site.topic("x")) as inbox:
                await server.publish(site.topic("x"), b"heard")
                await take(inbox, 1)
            await device.publish(site.topic("word"), b"")  # when the broker has this, it has heard of the end
            before = relay.bytes_carried
            for _ in range(4):
                await server.publish(site.topic("x"), bytes(250_000))
            await server.publish(site.topic("end"), b"")
            await take(end, 1)
            assert relay.bytes_carried - before < 1000


@OVER_MQTT
async def test_more_than_the_socket_takes(site, take):
    """6 MB handed over at once to a small socket on a slow line: the loop writes on as there is room, in order.

    Cut in the middle of such a heap, the transport comes back and carries what is published then.
    """
    relay = Relay(site.broker.port, delay_s=0.002)
    async with relay.laid() as port, site.clients(1) as (server,), server.subscribe(site.topic("x")) as inbox:
        device = MqttTransport(Broker(port=port, version=site.broker.version), site.topic("device"))
        async with device.running():
            await device.connected.wait()
            device.connection.client.socket().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            for number in range(24):
                await device.publish(site.topic("x"), bytes([number]) * 250_000, assured=False)
            assert [data[0] for _, data in await take(inbox, 24)] == list(range(24))
            for _ in range(24):
                await device.publish(site.topic("x"), bytes(250_000), assured=False)
            await asyncio.sleep(0.03)
            relay.cut()
            await until_lost(device)
            await device.connected.wait()
            await device.publish(site.topic("x"), b"\xff")
            while (await anext(inbox))[1] != b"\xff":
                pass


@OVER_MQTT
async def test_small_messages_are_not_held_back(site):
    """Nagle's algorithm is off: with it, a small message waits for the acknowledgement of the one before."""
    async with site.clients(1) as (client,):
        sock = client.connection.client.socket()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
