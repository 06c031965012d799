"""The pure Python broker (amqtt, MQTT 3.1.1) as a process: for demos and tests where mosquitto is not installed.

amqtt 0.12.1 loses whom it has accepted in two ways, which are mended here:

- A client id's next connection may find the one before still ending: it has not come so far as to read the goodbye, or
  nobody said one. Both share a session, and the old one's end marks it as disconnected under the new one: nothing is
  passed on to it any more, and within a second it is hung up on. Its next connection then meets the clearing away of
  that session, which takes the new subscriptions with it. So a connection waits here until the one before has ended.
- While a new connection is told what is retained, one new subscription of anybody's ends its task by an error. So who
  goes through the subscriptions here goes through a copy; and a client is told only what it has subscribed to.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from typing import Any

from amqtt import broker as amqtt  # type: ignore[import-untyped]
from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter  # type: ignore[import-untyped]
from amqtt.errors import AMQTTError  # type: ignore[import-untyped]
from amqtt.mqtt.packet import MQTTFixedHeader  # type: ignore[import-untyped]
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler  # type: ignore[import-untyped]

from shared.transport.packet_limit import MOST_PACKET_BYTES

PLUGINS = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
"""Without telling, amqtt loads seven, three of which start a task each for every packet, to log or to count it."""


class LineInTurn(StreamWriterAdapter):  # type: ignore[misc]
    """A connection's way out, which knows the connection's place behind earlier ones of the same client id.

    Attributes:
        ended: Set when nothing of the connection is left.
    """

    def __init__(self, writer: asyncio.StreamWriter, newest: dict[str, LineInTurn]) -> None:
        super().__init__(writer)
        self.ended = asyncio.Event()
        self._stream, self._newest, self._client = writer, newest, ""

    async def succeed(self, client: str) -> None:
        """Hang up on the client's connection before this one, and wait until it has ended.

        Raises:
            AMQTTError: A still newer one came meanwhile.
        """
        self._client, before = client, self._newest.get(client)
        self._newest[client] = self
        if before:
            before.hang_up()
            await before.ended.wait()
        if self._newest[client] is not self:
            raise AMQTTError(f"{client} has connected anew meanwhile")

    def hang_up(self) -> None:
        """Write nothing more; what was read already is still handled."""
        self._stream.transport.abort()

    def end(self) -> None:
        """Close what is open still, and let the next one begin."""
        self._stream.close()
        self.ended.set()
        if self._newest.get(self._client) is self:
            del self._newest[self._client]


class Handler(BrokerProtocolHandler):  # type: ignore[misc]
    """Looks for a client's session when no earlier connection uses it any more."""

    @classmethod
    async def init_from_connect(cls, reader: Any, writer: Any, *rest: Any, **options: Any) -> Any:
        handler, session = await super().init_from_connect(reader, writer, *rest, **options)
        if session.client_id:
            await writer.succeed(session.client_id)
        return handler, session


class Copied(dict[str, Any]):
    """A table that may grow while somebody goes through it."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().__iter__()))


class EmbeddedBroker(amqtt.Broker):  # type: ignore[misc]
    """amqtt on loopback; see the module for what differs."""

    def __init__(self, port: int) -> None:
        listener = {"type": "tcp", "bind": f"127.0.0.1:{port}"}
        super().__init__({"listeners": {"default": listener}, "plugins": PLUGINS})
        self._subscriptions = Copied()
        self._newest: dict[str, LineInTurn] = {}

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._servers["default"].instance.sockets[0].getsockname()[1]
        return port

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        line = LineInTurn(writer, self._newest)
        try:
            await self._client_connected(listener_name, StreamReaderAdapter(reader), line)
        finally:
            line.end()

    async def _handle_client_session(
        self, reader: Any, writer: Any, client_session: Any, handler: Any, *rest: Any
    ) -> None:
        try:
            await super()._handle_client_session(reader, writer, client_session, handler, *rest)
        finally:  # amqtt does neither after some errors
            await self._stop_handler(handler)
            client_session.transitions.disconnect()

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:
        if any(one.client_id == session.client_id for one, _ in self._subscriptions.get(subscription[0], ())):
            await super()._publish_retained_messages_for_subscription(subscription, session)


def limit_packets() -> None:
    """Let the broker hang up on who announces a longer packet.

    amqtt has no such limit, and holds a packet whole before it looks at it.
    """
    read = MQTTFixedHeader.from_stream

    async def read_bounded(reader: Any) -> Any:
        header = await read(reader)
        return None if header and header.remaining_length > MOST_PACKET_BYTES else header

    MQTTFixedHeader.from_stream = read_bounded


def take_turns() -> None:
    """Let the broker's connections of one client id follow each other."""
    amqtt.BrokerProtocolHandler = Handler


async def serve(port: int) -> None:
    """Listen on loopback until SIGTERM."""
    limit_packets()
    take_turns()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    broker = EmbeddedBroker(port)
    await broker.start()
    await stopping.wait()
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
