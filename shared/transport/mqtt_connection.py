"""One MQTT connection on the asyncio event loop.

This is the only user of the MQTT client, whose own threads are not used; see `socket_watch`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from shared.errors import Unreachable
from shared.runtime import backports
from shared.transport.base import Broker, Presence
from shared.transport.dialling import dial_in_thread
from shared.transport.login import read_login
from shared.transport.mqtt_client import Admits, BoundedClient
from shared.transport.packet_limit import MOST_RECEIVED_BYTES, PayloadWatch
from shared.transport.refusals import explain_hang_up, explain_refusal
from shared.transport.send_queue import SendQueue
from shared.transport.socket_watch import UNREADABLE, SocketWatch
from shared.transport.tcp_info import Traffic
from shared.transport.tls import build_context, explain_failure

MISC_S = 1.0
MQTT_5 = 5
NO_ANSWER = "no answer"
PACKET_TOO_LARGE, SILENT, TAKEN_OVER = "Packet too large", "Keep alive timeout", "Session taken over"
Message: TypeAlias = mqtt.MQTTMessage
Take: TypeAlias = Callable[[str, bytes], None]
Answer: TypeAlias = "asyncio.Future[list[str]]"
"""Reason of refusal for each requested item; empty where it was accepted."""


@dataclass(frozen=True)
class Incoming:
    """Handlers and limits of incoming messages.

    Attributes:
        traffic: Receives arrival times and counters.
        admits: Decides whether a large message may come in.
        closed: Topics whose messages are dropped, as bytes.
    """

    take: Take
    traffic: Traffic
    admits: Admits = lambda _topic, _size: True
    most_bytes: int = MOST_RECEIVED_BYTES
    closed: Collection[bytes] = frozenset()


class Connection:
    """A client id's connection, from CONNECT to its loss; a new one is made for every attempt.

    Attributes:
        lost: Done with the reason when the connection is lost.
        packet_bytes: Largest packet announced by the broker; None if it announced none.
        delivered: Number of received messages.
        confirmed: Number of those with QoS 1.
        carried: The large payloads sent on this connection.
        unwritten: Messages that are not yet written, or not yet acknowledged.
        watch: Reads and writes the socket.
    """

    def __init__(
        self, broker: Broker, client_id: str, will: Presence | None, incoming: Incoming, *, dates: bool = True
    ) -> None:
        self._broker, self._incoming, self._traffic, self._dates = broker, incoming, incoming.traffic, dates
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self.packet_bytes: int | None = None
        self.delivered = self.confirmed = 0
        self.carried, self.unwritten = PayloadWatch(), SendQueue()
        self._answers: dict[int, Answer] = {}
        self._misc: asyncio.TimerHandle | None = None
        self._dials = False
        self._passed = 0, 0
        self.client = client = BoundedClient(
            CallbackAPIVersion.VERSION2,
            most_bytes=incoming.most_bytes,
            admits=incoming.admits,
            reads_ahead=lambda: not incoming.traffic.watched,
            closed=incoming.closed,
            client_id=client_id,
            protocol=mqtt.MQTTv5 if broker.version == MQTT_5 else mqtt.MQTTv311,
            clean_session=None if broker.version == MQTT_5 else broker.session_expiry_s == 0,
            reconnect_on_failure=False,
        )
        if will:
            client.will_set(will.topic, will.will, qos=1, retain=True)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = client.on_subscribe = client.on_unsubscribe = self._on_answer
        self.watch = SocketWatch(client, self._traffic, self.end)

    async def open(self, patience_s: float) -> None:
        """Connect; return when the broker has accepted us.

        Raises:
            Unreachable: It has not; the message has the reason.
        """
        self._dials = True
        try:
            await dial_in_thread(lambda: self._dial(patience_s), self._hang_up)
        except (OSError, ValueError) as error:
            tls, host = self._broker.tls, self._broker.host
            raise (explain_failure(error, tls, host) if tls else Unreachable(str(error))) from error
        self.watch.begin_reading()
        self.watch.write()
        try:
            async with backports.timeout(patience_s):
                futures: set[asyncio.Future[Any]] = {self._accepted, self.lost}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise Unreachable(f"{NO_ANSWER} within {patience_s:.0f} s") from None
        if not self._accepted.done():
            raise self._find_cause()
        self._accepted.result()
        self.keep_alive()

    def _dial(self, patience_s: float) -> None:
        """Connect and send CONNECT. Blocks, on its own thread: the loop must not use the client meanwhile."""
        broker, client = self._broker, self.client
        extra: dict[str, Any] = {}
        if broker.version == MQTT_5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = broker.session_expiry_s
            extra = {"clean_start": broker.session_expiry_s == 0, "properties": properties}
        try:
            if login := read_login(broker):
                client.username_pw_set(login.user, login.password)
            if broker.tls:
                context = build_context(broker.tls, dates=self._dates)
                client.secure(context, broker.tls.server_name or broker.host, patience_s)
            client.connect(broker.host, broker.port, broker.keepalive_s, **extra)
        finally:
            self._dials = False

    def _find_cause(self) -> Unreachable:
        """Explain why the connection ended before the broker accepted it."""
        trouble, tls = self.client.trouble, self._broker.tls
        return explain_failure(trouble, tls, self._broker.host) if trouble and tls else Unreachable(self.lost.result())

    def send(self, topic: str, payload: bytes, *, qos: int, retain: bool) -> Answer | None:
        """Queue a message; with QoS 1 return a future that is done when the broker has acknowledged it.

        The first payload of a size that this connection has not carried yet always goes with QoS 1: its acknowledgement
        shows that the broker accepts that size.

        Args:
            retain: Whether the broker keeps it for later subscribers.

        Raises:
            Unreachable: The connection is lost, or the payload too large for MQTT.
        """
        is_larger = self.carried.is_larger(len(payload))
        try:
            info = self.client.publish(topic, payload, 1 if is_larger else qos, retain)
        except ValueError as error:
            raise Unreachable(str(error)) from error
        if info.rc != mqtt.MQTT_ERR_SUCCESS:
            raise Unreachable(mqtt.error_string(info.rc))
        if is_larger:
            self.carried.sent(info.mid, len(payload))
        self.unwritten.add(info.mid, len(payload))
        self.watch.write()
        return self._answer(info.mid) if qos else None

    async def room(self, size: int) -> None:
        """Wait until a frame of `size` bytes may be queued.

        Raises:
            Unreachable: The connection was lost first.
        """
        while (written := self.unwritten.room(size)) is not None:
            futures: set[asyncio.Future[Any]] = {written, self.lost}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                raise Unreachable("the connection was lost meanwhile")

    def subscribe(self, patterns: list[str]) -> Answer:
        """Request subscriptions with QoS 1; return the future answer."""
        code, mid = self.client.subscribe([(pattern, 1) for pattern in patterns])
        return self._register_answer(code, mid)

    def unsubscribe(self, patterns: list[str]) -> Answer:
        """Request the end of subscriptions; return the future answer."""
        code, mid = self.client.unsubscribe(patterns)
        return self._register_answer(code, mid)

    async def wait_answer(self, answer: Answer) -> list[str]:
        """Wait for the broker's answer; return the reason of refusal for each item.

        Raises:
            Unreachable: The connection was lost first; whether the message arrived is unknown.
        """
        futures: set[asyncio.Future[Any]] = {answer, self.lost}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Unreachable("the connection was lost meanwhile")
        return answer.result()

    @property
    def is_within(self) -> bool:
        """True if a packet has arrived in part."""
        return self.client.is_within

    def break_off(self) -> None:
        """Drop the connection without DISCONNECT, as a killed process does: the broker publishes the will."""
        if sock := self.client.socket():
            with suppress(OSError):
                cast("socket.socket", sock).shutdown(socket.SHUT_RDWR)
        self.end("broken off")

    def end(self, reason: str) -> None:
        """End the connection for a reason, which `lost` reports."""
        if not self.lost.done():
            self.lost.set_result(reason)

    def close(self) -> None:
        """Close the connection, with DISCONNECT if it is still open."""
        if self._misc:
            self._misc.cancel()
        if not self._dials:  # else the thread that dials hangs up
            self.client.disconnect()
            self.watch.write()
        self.end("closed")

    def _hang_up(self) -> None:
        """Send DISCONNECT at once, on the dialling thread."""
        self.client.disconnect()
        self.client.loop_write()

    def _register_answer(self, code: int, mid: int | None) -> Answer:
        if code != mqtt.MQTT_ERR_SUCCESS or mid is None:
            raise Unreachable(mqtt.error_string(MQTTErrorCode(code)))
        self.watch.write()
        return self._answer(mid)

    def _answer(self, mid: int) -> Answer:
        answer: Answer = self._loop.create_future()
        self._answers[mid] = answer
        return answer

    def keep_alive(self) -> None:
        """Let the client send pings and detect a dead connection."""
        counts = self._traffic.counts()
        if counts and (passed := (counts.acked_bytes, counts.received_bytes)) != self._passed:
            self._passed = passed
            self.client.note_life()
        if self.client.loop_misc() == mqtt.MQTT_ERR_SUCCESS:
            self.watch.write()
            self._misc = self._loop.call_later(MISC_S, self.keep_alive)

    def _on_connect(self, _c: object, _d: object, _flags: object, code: ReasonCode, properties: object) -> None:
        self.packet_bytes = getattr(properties, "MaximumPacketSize", None)
        if code.is_failure:
            self.end(explain_refusal(str(code)))
        elif not self._accepted.done():
            self._accepted.set_result(None)

    def _on_disconnect(
        self, _c: object, _d: object, flags: mqtt.DisconnectFlags, code: ReasonCode, _properties: object
    ) -> None:
        is_mute = not (self._accepted.done() or flags.is_disconnect_packet_from_server or self.client.trouble)
        reason = UNREADABLE if self.client.is_unreadable else str(self.client.trouble or code)
        self.end(explain_hang_up(has_tls=bool(self._broker.tls)) if is_mute else reason)

    def _on_message(self, _client: object, _data: object, message: Message) -> None:
        self._traffic.end_message()
        self.delivered += 1
        self.confirmed += message.qos > 0
        try:
            topic = message.topic
        except UnicodeDecodeError:  # not every broker refuses such a topic; it has no subscriber
            return
        if self.client.is_skipping:
            self.client.count_skipped(topic)
        else:
            self._incoming.take(topic, bytes(message.payload))

    def _on_answer(
        self, _client: object, _data: object, mid: int, codes: ReasonCode | list[ReasonCode], _properties: object
    ) -> None:
        self.carried.note_answer(mid)
        self.unwritten.remove(mid)
        if (answer := self._answers.pop(mid, None)) and not answer.done():
            codes = codes if isinstance(codes, list) else [codes]
            answer.set_result([str(code) if code.is_failure else "" for code in codes])
