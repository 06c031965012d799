"""MQTT transport: publish, subscribe, and reconnect with exponential back-off.

The protocol's own messages do most of the work; of MQTT it needs topics, QoS 0 and 1, retained messages and the will,
so MQTT 5 and 3.1.1 both serve.

It reconnects soon after a broker's restart, seldom to a broker that disconnects us, never in step with others.
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
from shared.runtime import backports
from shared.runtime.executor import background
from shared.transport.base import Broker, Inbox, Presence
from shared.transport.inboxes import Inboxes
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
"""A longer connection counts as a success; two clients with one id disconnect each other much sooner."""

log = logging.getLogger(__name__)
CONNECT_S = 10.0
CORRECTION_DELAY_S = 1.0
"""Delay between a false status of ours and its correction."""

GOODBYE_S = 2.0
UNIQUE_NAME = "no two may have the same site and device name; rename one (`device` in its configuration), or stop it"
BRIEF_CONNECTIONS = 2
"""Brief connections in a row that suggest a second client with our id, if the broker gives no reason."""


def next_backoff_limit(before_s: float, *, anew: bool) -> float:
    """Return the upper limit of the next wait.

    Args:
        before_s: Upper limit of the previous wait, 0 at first.
        anew: Whether a connection has lasted since then, or ended for a cause that is corrected now.
    """
    return FIRST_S if anew else min(LAST_S, max(FIRST_S, 2 * before_s))


@dataclass
class MqttTransport:
    """MQTT client with one client id. Use it as `async with MqttTransport(...).running() as transport`.

    Attributes:
        client_id: MQTT client id; its session outlives the connection.
        presence: Called for every session; returns its birth and its will.
        connect_s: Timeout of the broker's acceptance.
        steady_s: A connection of this duration resets the waits before further attempts.
        connected: Set while there is a connection.
        most_packet_bytes: The longest accepted packet.
        admits: Decides whether a large payload may come in on a topic now.
        closed: Topics whose messages are dropped unread, as bytes: so messages in transit cost little after they are
            left.
        connections: Number of accepted connections.
        connection: The current one; None while there is none.
        dates: Returns whether to check certificate dates by this machine's clock.
        probe: Timing and topic of the delivery probe.
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
    _inboxes: Inboxes = field(default_factory=Inboxes)
    _presence: Presence | None = None
    _speaks_3: bool = False
    _discards_session: bool = False
    _limit: Limit = field(default_factory=Limit)
    _reported: set[str] = field(default_factory=set)

    @property
    def max_payload_bytes(self) -> int:
        return self._limit.payload_bytes

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MqttTransport]:
        """Stay connected while the block lasts; then publish the will as a goodbye."""
        async with background(self._keep_connected(), self._keep_present(), self._probe_session()):
            try:
                yield self
            finally:
                await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        if not self._presence or not self.connection:
            return
        try:
            async with backports.timeout(GOODBYE_S):
                await self.publish(self._presence.topic, self._presence.will, retain=True)
        except (Unreachable, TimeoutError):
            log.debug("no broker to say goodbye to")

    async def _keep_present(self) -> None:
        """Publish our birth again where the broker retains another status of ours: a false death, or none at all.

        It waits a short while first, since a session's own birth follows whatever was retained before it.
        """
        await self.connected.wait()
        if not self._presence:
            return
        async with self.subscribe(self._presence.topic) as inbox:
            async for _, status in inbox:
                await asyncio.sleep(CORRECTION_DELAY_S)
                last = [status, *(status for _, status in inbox.drain())][-1]
                if last == self._presence.birth or not self.connected.is_set():
                    continue
                self._tell_once("presence", "another client publishes our status: publishing our own again")
                with suppress(Unreachable):
                    await self.publish(self._presence.topic, self._presence.birth, retain=True)

    async def _probe_session(self) -> None:
        """Start a new session if the broker delivers nothing to this one; see `session_probe`."""
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
        elif born := self._presence:
            await self.publish(born.topic, born.birth, retain=True)

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        connection, most = self.connection, self.max_payload_bytes
        if connection is None:
            raise Unreachable(f"not connected to {self.broker.host}:{self.broker.port}")
        if len(payload) > most:
            error = TooLarge(f"{len(payload)} bytes for {topic}, but this broker takes {most} (its max_packet_size)")
            if assured:  # a frame can be cut smaller; a message cannot
                self._tell_once(topic, str(error))
            raise error
        if not assured:
            await connection.room(len(payload))
        if answer := connection.send(topic, payload, qos=int(assured), retain=retain):
            reasons = await connection.wait_answer(answer)
            if self._report_refusals("publishing to", [topic], reasons):
                raise Unreachable(f"the broker denies publishing to {topic}: {reasons[0]}")

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        inbox = self._inboxes.open(patterns)
        try:
            if self.connection:  # else all are renewed on connecting
                try:
                    await self._request_subscriptions(self.connection, list(patterns))
                except Unreachable as error:
                    log.debug("subscriptions are renewed on reconnecting: %s", error)
            yield inbox
        finally:
            self._inboxes.close(inbox)
            self._leave(set(patterns))

    async def _request_subscriptions(self, connection: Connection, patterns: list[str]) -> None:
        self._report_refusals("subscribing to", patterns, await connection.wait_answer(connection.subscribe(patterns)))

    def _leave(self, patterns: set[str]) -> None:
        """Unsubscribe from topics without an inbox, without waiting for the answer: later deliveries find no inbox.

        The broker's session outlives the connection, so an unconfirmed request is repeated on the next one.
        """
        ended = patterns - self._inboxes.patterns
        self._inboxes.ended |= ended
        if not ended or not self.connection:
            return
        try:
            answer = self.connection.unsubscribe(sorted(ended))
        except Unreachable as error:
            log.debug("unsubscribing is repeated on reconnecting: %s", error)
        else:
            answer.add_done_callback(lambda _: self._inboxes.ended.difference_update(ended))

    async def _keep_connected(self) -> None:
        """Connect and reconnect; log each state once, wait longer each time, never in step with others."""
        loop, jitter = asyncio.get_running_loop(), Random()  # noqa: S311 - spreads reconnects
        longest_s, is_reported, brief = 0.0, False, 0
        place = f"{self.broker.host}:{self.broker.port}"
        while True:
            anew, before = False, self.connections
            try:
                async with self._connect() as connection:
                    log.info("connected broker=%s:%s client=%s", self.broker.host, self.broker.port, self.client_id)
                    since, is_reported = loop.time(), False
                    reason = await connection.lost
                    self._discards_session |= connection.client.is_unreadable
                    is_mended = self.reduce_payload_limit(connection, reason) or reason == STUCK
                    anew = is_mended or loop.time() - since >= self.steady_s
                lasted_s, is_reported = loop.time() - since, True
                log.warning("lost the broker at %s after %.1f s (%s), trying again", place, lasted_s, reason)
            except Unreachable as error:
                reason = str(error)
                if isinstance(error, Untrusted):
                    self._tell_once(reason, f"no broker at {place}: {reason}")
                elif not is_reported:
                    log.warning("no broker at %s (%s), retrying until there is one", place, reason)
                is_reported = True
            self._fall_back(reason)
            brief = brief + 1 if self.connections > before and not anew else 0
            longest_s = next_backoff_limit(longest_s, anew=anew)
            if reason == TAKEN_OVER:
                longest_s = LAST_S  # connecting disconnects the other one
                self._tell_once(TAKEN_OVER, f"another client is connected as {self.client_id}: {UNIQUE_NAME}")
            elif brief >= BRIEF_CONNECTIONS:
                how = f"the broker has closed {brief} connections in a row soon after they were made"
                self._tell_once(
                    TAKEN_OVER, f"{how}: probably another client is connected as {self.client_id} too; {UNIQUE_NAME}"
                )
            await asyncio.sleep(jitter.uniform(0.0, longest_s))

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Connection]:
        if self._discards_session:
            await self._discard_session()
        self._presence = born = self.presence() if self.presence else None
        incoming = Incoming(self._take, self.traffic, self._admit, self.most_packet_bytes, self.closed)
        connection = Connection(self._effective_broker(), self.client_id, born, incoming, dates=self.dates())
        try:
            await connection.open(self.connect_s)
            self.connections += 1
            self._limit = apply_connack(self._limit, connection.packet_bytes)
            await self._renew(connection)
            if born:
                try:
                    await self.publish(born.topic, born.birth, retain=True)
                except Unreachable:  # if the broker refuses it, the other topics may still work
                    if connection.lost.done():
                        raise
            self.connected.set()
            yield connection
        finally:
            self.connection = None
            self.connected.clear()
            connection.close()

    async def _discard_session(self) -> None:
        """Make the broker forget our session: connect once as a client without one."""
        broker = msgspec.structs.replace(self._effective_broker(), session_expiry_s=0)
        connection = Connection(broker, self.client_id, None, Incoming(lambda *_: None, Traffic()), dates=self.dates())
        try:
            await connection.open(self.connect_s)
            self._discards_session = False
            log.warning("began a clean session at %s:%s as %s", broker.host, broker.port, self.client_id)
        finally:
            connection.close()

    async def _renew(self, connection: Connection) -> None:
        """Renew all subscriptions on a new connection, then put it into use."""
        renewed: set[str] = set()
        while missing := sorted(self._inboxes.patterns - renewed):  # some may be added meanwhile
            await self._request_subscriptions(connection, missing)
            renewed.update(missing)
        self.connection = connection
        self._leave(self._inboxes.ended)

    def _take(self, topic: str, payload: bytes) -> None:
        inboxes = self._inboxes.find(topic)
        for inbox in inboxes:
            inbox.put((topic, payload))
        if not inboxes and self.connection and topic not in self._inboxes.ended:
            # An earlier process was killed before it could unsubscribe. Not now: this is the client's callback.
            asyncio.get_running_loop().call_soon(self._leave, {topic})

    def _admit(self, topic: str, size: int) -> bool:
        return self.admits(topic, size)  # which may be set after connecting

    def _report_refusals(self, deed: str, topics: list[str], reasons: list[str]) -> bool:
        """Report each refusal once; return whether there was any."""
        for topic, reason in zip(topics, reasons, strict=False):
            if reason:
                what = f"{deed} {topic}"
                self._tell_once(
                    what, f"the broker denies {what} ({reason}): allow it to {self.client_id} in its access list"
                )
        return any(reasons)

    def _tell_once(self, about: str, message: str) -> None:
        """Log a problem for the operator, once per subject."""
        if about not in self._reported:
            self._reported.add(about)
            log.error("%s", message)

    def reduce_payload_limit(self, connection: Connection, reason: str) -> bool:
        """Reduce the payload limit if the broker seems to have closed the connection because of a large one."""
        carried = connection.carried
        limit = apply_delivery(self._limit, carried.acknowledged)
        if reason == PACKET_TOO_LARGE:
            limit = apply_refusal(limit, carried.doubtful)
        elif reason not in (SILENT, STUCK):  # a dead link and a hanging broker refuse nothing
            limit = apply_connection_end(limit, carried.doubtful)
        before, self._limit = self._limit, limit
        if is_smaller := limit.payload_bytes < before.payload_bytes:
            size = carried.doubtful
            log.warning("this broker seems to refuse %d bytes at once, continuing with %d", size, limit.payload_bytes)
        return is_smaller

    def _fall_back(self, reason: str) -> None:
        """Switch to MQTT 3.1.1 if the broker does not support 5.

        A broker that cannot parse MQTT 5 is silent or hangs up, but so is one with another problem: then the versions
        alternate.
        """
        if self.broker.version != MQTT_5:
            return
        if "nsupported protocol version" in reason and not self._speaks_3:
            log.warning("this broker does not support MQTT 5, continuing with 3.1.1")
            self._speaks_3 = True
        elif NO_ANSWER in reason or HUNG_UP in reason:
            self._speaks_3 = not self._speaks_3

    def _effective_broker(self) -> Broker:
        return msgspec.structs.replace(self.broker, version=3) if self._speaks_3 else self.broker
