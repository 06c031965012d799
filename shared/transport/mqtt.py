"""The MQTT transport: a connection that renews itself. The only file that knows an MQTT client.

What the protocol needs is in our own messages; of MQTT it takes topics, QoS 0 and 1, retained messages and the will,
so that MQTT 5 and 3.1.1 serve alike.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from shared.errors import Unreachable
from shared.topics import matches
from shared.transport.base import Broker, Inbox, Presence

log = logging.getLogger(__name__)

T = TypeVar("T")

MQTT_5 = 5
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 30.0


@dataclass
class MqttTransport:
    """One client id. Use it as `async with MqttTransport(...).running() as transport`.

    Attributes:
        broker: Where to connect.
        client_id: The MQTT client id; its session outlives the connection.
        presence: Called for every session; gives its birth and its will.
    """

    broker: Broker
    client_id: str
    presence: Callable[[], Presence] | None = None
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    _version: Literal[3, 5] = 5
    _client: aiomqtt.Client | None = None
    _inboxes: list[tuple[tuple[str, ...], Inbox]] = field(default_factory=list)
    _born: Presence | None = None
    _lost: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        """Start with the version that the operator named."""
        self._version = self.broker.version

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MqttTransport]:
        """Keep connected while the block lasts; then say goodbye with the will's own words."""
        keeper = asyncio.create_task(self._keep_connected(), name="mqtt-connection")
        try:
            yield self
        finally:
            if self._born and self._client:
                try:
                    async with asyncio.timeout(2):
                        await self.publish(self._born.topic, self._born.will, retain=True)
                except (Unreachable, TimeoutError):
                    log.debug("no broker to say goodbye to")
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        if self._client is None:
            raise Unreachable(f"not connected to {self.broker.host}:{self.broker.port}")
        call = self._client.publish(topic, payload, qos=int(assured), retain=retain, timeout=math.inf)
        try:
            await self._unless_lost(call)
        except (aiomqtt.MqttError, ValueError) as error:
            raise Unreachable(f"{topic}: {error}") from error

    async def _unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call to the client, which itself does not notice that the connection went away.

        Raises:
            Unreachable: It went away first; whether the call took effect is not known.
        """
        task = asyncio.create_task(call)
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unreachable("the connection was lost meanwhile")
            return task.result()
        finally:
            task.cancel()

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        entry = (patterns, Inbox())
        self._inboxes.append(entry)
        try:
            await self._tell_broker(subscribe=patterns)
            yield entry[1]
        finally:
            self._inboxes.remove(entry)
            await self._tell_broker(unsubscribe=patterns)

    async def _tell_broker(self, *, subscribe: tuple[str, ...] = (), unsubscribe: tuple[str, ...] = ()) -> None:
        if self._client is None:
            return  # every open subscription is renewed on connecting
        try:
            if subscribe:
                await self._unless_lost(self._client.subscribe([(pattern, 1) for pattern in subscribe]))
            if unsubscribe:
                await self._unless_lost(self._client.unsubscribe(list(unsubscribe)))
        except (aiomqtt.MqttError, Unreachable) as error:
            log.debug("subscription is renewed on reconnecting: %s", error)

    async def _keep_connected(self) -> None:
        """Connect, and connect again; say so once a state, wait longer each time, never in step with others."""
        jitter, backoff, told = Random(), FIRST_BACKOFF_S, False  # noqa: S311 - spreads reconnects
        while True:
            try:
                async with self._connect() as client:
                    log.info("connected broker=%s:%s client=%s", self.broker.host, self.broker.port, self.client_id)
                    backoff, told = FIRST_BACKOFF_S, False
                    await self._pump(client)
            except (aiomqtt.MqttError, Unreachable) as error:
                self._fall_back(error)
                if not told:
                    log.warning(
                        "no broker at %s:%s (%s), trying again until there is one",
                        *(self.broker.host, self.broker.port, error),
                    )
                told = True
            finally:
                self._client = None
                self.connected.clear()
                if not self._lost.done():
                    self._lost.set_result(None)
            await asyncio.sleep(backoff * jitter.uniform(0.5, 1.5))
            backoff = min(2 * backoff, LAST_BACKOFF_S)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[aiomqtt.Client]:
        self._born = born = self.presence() if self.presence else None
        will = aiomqtt.Will(born.topic, born.will, qos=1, retain=True) if born else None
        async with aiomqtt.Client(
            self.broker.host,
            self.broker.port,
            identifier=self.client_id,
            will=will,
            keepalive=self.broker.keepalive_s,
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
            **self._session(),
        ) as client:
            client.pending_calls_threshold = 1000
            patterns = sorted({pattern for patterns, _ in self._inboxes for pattern in patterns})
            if patterns:
                await client.subscribe([(pattern, 1) for pattern in patterns])
            self._lost = asyncio.get_running_loop().create_future()
            self._client = client
            if born:
                await self.publish(born.topic, born.birth, retain=True)
            self.connected.set()
            yield client

    def _fall_back(self, error: Exception) -> None:
        """Speak 3.1.1 from now on where the broker knows nothing newer."""
        if self._version == MQTT_5 and "nsupported protocol version" in str(error):
            log.warning("this broker has no MQTT 5, going on with 3.1.1")
            self._version = 3

    def _session(self) -> dict[str, Any]:
        """Ask for a session that survives a broken link, in the words of either version."""
        if self._version != MQTT_5:
            return {"protocol": aiomqtt.ProtocolVersion.V311, "clean_session": False}
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = self.broker.session_expiry_s
        return {"protocol": aiomqtt.ProtocolVersion.V5, "clean_start": False, "properties": properties}

    async def _pump(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            name, payload = str(message.topic), message.payload
            if isinstance(payload, bytes | bytearray):
                for patterns, inbox in self._inboxes:
                    if any(matches(pattern, name) for pattern in patterns):
                        inbox.put((name, bytes(payload)))
