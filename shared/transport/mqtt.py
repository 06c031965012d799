"""The MQTT transport: a connection that renews itself.

What the protocol needs is in our own messages; of MQTT it takes topics, QoS 0 and 1, retained messages and the will,
so that MQTT 5 and 3.1.1 serve alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import msgspec

from shared.background import background
from shared.errors import Unreachable
from shared.topics import matches
from shared.transport.base import Broker, Inbox, Presence
from shared.transport.connection import MQTT_5, NO_ANSWER, Connection

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 30.0
CONNECT_S = 10.0
GOODBYE_S = 2.0


@dataclass
class MqttTransport:
    """One client id. Use it as `async with MqttTransport(...).running() as transport`.

    Attributes:
        broker: Where to connect.
        client_id: The MQTT client id; its session outlives the connection.
        presence: Called for every session; gives its birth and its will.
        connect_s: How long the broker may take to accept us.
        connected: Set while there is a connection.
    """

    broker: Broker
    client_id: str
    presence: Callable[[], Presence] | None = None
    connect_s: float = CONNECT_S
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    _connection: Connection | None = None
    _inboxes: list[tuple[tuple[str, ...], Inbox]] = field(default_factory=list)
    _born: Presence | None = None
    _speaks_3: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MqttTransport]:
        """Keep connected while the block lasts; then say goodbye with the will's own words."""
        async with background(self._keep_connected()):
            try:
                yield self
            finally:
                await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        if not self._born or not self._connection:
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.publish(self._born.topic, self._born.will, retain=True)
        except (Unreachable, TimeoutError):
            log.debug("no broker to say goodbye to")

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        connection = self._connection
        if connection is None:
            raise Unreachable(f"not connected to {self.broker.host}:{self.broker.port}")
        if answer := connection.send(topic, payload, qos=int(assured), retain=retain):
            await connection.settled(answer)

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        entry = (patterns, Inbox())
        self._inboxes.append(entry)
        try:
            await self._tell_broker(subscribe=list(patterns))
            yield entry[1]
        finally:
            self._inboxes.remove(entry)
            still_wanted = self._patterns()
            await self._tell_broker(unsubscribe=[pattern for pattern in patterns if pattern not in still_wanted])

    def _patterns(self) -> set[str]:
        return {pattern for patterns, _ in self._inboxes for pattern in patterns}

    async def _tell_broker(self, *, subscribe: list[str] | None = None, unsubscribe: list[str] | None = None) -> None:
        connection = self._connection
        if connection is None:
            return  # every open subscription is renewed on connecting
        try:
            if subscribe:
                await connection.settled(connection.subscribe(subscribe))
            if unsubscribe:
                connection.unsubscribe(unsubscribe)  # nobody waits for the answer: what still comes finds no inbox
        except Unreachable as error:
            log.debug("subscriptions are renewed on reconnecting: %s", error)

    async def _keep_connected(self) -> None:
        """Connect, and connect again; say so once a state, wait longer each time, never in step with others."""
        jitter, backoff, told = Random(), FIRST_BACKOFF_S, False  # noqa: S311 - spreads reconnects
        while True:
            try:
                async with self._connect() as connection:
                    log.info("connected broker=%s:%s client=%s", self.broker.host, self.broker.port, self.client_id)
                    backoff, told = FIRST_BACKOFF_S, False
                    reason = await connection.lost
            except Unreachable as error:
                reason = str(error)
            self._fall_back(reason)
            if not told:
                place = f"{self.broker.host}:{self.broker.port}"
                log.warning("no broker at %s (%s), trying again until there is one", place, reason)
            told = True
            await asyncio.sleep(backoff * jitter.uniform(0.5, 1.5))
            backoff = min(2 * backoff, LAST_BACKOFF_S)

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Connection]:
        self._born = born = self.presence() if self.presence else None
        connection = Connection(self._spoken(), self.client_id, born, self._take)
        try:
            await connection.open(self.connect_s)
            renewed: set[str] = set()
            while missing := sorted(self._patterns() - renewed):  # some may be opened while we wait
                await connection.settled(connection.subscribe(missing))
                renewed.update(missing)
            self._connection = connection
            if born:
                await self.publish(born.topic, born.birth, retain=True)
            self.connected.set()
            yield connection
        finally:
            self._connection = None
            self.connected.clear()
            connection.close()

    def _take(self, topic: str, payload: bytes) -> None:
        for patterns, inbox in self._inboxes:
            if any(matches(pattern, topic) for pattern in patterns):
                inbox.put((topic, payload))

    def _fall_back(self, reason: str) -> None:
        """Speak 3.1.1 where the broker knows nothing newer.

        One that cannot even parse MQTT 5 is silent, as is one that hangs: after a silence the versions take turns.
        """
        if self.broker.version != MQTT_5:
            return
        if "nsupported protocol version" in reason and not self._speaks_3:
            log.warning("this broker has no MQTT 5, going on with 3.1.1")
            self._speaks_3 = True
        elif NO_ANSWER in reason:
            self._speaks_3 = not self._speaks_3

    def _spoken(self) -> Broker:
        return msgspec.structs.replace(self.broker, version=3) if self._speaks_3 else self.broker
