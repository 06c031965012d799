"""Embedded MQTT 3.1.1 broker (amqtt) as a process, with fixes for dropped clients.

For demos and tests where mosquitto is not installed. amqtt 0.12.1 drops accepted clients in two situations:

- A client id's new connection may find the old one still ending, with or without a DISCONNECT. Both share a session,
and
  the end of the old one marks it as disconnected: nothing is forwarded to the new connection, and within a second it is
  closed. The next connection then runs into the cleanup of that session, which removes the new subscriptions. Therefore
  a connection waits here until the previous one has ended.
- While retained messages are sent to a new connection, any new subscription of another client raises an error in that
  task. Therefore iterations over the subscriptions use a copy, and a client only gets what it has subscribed to.
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
"""By default amqtt loads seven, three of which start a task for every packet, to log or to count it."""


class ExclusiveWriter(StreamWriterAdapter):  # type: ignore[misc]
    """Stream writer that waits for earlier connections of the same client id.

    Attributes:
        ended: Set when the connection has been torn down.
    """

    def __init__(self, writer: asyncio.StreamWriter, newest: dict[str, ExclusiveWriter]) -> None:
        super().__init__(writer)
        self.ended = asyncio.Event()
        self._stream, self._newest, self._client = writer, newest, ""

    async def take_over(self, client: str) -> None:
        """Abort the client's previous connection and wait until it has ended.

        Raises:
            AMQTTError: A newer connection came meanwhile.
        """
        self._client, before = client, self._newest.get(client)
        self._newest[client] = self
        if before:
            before.hang_up()
            await before.ended.wait()
        if self._newest[client] is not self:
            raise AMQTTError(f"{client} has a newer connection")

    def hang_up(self) -> None:
        """Stop writing; bytes read already are still handled."""
        self._stream.transport.abort()

    def end(self) -> None:
        """Close the stream and release the next connection."""
        self._stream.close()
        self.ended.set()
        if self._newest.get(self._client) is self:
            del self._newest[self._client]


class SerializedHandler(BrokerProtocolHandler):  # type: ignore[misc]
    """Loads a client's session after its previous connection has released it."""

    @classmethod
    async def init_from_connect(cls, reader: Any, writer: Any, *args: Any, **options: Any) -> Any:
        handler, session = await super().init_from_connect(reader, writer, *args, **options)
        if session.client_id:
            await writer.take_over(session.client_id)
        return handler, session


class SnapshotIterationDict(dict[str, Any]):
    """Dictionary whose iteration tolerates insertions."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().__iter__()))


class EmbeddedBroker(amqtt.Broker):  # type: ignore[misc]
    """amqtt on loopback, with the fixes above."""

    def __init__(self, port: int) -> None:
        listener = {"type": "tcp", "bind": f"127.0.0.1:{port}"}
        super().__init__({"listeners": {"default": listener}, "plugins": PLUGINS})
        self._subscriptions = SnapshotIterationDict()
        self._newest: dict[str, ExclusiveWriter] = {}

    @property
    def port(self) -> int:
        """The listening port."""
        port: int = self._servers["default"].instance.sockets[0].getsockname()[1]
        return port

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        line = ExclusiveWriter(writer, self._newest)
        try:
            await self._client_connected(listener_name, StreamReaderAdapter(reader), line)
        finally:
            line.end()

    async def _handle_client_session(
        self, reader: Any, writer: Any, client_session: Any, handler: Any, *args: Any
    ) -> None:
        try:
            await super()._handle_client_session(reader, writer, client_session, handler, *args)
        finally:  # amqtt does neither after some errors
            await self._stop_handler(handler)
            client_session.transitions.disconnect()

    async def _publish_retained_messages_for_subscription(self, subscription: tuple[str, int], session: Any) -> None:
        subscribers = self._subscriptions.get(subscription[0], ())
        if any(subscriber.client_id == session.client_id for subscriber, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)


def limit_packet_size() -> None:
    """Disconnect clients that announce longer packets than permitted.

    amqtt has no such limit, and buffers a whole packet before looking at it.
    """
    read = MQTTFixedHeader.from_stream

    async def read_bounded(reader: Any) -> Any:
        header = await read(reader)
        return None if header and header.remaining_length > MOST_PACKET_BYTES else header

    MQTTFixedHeader.from_stream = read_bounded


def serialize_connections() -> None:
    """Make connections of one client id follow each other."""
    amqtt.BrokerProtocolHandler = SerializedHandler


async def serve(port: int) -> None:
    """Serve on loopback until SIGTERM."""
    limit_packet_size()
    serialize_connections()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    broker = EmbeddedBroker(port)
    await broker.start()
    await stopping.wait()
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
