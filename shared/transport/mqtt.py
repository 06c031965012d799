"""MQTT transport: publish, subscribe, and reconnect with exponential back-off.

What the protocol needs is in our own messages; of MQTT it takes topics, QoS 0 and 1, retained messages and the will,
so that MQTT 5 and 3.1.1 serve alike.

It connects again soon after a broker's restart, seldom to one that throws us out, never in step with others.
Exponential back-off with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015,
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/): sleep = random between 0 and
min(cap, base * 2^attempt). Here an attempt that connects counts as failed too, unless the connection lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

import msgspec

from shared.errors import TooLarge, Unreachable, Untrusted
from shared.protocol.topics import matches
from shared.runtime import backports
from shared.runtime.executor import background
from shared.transport.base import Broker, Inbox, Presence
from shared.transport.mqtt_client import Admits
from shared.transport.mqtt_connection import (
    MQTT_5,
    NO_ANSWER,
    PACKET_TOO_LARGE,
    SILENT,
    TAKEN_OVER,
    Connection,
    Incoming,
)
from shared.transport.packet_limit import (
    MOST_RECEIVED_BYTES,
    Limit,
    apply_connack,
    apply_connection_end,
    apply_delivery,
    apply_refusal,
)
from shared.transport.refusals import HUNG_UP
from shared.transport.session_probe import LOOK_S, STUCK, SessionProbe
from shared.transport.tcp_info import Traffic

FIRST_S, LAST_S = 0.5, 30.0
STEADY_S = 5.0
"""A connection that lasted this long was a success; two clients of one id throw each other out much sooner."""

log = logging.getLogger(__name__)
CONNECT_S = 10.0
HEAL_S = 1.0
"""Between a false word about our presence and our own."""

GOODBYE_S = 2.0
MOST_TOPICS = 1024
MOST_WAITING_BYTES = 256 << 20
"""Of one subscription; what is more is dropped, as a broker drops what it cannot deliver."""

ONE_EACH = "no two may have the same site and device name; rename one (`device` in its configuration), or stop it"
BRIEF = 2
"""So many connections in a row that the broker closed soon: brokers that say nothing part two clients of one id so."""


def longest_wait(before_s: float, *, anew: bool) -> float:
    """Return the upper end of the next wait.

    Args:
        before_s: The upper end of the wait before, 0 at first.
        anew: Whether there was a connection since then that lasted, or whose end has a cause that is mended now.
    """
    return FIRST_S if anew else min(LAST_S, max(FIRST_S, 2 * before_s))


@dataclass
class MqttTransport:
    """One client id. Use it as `async with MqttTransport(...).running() as transport`.

    Attributes:
        client_id: The MQTT client id; its session outlives the connection.
        presence: Called for every session; gives its birth and its will.
        connect_s: How long the broker may take to accept us.
        steady_s: A connection that lasts this long makes the waits before further attempts short again.
        connected: Set while there is a connection.
        most_packet_bytes: The longest packet that is taken.
        admits: Tells whether a large payload may come in on a topic now.
        closed: Topics of which nothing is taken, as bytes: what is still on its way when they are left costs little.
        connections: How often the broker has accepted us.
        connection: The one in use; None while there is none.
        dates: Tells whether this machine's clock may judge the dates of certificates.
        probe: When, and where, it is tried whether the broker still delivers.
    """

    broker: Broker
    client_id: str
    presence: Callable[[], Presence] | None = None
    connect_s: float = CONNECT_S
    steady_s: float = STEADY_S
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    traffic: Traffic = field(default_factory=Traffic)
    most_packet_bytes: int = MOST_RECEIVED_BYTES
    admits: Admits = lambda _topic, _size: True
    closed: set[bytes] = field(default_factory=set)
    connections: int = 0
    connection: Connection | None = None
    dates: Callable[[], bool] = lambda: True
    probe: SessionProbe = field(default_factory=SessionProbe)
    _inboxes: list[tuple[tuple[str, ...], Inbox]] = field(default_factory=list)
    _heard_by: dict[str, list[Inbox]] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)
    _born: Presence | None = None
    _speaks_3: bool = False
    _discards_session: bool = False
    _limit: Limit = field(default_factory=Limit)
    _told: set[str] = field(default_factory=set)

    @property
    def max_payload_bytes(self) -> int:
        return self._limit.payload_bytes

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MqttTransport]:
        """Keep connected while the block lasts; then say goodbye with the will's own words."""
        async with background(self._keep_connected(), self._keep_present(), self._probe_session()):
            try:
                yield self
            finally:
                await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        if not self._born or not self.connection:
            return
        try:
            async with backports.timeout(GOODBYE_S):
                await self.publish(self._born.topic, self._born.will, retain=True)
        except (Unreachable, TimeoutError):
            log.debug("no broker to say goodbye to")

    async def _keep_present(self) -> None:
        """Say anew that we are here where the broker retains another word of us: a false death, or none at all.

        What comes in a short while is waited for, since a session's own birth follows whatever was retained before it.
        """
        await self.connected.wait()
        if not self._born:
            return
        async with self.subscribe(self._born.topic) as inbox:
            async for _, word in inbox:
                await asyncio.sleep(HEAL_S)
                last = [word, *(word for _, word in inbox.taken())][-1]
                if last == self._born.birth or not self.connected.is_set():
                    continue
                self._tell_once(
                    "presence", "somebody else speaks in our name to the broker: saying anew that we are here"
                )
                with suppress(Unreachable):
                    await self.publish(self._born.topic, self._born.birth, retain=True)

    async def _probe_session(self) -> None:
        """Begin another session where the broker delivers nothing to this one; see `session_probe`."""
        if not self.probe.topic and not self.presence:
            return
        async with AsyncExitStack() as stack:
            if self.probe.topic:
                inbox = await stack.enter_async_context(self.subscribe(self.probe.topic))
                inbox.divert(lambda _delivery: None)
            while True:
                await self.connected.wait()
                connection = self.connection
                if connection and await self.probe.is_stuck(connection, self._publish_probe):
                    self._discards_session = True
                    connection.end(STUCK)
                await asyncio.sleep(LOOK_S)

    async def _publish_probe(self) -> None:
        if self.probe.topic:
            await self.publish(self.probe.topic, b"?")
        elif born := self._born:
            await self.publish(born.topic, born.birth, retain=True)

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        connection, most = self.connection, self.max_payload_bytes
        if connection is None:
            raise Unreachable(f"not connected to {self.broker.host}:{self.broker.port}")
        if len(payload) > most:
            error = TooLarge(f"{len(payload)} bytes for {topic}, and this broker takes {most} (its max_packet_size)")
            if assured:  # a frame is cut anew; a message cannot be
                self._tell_once(topic, str(error))
            raise error
        if not assured:
            await connection.room(len(payload))
        if answer := connection.send(topic, payload, qos=int(assured), retain=retain):
            reasons = await connection.settled(answer)
            if self._refused("publishing to", [topic], reasons):
                raise Unreachable(f"the broker denies publishing to {topic}: {reasons[0]}")

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        entry = (patterns, Inbox(most_bytes=MOST_WAITING_BYTES))
        self._inboxes.append(entry)
        self._heard_by.clear()
        try:
            if self.connection:  # else all are renewed on connecting
                await self._tell_broker(self.connection, list(patterns))
            yield entry[1]
        finally:
            self._inboxes.remove(entry)
            self._heard_by.clear()
            self._leave(set(patterns))

    def _patterns(self) -> set[str]:
        return {pattern for patterns, _ in self._inboxes for pattern in patterns}

    async def _tell_broker(self, connection: Connection, patterns: list[str]) -> None:
        try:
            await self._open(connection, patterns)
        except Unreachable as error:
            log.debug("subscriptions are renewed on reconnecting: %s", error)

    async def _open(self, connection: Connection, patterns: list[str]) -> None:
        self._refused("subscribing to", patterns, await connection.settled(connection.subscribe(patterns)))

    def _leave(self, patterns: set[str]) -> None:
        """End subscriptions that no inbox has any more. Nobody waits for the answer: what still comes finds no inbox.

        The broker's session outlives the connection, so what it has not confirmed is told again on the next one.
        """
        gone = patterns - self._patterns()
        self._left |= gone
        if not gone or not self.connection:
            return
        try:
            answer = self.connection.unsubscribe(sorted(gone))
        except Unreachable as error:
            log.debug("told again on reconnecting: %s", error)
        else:
            answer.add_done_callback(lambda _: self._left.difference_update(gone))

    async def _keep_connected(self) -> None:
        """Connect, and connect again; say so once a state, wait longer each time, never in step with others."""
        loop, jitter = asyncio.get_running_loop(), Random()  # noqa: S311 - spreads reconnects
        longest_s, told, brief = 0.0, False, 0
        place = f"{self.broker.host}:{self.broker.port}"
        while True:
            anew, before = False, self.connections
            try:
                async with self._connect() as connection:
                    log.info("connected broker=%s:%s client=%s", self.broker.host, self.broker.port, self.client_id)
                    since, told = loop.time(), False
                    reason = await connection.lost
                    self._discards_session |= connection.is_unreadable
                    is_mended = self.learn_from_end(connection, reason) or reason == STUCK
                    anew = is_mended or loop.time() - since >= self.steady_s
                lasted_s, told = loop.time() - since, True
                log.warning("lost the broker at %s after %.1f s (%s), trying again", place, lasted_s, reason)
            except Unreachable as error:
                reason = str(error)
                if isinstance(error, Untrusted):
                    self._tell_once(reason, f"no broker at {place}: {reason}")
                elif not told:
                    log.warning("no broker at %s (%s), trying again until there is one", place, reason)
                told = True
            self._fall_back(reason)
            brief = brief + 1 if self.connections > before and not anew else 0
            longest_s = longest_wait(longest_s, anew=anew)
            if reason == TAKEN_OVER:
                longest_s = LAST_S  # to connect is to throw the other one out
                self._tell_once(TAKEN_OVER, f"another client is connected as {self.client_id}: {ONE_EACH}")
            elif brief >= BRIEF:
                how = f"the broker has closed {brief} connections in a row soon after they were made"
                self._tell_once(
                    TAKEN_OVER, f"{how}: probably another client is connected as {self.client_id} too; {ONE_EACH}"
                )
            await asyncio.sleep(jitter.uniform(0.0, longest_s))

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Connection]:
        if self._discards_session:
            await self._discard_session()
        self._born = born = self.presence() if self.presence else None
        incoming = Incoming(self._take, self.traffic, self._admit, self.most_packet_bytes, self.closed)
        connection = Connection(self._spoken(), self.client_id, born, incoming, dates=self.dates())
        try:
            await connection.open(self.connect_s)
            self.connections += 1
            self._limit = apply_connack(self._limit, connection.packet_bytes)
            await self._renew(connection)
            if born:
                try:
                    await self.publish(born.topic, born.birth, retain=True)
                except Unreachable:  # if the broker refuses it, the rest may still work
                    if connection.lost.done():
                        raise
            self.connected.set()
            yield connection
        finally:
            self.connection = None
            self.connected.clear()
            connection.close()

    async def _discard_session(self) -> None:
        """Let the broker forget our session: connect once as a client that wants none."""
        broker = msgspec.structs.replace(self._spoken(), session_expiry_s=0)
        connection = Connection(broker, self.client_id, None, Incoming(lambda *_: None, Traffic()), dates=self.dates())
        try:
            await connection.open(self.connect_s)
            self._discards_session = False
            log.warning("began a clean session at %s:%s as %s", broker.host, broker.port, self.client_id)
        finally:
            connection.close()

    async def _renew(self, connection: Connection) -> None:
        """Tell the broker which subscriptions are open and which are not; from then on the connection is in use."""
        renewed: set[str] = set()
        while missing := sorted(self._patterns() - renewed):  # some may be opened while we wait
            await self._open(connection, missing)
            renewed.update(missing)
        self.connection = connection
        self._leave(self._left)

    def _take(self, topic: str, payload: bytes) -> None:
        inboxes = self._listening(topic)
        for inbox in inboxes:
            inbox.put((topic, payload))
        if not inboxes and self.connection and topic not in self._left:
            # An earlier process of ours, killed before it could unsubscribe. Not now: this is the client's callback.
            asyncio.get_running_loop().call_soon(self._leave, {topic})

    def _admit(self, topic: str, size: int) -> bool:
        return self.admits(topic, size)

    def _listening(self, topic: str) -> list[Inbox]:
        """Return who hears a topic; remembered, since the same come again and again."""
        if (found := self._heard_by.get(topic)) is None:
            if len(self._heard_by) >= MOST_TOPICS:
                self._heard_by.clear()
            hears = (inbox for patterns, inbox in self._inboxes if any(matches(one, topic) for one in patterns))
            self._heard_by[topic] = found = list(hears)
        return found

    def _refused(self, deed: str, topics: list[str], reasons: list[str]) -> bool:
        """Tell whether the broker refused any of it; say so once each."""
        for topic, reason in zip(topics, reasons, strict=False):
            if reason:
                what = f"{deed} {topic}"
                self._tell_once(
                    what, f"the broker denies {what} ({reason}): allow it to {self.client_id} in its access list"
                )
        return any(reasons)

    def _tell_once(self, about: str, message: str) -> None:
        """Log what an operator must mend, however often it is met."""
        if about not in self._told:
            self._told.add(about)
            log.error("%s", message)

    def learn_from_end(self, connection: Connection, reason: str) -> bool:
        """Take smaller payloads if the broker seems to have closed the connection because of a large one."""
        carried = connection.carried
        limit = apply_delivery(self._limit, carried.acknowledged)
        if reason == PACKET_TOO_LARGE:
            limit = apply_refusal(limit, carried.doubtful)
        elif reason not in (SILENT, STUCK):  # a link that died, and a broker that hangs, refuse nothing
            limit = apply_connection_end(limit, carried.doubtful)
        before, self._limit = self._limit, limit
        if is_smaller := limit.payload_bytes < before.payload_bytes:
            size = carried.doubtful
            log.warning("this broker seems to refuse %d bytes at once, going on with %d", size, limit.payload_bytes)
        return is_smaller

    def _fall_back(self, reason: str) -> None:
        """Speak 3.1.1 where the broker knows nothing newer.

        One that cannot even parse MQTT 5 is silent or hangs up, as does one for another reason: after either the
        versions take turns.
        """
        if self.broker.version != MQTT_5:
            return
        if "nsupported protocol version" in reason and not self._speaks_3:
            log.warning("this broker has no MQTT 5, going on with 3.1.1")
            self._speaks_3 = True
        elif NO_ANSWER in reason or HUNG_UP in reason:
            self._speaks_3 = not self._speaks_3

    def _spoken(self) -> Broker:
        return msgspec.structs.replace(self.broker, version=3) if self._speaks_3 else self.broker
