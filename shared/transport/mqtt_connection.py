"""One MQTT connection on the running event loop. The only file that knows the MQTT client.

The client's own threads are not used: the loop reads when there is something to read. What is to be written is written
at once, and only what the socket does not take waits for the loop. Under TLS a readable socket says little: what is
decrypted already waits in no socket, and reading may have to wait for room to write, as writing for something to read.
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
from shared.transport.dialling import dialled
from shared.transport.login import login_of
from shared.transport.mqtt_client import Admits, BoundedClient
from shared.transport.packet_limit import MOST_RECEIVED_BYTES, Carried
from shared.transport.refusals import explain_hang_up, explain_refusal
from shared.transport.send_queue import SendQueue
from shared.transport.tcp_info import Traffic
from shared.transport.tls import context, explain

MISC_S = 1.0
BREATH, BREATH_BYTES = 64, 256 << 10
"""Packets, and about as many bytes, that are handled before whatever else the process has to do gets its turn: what was
read and waits takes memory, and a frame that is used at once is still in the processor's cache."""
MQTT_5 = 5
NO_ANSWER = "no answer"
PACKET_TOO_LARGE, SILENT, TAKEN_OVER = "Packet too large", "Keep alive timeout", "Session taken over"
UNREADABLE = "it sent a message that makes no sense"
Message: TypeAlias = mqtt.MQTTMessage
Take: TypeAlias = Callable[[str, bytes], None]
Answer: TypeAlias = "asyncio.Future[list[str]]"
"""For each thing asked why it was refused; the empty string where it was not."""


@dataclass(frozen=True)
class Incoming:
    """What becomes of what comes.

    Attributes:
        traffic: Is told when something comes.
        admits: Tells whether a large one may come in.
        closed: Topics of which nothing is taken, as bytes.
    """

    take: Take
    traffic: Traffic
    admits: Admits = lambda _topic, _size: True
    most_bytes: int = MOST_RECEIVED_BYTES
    closed: Collection[bytes] = frozenset()


class Connection:
    """A client id's connection, from CONNECT to its loss; a new one is made for every attempt.

    Attributes:
        lost: Done when the connection is gone; why.
        packet_bytes: Largest packet that the broker takes by its own word, None if it said nothing.
        delivered: Messages that have come.
        confirmed: Those of them of QoS 1.
        carried: The large payloads that it carried.
        unwritten: What waits to be written, or for the broker's answer.
        waits_to_write: Whether the socket takes nothing more now.
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
        self.carried, self.unwritten = Carried(), SendQueue()
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
            Unreachable: It has not, and why.
        """
        self._dials = True
        try:
            await dialled(lambda: self._dial(patience_s), self._hang_up)
        except (OSError, ValueError) as error:
            tls, host = self._broker.tls, self._broker.host
            raise (explain(error, tls, host) if tls else Unreachable(str(error))) from error
        self.begin_reading()
        self._write()
        try:
            async with backports.timeout(patience_s):
                waiting: set[asyncio.Future[Any]] = {self._accepted, self.lost}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise Unreachable(f"{NO_ANSWER} within {patience_s:.0f} s") from None
        if not self._accepted.done():
            raise self._find_cause()
        self._accepted.result()
        self.keep_alive()

    def _dial(self, patience_s: float) -> None:
        """Connect, and ask to be accepted. Blocks, on a thread of its own: the loop keeps off the client until then."""
        broker, client = self._broker, self.client
        extra: dict[str, Any] = {}
        if broker.version == MQTT_5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = broker.session_expiry_s
            extra = {"clean_start": broker.session_expiry_s == 0, "properties": properties}
        try:
            if login := login_of(broker):
                client.username_pw_set(login.user, login.password)
            if broker.tls:
                client.secure(context(broker.tls, dates=self._dates), broker.tls.server_name or broker.host, patience_s)
            client.connect(broker.host, broker.port, broker.keepalive_s, **extra)
        finally:
            self._dials = False

    def _find_cause(self) -> Unreachable:
        """Return why the connection ended before the broker accepted it."""
        trouble, tls = self.client.trouble, self._broker.tls
        return explain(trouble, tls, self._broker.host) if trouble and tls else Unreachable(self.lost.result())

    def send(self, topic: str, payload: bytes, *, qos: int, retain: bool) -> Answer | None:
        """Queue a message; with QoS 1 return what is done when the broker has it.

        The first payload of a size that this connection has not carried yet goes with QoS 1 in any case: the answer
        tells that the broker takes such.

        Args:
            qos: 0 or 1.
            retain: Whether the broker keeps it for later subscribers.

        Raises:
            Unreachable: The connection is gone, or the payload too large for MQTT.
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
        """Wait until a frame of that many bytes may be queued behind what is not written yet.

        Raises:
            Unreachable: The connection was lost first.
        """
        while (written := self.unwritten.room(size)) is not None:
            waiting: set[asyncio.Future[Any]] = {written, self.lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                raise Unreachable("the connection was lost meanwhile")

    def subscribe(self, patterns: list[str]) -> Answer:
        """Ask for subscriptions with QoS 1; return what is done when the broker has them."""
        code, mid = self.client.subscribe([(pattern, 1) for pattern in patterns])
        return self._asked(code, mid)

    def unsubscribe(self, patterns: list[str]) -> Answer:
        """End subscriptions."""
        code, mid = self.client.unsubscribe(patterns)
        return self._asked(code, mid)

    async def settled(self, answer: Answer) -> list[str]:
        """Wait for the broker's answer; return why it refused, for each thing asked.

        Raises:
            Unreachable: The connection was lost first; whether the message arrived is not known.
        """
        waiting: set[asyncio.Future[Any]] = {answer, self.lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Unreachable("the connection was lost meanwhile")
        return answer.result()

    @property
    def is_within(self) -> bool:
        """Whether a packet has come in part."""
        return self.client.is_within

    @property
    def is_unreadable(self) -> bool:
        """Whether the broker delivered what makes no sense; it would do so again in the same session."""
        return self.client.is_unreadable

    def break_off(self) -> None:
        """End the connection as a process that is killed does: the broker publishes the will."""
        if sock := self.client.socket():
            with suppress(OSError):
                cast("socket.socket", sock).shutdown(socket.SHUT_RDWR)
        self._lose("broken off")

    def end(self, reason: str) -> None:
        """Give the connection up for a reason that `lost` states."""
        self._lose(reason)

    def close(self) -> None:
        """End the connection, politely if it still stands."""
        if self._misc:
            self._misc.cancel()
        if not self._dials:  # else the thread that dials hangs up
            self.client.disconnect()
            self._write()
        self._lose("closed")

    def _hang_up(self) -> None:
        """Say goodbye at once, if anybody answers."""
        self.client.disconnect()
        self.client.loop_write()

    def _asked(self, code: int, mid: int | None) -> Answer:
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
        """Let the client keep the connection alive, and notice when it is not: nothing passes either way any more."""
        counts = self._traffic.counts()
        if counts and (passed := (counts.acked_bytes, counts.received_bytes)) != self._passed:
            self._passed = passed
            self.client.note_life()
        if self.client.loop_misc() == mqtt.MQTT_ERR_SUCCESS:
            self._write()
            self._misc = self._loop.call_later(MISC_S, self.keep_alive)

    def read(self) -> None:
        """Handle what has come, a breath of it at a time."""
        client = self.client
        until = client.read_bytes + BREATH_BYTES
        try:
            for _ in range(BREATH):
                self._traffic.begins(anew=not client.is_within)
                client.loop_read()
                if not client.has_more or client.read_bytes >= until:
                    break
            if client.has_more:
                self._loop.call_soon(self._read_on)
        except (
            OSError,
            ValueError,
            IndexError,
            struct.error,
        ) as error:  # the last two: of a packet that makes no sense
            self._lose(UNREADABLE if self.client.is_unreadable else str(error))
        self._write()

    def _read_on(self) -> None:
        if self.client.has_more and self.client.socket():
            self.read()

    def _write(self) -> None:
        """Write what waits; watch the socket only for what it does not take now."""
        if self._wants_to_write:
            try:
                self.client.loop_write()
            except (OSError, ValueError) as error:
                self._lose(str(error))
        self._watch()

    def _watch(self) -> None:
        """Wait for room where something is to be written that waits for no reading, or where reading waits for it."""
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
        if crossed and self._reads:  # it would be readable all the time
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
        self._traffic.opened(sock)

    def begin_reading(self) -> None:
        """Read whatever comes from now on, unless the socket was closed meanwhile."""
        sock = self.client.socket()
        if sock and sock.fileno() >= 0 and not self._reads:
            self._loop.add_reader(sock.fileno(), self.read)
            self._reads = True

    def _on_socket_close(self, _client: object, _data: object, sock: Any) -> None:
        """Stop waiting for a socket; what was never waited for is another's number by now, perhaps."""
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
        self._traffic.ended()
        self.delivered += 1
        self.confirmed += message.qos > 0
        try:
            topic = message.topic
        except UnicodeDecodeError:  # not every broker refuses such a topic; nobody listens to it
            return
        if self.client.is_passing:
            self.client.take_passed(topic)
        else:
            self._incoming.take(topic, bytes(message.payload))

    def _on_answer(
        self, _client: object, _data: object, mid: int, codes: ReasonCode | list[ReasonCode], _properties: object
    ) -> None:
        self.carried.arrived(mid)
        self.unwritten.remove(mid)
        if (answer := self._answers.pop(mid, None)) and not answer.done():
            codes = codes if isinstance(codes, list) else [codes]
            answer.set_result([str(code) if code.is_failure else "" for code in codes])
