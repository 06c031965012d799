"""One MQTT connection on the asyncio event loop.

This is the only user of the MQTT client, whose own threads are not used: the loop reads when the socket is readable.
Data are written at once, and only what the socket does not accept waits for the loop. With TLS a readable socket says
little: decrypted data wait in no socket, and reading may have to wait for room to write, as writing for data to read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
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
from shared.transport.tcp_info import Traffic
from shared.transport.tls import build_context, explain_failure

MISC_S = 1.0
BATCH_PACKETS, BATCH_BYTES = 64, 256 << 10
"""Packets, and about as many bytes, that are handled before the event loop gets its turn: unhandled data take memory,
and a frame that is used at once is still in the processor's cache."""
MQTT_5 = 5
NO_ANSWER = "no answer"
PACKET_TOO_LARGE, SILENT, TAKEN_OVER = "Packet too large", "Keep alive timeout", "Session taken over"
UNREADABLE = "it sent a malformed message"
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
        waits_to_write: Whether the socket accepts no more data now.
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
        self._dials = self._reads = self._wants_to_write = self.waits_to_write = False
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
        client.on_socket_open, client.on_socket_close = self._on_socket_open, self._on_socket_close
        client.on_socket_register_write = self._on_register_write
        client.on_socket_unregister_write = self._on_unregister_write

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
        self.begin_reading()
        self._write()
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
        self._write()
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

    @property
    def is_unreadable(self) -> bool:
        """True if the broker delivered a malformed message; it would repeat it in the same session."""
        return self.client.is_unreadable

    def break_off(self) -> None:
        """Drop the connection without DISCONNECT, as a killed process does: the broker publishes the will."""
        if sock := self.client.socket():
            with suppress(OSError):
                cast("socket.socket", sock).shutdown(socket.SHUT_RDWR)
        self._lose("broken off")

    def end(self, reason: str) -> None:
        """End the connection for a reason, which `lost` reports."""
        self._lose(reason)

    def close(self) -> None:
        """Close the connection, with DISCONNECT if it is still open."""
        if self._misc:
            self._misc.cancel()
        if not self._dials:  # else the thread that dials hangs up
            self.client.disconnect()
            self._write()
        self._lose("closed")

    def _hang_up(self) -> None:
        """Send DISCONNECT at once, on the dialling thread."""
        self.client.disconnect()
        self.client.loop_write()

    def _register_answer(self, code: int, mid: int | None) -> Answer:
        if code != mqtt.MQTT_ERR_SUCCESS or mid is None:
            raise Unreachable(mqtt.error_string(MQTTErrorCode(code)))
        self._write()
        return self._answer(mid)

    def _answer(self, mid: int) -> Answer:
        answer: Answer = self._loop.create_future()
        self._answers[mid] = answer
        return answer

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def keep_alive(self) -> None:
        """Let the client send pings and detect a dead connection."""
        counts = self._traffic.counts()
        if counts and (passed := (counts.acked_bytes, counts.received_bytes)) != self._passed:
            self._passed = passed
            self.client.note_life()
        if self.client.loop_misc() == mqtt.MQTT_ERR_SUCCESS:
            self._write()
            self._misc = self._loop.call_later(MISC_S, self.keep_alive)

    def read(self) -> None:
        """Handle received data, a bounded number of packets at a time."""
        client = self.client
        until = client.read_bytes + BATCH_BYTES
        try:
            for _ in range(BATCH_PACKETS):
                self._traffic.begins(anew=not client.is_within)
                client.loop_read()
                if not client.has_more or client.read_bytes >= until:
                    break
            if client.has_more:
                self._loop.call_soon(self._continue_reading)
        except (
            OSError,
            ValueError,
            IndexError,
            struct.error,
        ) as error:  # the last two: malformed packets
            self._lose(UNREADABLE if self.client.is_unreadable else str(error))
        self._write()

    def _continue_reading(self) -> None:
        if self.client.has_more and self.client.socket():
            self.read()

    def _write(self) -> None:
        """Write queued data; watch the socket only for what it does not accept now."""
        if self._wants_to_write:
            try:
                self.client.loop_write()
            except (OSError, ValueError) as error:
                self._lose(str(error))
        self._watch()

    def _watch(self) -> None:
        """Watch for room to write, if data wait for it or if reading waits for it."""
        sock = self.client.socket()
        if not sock:
            return
        crossed = self.client.read_waits_for_room
        waits = crossed or (self._wants_to_write and not self.client.write_waits_for_bytes)
        if waits != self.waits_to_write:
            if waits:
                self._loop.add_writer(sock.fileno(), self._on_room)
            else:
                self._loop.remove_writer(sock.fileno())
            self.waits_to_write = waits
        if crossed and self._reads:  # the socket would be readable all the time
            self._loop.remove_reader(sock.fileno())
            self._reads = False

    def _on_room(self) -> None:
        if self.client.read_waits_for_room:
            self.begin_reading()
            self.read()
        else:
            self._write()

    def _on_socket_open(self, _client: object, _data: object, sock: Any) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._traffic.track(sock)

    def begin_reading(self) -> None:
        """Read from now on, unless the socket was closed meanwhile."""
        sock = self.client.socket()
        if sock and sock.fileno() >= 0 and not self._reads:
            self._loop.add_reader(sock.fileno(), self.read)
            self._reads = True

    def _on_socket_close(self, _client: object, _data: object, sock: Any) -> None:
        """Stop watching a socket; a number that was never watched may belong to another socket by now."""
        if sock.fileno() >= 0 and self._reads:
            self._loop.remove_reader(sock.fileno())
        if sock.fileno() >= 0 and self.waits_to_write:
            self._loop.remove_writer(sock.fileno())
        self._reads = self.waits_to_write = False

    def _on_register_write(self, *_: object) -> None:
        self._wants_to_write = True

    def _on_unregister_write(self, *_: object) -> None:
        self._wants_to_write = False

    def _on_connect(self, _c: object, _d: object, _flags: object, code: ReasonCode, properties: object) -> None:
        self.packet_bytes = getattr(properties, "MaximumPacketSize", None)
        if code.is_failure:
            self._lose(explain_refusal(str(code)))
        elif not self._accepted.done():
            self._accepted.set_result(None)

    def _on_disconnect(
        self, _c: object, _d: object, flags: mqtt.DisconnectFlags, code: ReasonCode, _properties: object
    ) -> None:
        is_mute = not (self._accepted.done() or flags.is_disconnect_packet_from_server or self.client.trouble)
        reason = UNREADABLE if self.client.is_unreadable else str(self.client.trouble or code)
        self._lose(explain_hang_up(has_tls=bool(self._broker.tls)) if is_mute else reason)

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
