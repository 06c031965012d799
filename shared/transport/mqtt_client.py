"""The paho client with bounds: what may not come in passes by without being held, and many packets are read at once.

A packet that is too large is read and thrown away: it is acknowledged, and never handed on. To hang up would not help,
since the broker repeats what was not acknowledged, and what it retains, on every new connection. MQTT 5 could announce
the largest packet (`MaximumPacketSize`), but mosquitto then keeps each larger QoS 1 message in one of the session's
`max_inflight_messages` slots for ever: once all are occupied, nothing is delivered any more.

The properties of a received PUBLISH are dropped unread. The protocol has no use for them, and what the broker accepts
and paho refuses to parse, such as U+FEFF in a user property, would end every connection on which it is repeated.

What is still on its way on a topic that nobody here listens to any more is dropped packet by packet before paho makes
a message of each, which takes some thirty times as long: else a flood outlasts the end of its subscription by seconds.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from collections.abc import Callable, Collection
from typing import Any, TypeAlias, cast

from paho.mqtt import client as mqtt
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.exception import MQTTException

from shared.protocol.clip import printable
from shared.transport.tls import handshake

log = logging.getLogger(__name__)

Admits: TypeAlias = Callable[[str, int], bool]
"""Tells whether a payload of about so many bytes may come in on a topic."""

LEAST_BYTES = 1 << 16
"""Of packets that are asked about; a shorter one costs less than the question."""
KEPT_BYTES = 1 << 10
"""Of a packet that passes by, behind its topic: its number and its properties, as far as they are read."""
CHUNK_BYTES, HEAD_BYTES = 1 << 16, 1 << 10
"""What is read ahead of its turn: of small packets, and behind a large one, where another is likely, whose bytes are
better received where they are to lie."""
DECRYPTED_BYTES = 1 << 18
"""Of TLS's records, 16 KiB each at most, that are taken in one go: as much as is still in the processor's cache when
it is copied to where it is to lie."""
PUBLISH, KIND = 0x30, 0xF0
UNCONFIRMED = 0xF6
"""Of a packet's first byte: its kind, and which quality of service; QoS 0 asks for no answer."""
LENGTH_BYTES = 4
"""In which MQTT writes a packet's length at most."""
CONFIRMED, RETAINED = 0x06, 0x01
"""Bits of PUBLISH's first byte: QoS above 0, and whether the broker had retained the message."""
MOST_NAMED = 64
"""Topics of packets that were not taken, of which each is named once."""


def strip_properties(packet: bytearray, at: int, *, with_payload: bool) -> None:
    """Remove the properties of a PUBLISH of MQTT 5 in place.

    Args:
        packet: What follows the fixed header.
        at: Where the length of the properties stands.
        with_payload: Whether the payload stays.

    Raises:
        IndexError: The packet ends within that length.
    """
    size = shift = 0
    end = at
    while True:
        size |= (packet[end] & 0x7F) << shift
        end, shift = end + 1, shift + 7
        if not packet[end - 1] & 0x80:
            break
    packet[at : end + size if with_payload else None] = b"\0"


class BoundedClient(mqtt.Client):
    """A client that holds at most `most_bytes` of one packet, and nothing of one that is not admitted.

    Attributes:
        most_bytes: Of a packet, without the 2 to 5 bytes before its topic.
        admits: Asked about larger packets.
        reads_ahead: Tells whether what came may be read before its turn: a message's own time is not told then.
        closed: Topics of which nothing is taken, as bytes.
        passed_by: Packets that were not taken.
        is_unreadable: Whether a PUBLISH came that makes no sense; the broker will repeat it in this session.
        read_bytes: Of all packets, as far as they were read.
        trouble: What TLS met, of which paho says nothing.
        secured: The socket under TLS; None without.
        read_waits_for_room: Whether TLS must write before it can read on.
        write_waits_for_bytes: Whether TLS must read before it can write on.
    """

    def __init__(
        self,
        *arguments: Any,
        most_bytes: int,
        admits: Admits,
        reads_ahead: Callable[[], bool],
        closed: Collection[bytes] = frozenset(),
        **options: Any,
    ) -> None:
        self.most_bytes, self.admits, self.reads_ahead, self.closed = most_bytes, admits, reads_ahead, closed
        self.passed_by = self.read_bytes = 0
        self.is_unreadable = False
        self._named = set[str]()
        self._ahead, self._ahead_bytes = memoryview(b""), CHUNK_BYTES
        self.trouble: OSError | None = None
        self.read_waits_for_room = self.write_waits_for_bytes = False
        self.secured: ssl.SSLSocket | None = None
        self._decrypted, self._met_behind = memoryview(b""), cast("OSError | None", None)
        self._server_name, self._patience_s = "", 0.0
        self._is_admitted: bool | None = None
        self._topic_end = 1 << 16  # MQTT writes a topic in 64 KiB at most
        super().__init__(*arguments, **options)

    def secure(self, context: ssl.SSLContext, server_name: str, patience_s: float) -> None:
        """Speak TLS from the next connection on.

        Args:
            context: By what the broker and we know each other.
            server_name: What the broker's certificate must be for.
            patience_s: Seconds that the handshake may take.
        """
        self.tls_set_context(context)
        self._server_name, self._patience_s = server_name, patience_s

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        assert self._ssl_context, "paho asks for this under TLS alone"
        self.secured = handshake(self._ssl_context, tcp_sock, self._server_name, self._patience_s)
        return self.secured

    @property
    def has_more(self) -> bool:
        """Whether something was read, or decrypted, that is not handled yet."""
        return len(self._ahead) > 0 or bool(self.secured and self.secured.pending())

    @property
    def is_within(self) -> bool:
        """Whether a packet has begun to come and has not come whole."""
        return bool(self._in_packet["command"])

    @property
    def is_passing(self) -> bool:
        """Whether the packet that is being read, or handed on, is not taken."""
        return bool(self._in_packet["remaining_length"] > self.most_bytes) or self._is_admitted is False

    def note_life(self) -> None:
        """Count what is no packet as a sign of life, such as bytes that arrived at the other end's kernel.

        On a slow link the question whether somebody is there waits behind frames of minutes; it waits anew from now.
        """
        with self._msgtime_mutex:
            self._last_bytes_received = now = mqtt.time_func()
        if self._ping_t:
            self._ping_t = now

    def _sock_recv(self, bufsize: int) -> bytes | memoryview:  # type: ignore[override]  # both do
        """Receive bytes of a packet; paho asks for all that it lacks, and keeps what it is given."""
        packet = self._in_packet
        is_large = packet["remaining_length"] > LEAST_BYTES
        if not packet["have_remaining"]:
            self._is_admitted = None
        elif is_large:
            if self._is_admitted is None and packet["packet"]:
                self._is_admitted = self._admit(packet["command"], packet["packet"], packet["remaining_length"])
            if self.is_passing:
                del packet["packet"][self._topic_end + KEPT_BYTES :]
            if self.is_passing or not packet["packet"]:
                bufsize = min(bufsize, CHUNK_BYTES)
        if packet["have_remaining"]:
            self._ahead_bytes = HEAD_BYTES if is_large else CHUNK_BYTES
        data = self._receive(bufsize, is_large=is_large)
        self.read_bytes += len(data)
        return data

    def _receive(self, size: int, *, is_large: bool) -> bytes | memoryview:
        if not self._ahead:
            if is_large or size >= CHUNK_BYTES or not self.reads_ahead():
                return self._take(size)
            self._ahead = memoryview(bytes(self._take(self._ahead_bytes)))
        if self.closed and not self._in_packet["command"]:
            self._drop_closed()
            if not self._ahead:
                raise BlockingIOError  # paho's own sign that nothing more is there now
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return bytes(data)

    def _take(self, size: int) -> bytes | memoryview:
        """Take what the socket has, at most `size` bytes; they may be overwritten when more is taken.

        Raises:
            BlockingIOError: Nothing now.
            OSError: The connection is lost.
        """
        return self._decrypt(self.secured, size) if self.secured else super()._sock_recv(size)

    def _decrypt(self, secured: ssl.SSLSocket, size: int) -> memoryview:
        """Take record after record, which OpenSSL hands out one at a time, until there is no room or none is there."""
        if self._met_behind:
            raise self._met_behind
        if not self._decrypted:
            self._decrypted = memoryview(bytearray(DECRYPTED_BYTES))
        self.read_waits_for_room = False
        room, taken = self._decrypted[:size], 0
        try:
            while taken < len(room) and (more := secured.recv_into(room[taken:])):
                taken += more
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanting:
            self.read_waits_for_room = isinstance(wanting, ssl.SSLWantWriteError)
            if not taken:
                raise BlockingIOError from wanting
        except OSError as trouble:
            self.trouble = self._met_behind = trouble  # told when what came before it is taken
            if not taken:
                raise
        return room[:taken]

    def _packet_queue(self, command: int, packet: bytes | bytearray, *more: Any, **options: Any) -> MQTTErrorCode:
        """Queue a packet; paho offers what is left of it to the socket again and again, which copies no view."""
        view: Any = memoryview(packet)
        return super()._packet_queue(command, view, *more, **options)

    def _sock_send(self, buf: bytes | bytearray) -> int:
        """Send what the socket takes. Of what TLS did not take, paho offers the same again, as OpenSSL demands."""
        return self._encrypt(self.secured, memoryview(buf)) if self.secured else super()._sock_send(buf)

    def _encrypt(self, secured: ssl.SSLSocket, data: memoryview) -> int:
        """Send record after record, which OpenSSL takes one at a time, until the socket takes no more."""
        self.write_waits_for_bytes, sent = False, 0
        try:
            while sent < len(data):
                sent += secured.send(data[sent:])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanting:
            self.write_waits_for_bytes = isinstance(wanting, ssl.SSLWantReadError)
            if not sent:
                raise BlockingIOError from wanting
        except OSError as trouble:
            self.trouble = trouble
            raise
        return sent

    def _drop_closed(self) -> None:
        """Drop what lies whole at the head of what was read, is of a closed topic, and asks for no answer."""
        chunk = self._ahead.obj
        assert isinstance(chunk, bytes), "it is what the socket gave"
        start = at = len(chunk) - len(self._ahead)
        while at + 1 + LENGTH_BYTES < len(chunk) and chunk[at] & UNCONFIRMED == PUBLISH:
            size, body = chunk[at + 1] & 0x7F, at + 2
            while chunk[body - 1] & 0x80 and body < at + 1 + LENGTH_BYTES:
                size |= (chunk[body] & 0x7F) << 7 * (body - at - 1)
                body += 1
            name = body + 2
            if (
                body + size > len(chunk)
                or chunk[name : name + int.from_bytes(chunk[body:name], "big")] not in self.closed
            ):
                break
            at = body + size
        self._ahead = self._ahead[at - start :]

    def _admit(self, command: int, head: bytearray, size: int) -> bool | None:
        """Tell whether a packet is taken, by its topic; None while that has not come whole."""
        if command & KIND != PUBLISH:
            return True
        end = 2 + int.from_bytes(head[:2], "big")
        if len(head) < end:
            return None
        self._topic_end = end
        return self.admits(head[2:end].decode(errors="replace"), size - end)

    def _handle_publish(self) -> MQTTErrorCode:
        packet, command = self._in_packet["packet"], self._in_packet["command"]
        try:
            if self._protocol == mqtt.MQTTv5:
                at = 2 + int.from_bytes(packet[:2], "big") + 2 * bool(command & CONFIRMED)
                strip_properties(packet, at, with_payload=not self.is_passing)
            return super()._handle_publish()
        except (MQTTException, ValueError, IndexError, struct.error):
            self.is_unreadable = True
            raise

    def take_passed(self, topic: str) -> None:
        """Count a packet that was not taken; log the first of each topic."""
        self.passed_by += 1
        if topic in self._named or len(self._named) >= MOST_NAMED:
            return
        self._named.add(topic)
        topic = printable(topic)
        size, is_retained = self._in_packet["remaining_length"], self._in_packet["command"] & RETAINED
        remedy = f"; the broker retains it: `mosquitto_pub -r -n -t {topic}` removes it" if is_retained else ""
        log.warning("ignored a packet of %d bytes on %s: more than is taken there now%s", size, topic, remedy)
