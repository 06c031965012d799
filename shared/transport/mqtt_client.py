"""paho client with size limits: skips oversized packets, batches small reads.

A packet that is too large is read and dropped: acknowledged, but never delivered. Disconnecting would not help, since
the broker repeats unacknowledged and retained messages on every new connection. MQTT 5 could announce the largest
packet (`MaximumPacketSize`), but mosquitto then keeps each larger QoS 1 message in one of the session's
`max_inflight_messages` slots for ever: once all are occupied, nothing is delivered any more.

The properties of a received PUBLISH are dropped unread. The protocol does not need them, and properties that the broker
accepts and paho refuses to parse, such as U+FEFF in a user property, would end every connection that repeats them.

Packets in transit on a topic that was left are dropped before paho makes messages of them, which takes some thirty
times as long: else a flood would outlast its subscription by seconds.
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
"""Decides whether a payload of about so many bytes may come in on a topic."""

LEAST_BYTES = 1 << 16
"""Smaller packets are accepted without asking `Admits`: it would cost more than the packet."""
SKIPPED_HEAD_BYTES = 1 << 10
"""Part of a skipped packet, after its topic, that is retained: its number and properties, as far as they are read."""
CHUNK_BYTES, HEAD_BYTES = 1 << 16, 1 << 10
"""Read-ahead sizes: for small packets, and after a large one, where another is likely, whose bytes should be received
directly into their place."""
DECRYPTED_BYTES = 1 << 18
"""Most bytes of TLS records, 16 KiB each at most, decrypted in one go: as much as stays in the processor's cache until
it is copied."""
PUBLISH, KIND = 0x30, 0xF0
UNCONFIRMED = 0xF6
"""Mask of a packet's first byte: its kind and quality of service; QoS 0 needs no answer."""
LENGTH_BYTES = 4
"""Longest encoding of a packet's length in MQTT."""
CONFIRMED, RETAINED = 0x06, 0x01
"""Bits of PUBLISH's first byte: QoS above 0, and a retained message."""
MOST_NAMED = 64
"""Topics of skipped packets that are logged, each once."""


def strip_properties(packet: bytearray, at: int, *, with_payload: bool) -> None:
    """Remove the properties of a PUBLISH of MQTT 5 in place.

    Args:
        at: Offset of the properties' length.
        with_payload: Whether to preserve the payload.

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
    """Client that buffers at most `most_bytes` of one packet, and nothing of one that is not admitted.

    Attributes:
        most_bytes: Limit of a packet, without the 2 to 5 bytes before its topic.
        admits: Consulted for larger packets.
        reads_ahead: Returns whether to read ahead; it must not where arrival times of messages are measured.
        closed: Topics whose messages are dropped, as bytes.
        passed_by: Number of skipped packets.
        is_unreadable: Whether a malformed PUBLISH came; the broker will repeat it in this session.
        read_bytes: Bytes read of all packets.
        trouble: TLS error, which paho does not report.
        secured: The TLS socket; None without TLS.
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
        self.skipped_packets = self.read_bytes = 0
        self.is_unreadable = False
        self._named = set[str]()
        self._ahead, self._ahead_bytes = memoryview(b""), CHUNK_BYTES
        self.trouble: OSError | None = None
        self.read_waits_for_room = self.write_waits_for_bytes = False
        self.secured: ssl.SSLSocket | None = None
        self._decrypted, self._deferred_error = memoryview(b""), cast("OSError | None", None)
        self._server_name, self._patience_s = "", 0.0
        self._is_admitted: bool | None = None
        self._topic_end = 1 << 16  # MQTT writes a topic in 64 KiB at most
        super().__init__(*arguments, **options)

    def secure(self, context: ssl.SSLContext, server_name: str, patience_s: float) -> None:
        """Use TLS from the next connection on.

        Args:
            patience_s: Timeout of the handshake in seconds.
        """
        self.tls_set_context(context)
        self._server_name, self._patience_s = server_name, patience_s

    def _ssl_wrap_socket(self, tcp_sock: socket.socket) -> ssl.SSLSocket:
        assert self._ssl_context, "paho calls this only with TLS"
        self.secured = handshake(self._ssl_context, tcp_sock, self._server_name, self._patience_s)
        return self.secured

    @property
    def has_more(self) -> bool:
        """True if bytes were read, or decrypted, that are not handled yet."""
        return len(self._ahead) > 0 or bool(self.secured and self.secured.pending())

    @property
    def is_within(self) -> bool:
        """True if a packet has arrived in part."""
        return bool(self._in_packet["command"])

    @property
    def is_skipping(self) -> bool:
        """True if the current packet is being skipped."""
        return bool(self._in_packet["remaining_length"] > self.most_bytes) or self._is_admitted is False

    def note_life(self) -> None:
        """Count an indirect sign of life, such as bytes acknowledged by the peer's kernel.

        On a slow link a ping waits behind frames of minutes; its timeout restarts now.
        """
        with self._msgtime_mutex:
            self._last_bytes_received = now = mqtt.time_func()
        if self._ping_t:
            self._ping_t = now

    def _sock_recv(self, bufsize: int) -> bytes | memoryview:  # type: ignore[override]  # both do
        """Receive bytes of a packet; paho asks for all that are missing, and keeps what it gets."""
        packet = self._in_packet
        is_large = packet["remaining_length"] > LEAST_BYTES
        if not packet["have_remaining"]:
            self._is_admitted = None
        elif is_large:
            if self._is_admitted is None and packet["packet"]:
                self._is_admitted = self._admit(packet["command"], packet["packet"], packet["remaining_length"])
            if self.is_skipping:
                del packet["packet"][self._topic_end + SKIPPED_HEAD_BYTES :]
            if self.is_skipping or not packet["packet"]:
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
                raise BlockingIOError  # paho's sign for "no more data now"
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return bytes(data)

    def _take(self, size: int) -> bytes | memoryview:
        """Read from the socket, at most `size` bytes; the next read may overwrite them.

        Raises:
            BlockingIOError: No data now.
            OSError: The connection is lost.
        """
        return self._decrypt(self.secured, size) if self.secured else super()._sock_recv(size)

    def _decrypt(self, secured: ssl.SSLSocket, size: int) -> memoryview:
        """Decrypt record after record, which OpenSSL returns one at a time, until `size` bytes or no record is left."""
        if self._deferred_error:
            raise self._deferred_error
        if not self._decrypted:
            self._decrypted = memoryview(bytearray(DECRYPTED_BYTES))
        self.read_waits_for_room = False
        room, count = self._decrypted[:size], 0
        try:
            while count < len(room) and (more := secured.recv_into(room[count:])):
                count += more
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanting:
            self.read_waits_for_room = isinstance(wanting, ssl.SSLWantWriteError)
            if not count:
                raise BlockingIOError from wanting
        except OSError as trouble:
            self.trouble = self._deferred_error = trouble  # raised after the data before it is consumed
            if not count:
                raise
        return room[:count]

    def _packet_queue(self, command: int, packet: bytes | bytearray, *more: Any, **options: Any) -> MQTTErrorCode:
        """Queue a packet as a view: paho slices the unsent part again and again, which would copy bytes."""
        view: Any = memoryview(packet)
        return super()._packet_queue(command, view, *more, **options)

    def _sock_send(self, buf: bytes | bytearray) -> int:
        """Send what the socket accepts; with TLS, paho offers the same data again, as OpenSSL demands."""
        return self._encrypt(self.secured, memoryview(buf)) if self.secured else super()._sock_send(buf)

    def _encrypt(self, secured: ssl.SSLSocket, data: memoryview) -> int:
        """Send record after record, which OpenSSL accepts one at a time, until the socket accepts no more."""
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
        """Drop complete QoS 0 packets of closed topics at the head of the read-ahead buffer."""
        chunk = self._ahead.obj
        assert isinstance(chunk, bytes), "filled by _receive"
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
        """Decide whether a packet is accepted, by its topic; None until the topic has arrived."""
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
                strip_properties(packet, at, with_payload=not self.is_skipping)
            return super()._handle_publish()
        except (MQTTException, ValueError, IndexError, struct.error):
            self.is_unreadable = True
            raise

    def count_skipped(self, topic: str) -> None:
        """Count a skipped packet; log the first of each topic."""
        self.skipped_packets += 1
        if topic in self._named or len(self._named) >= MOST_NAMED:
            return
        self._named.add(topic)
        topic = printable(topic)
        size, is_retained = self._in_packet["remaining_length"], self._in_packet["command"] & RETAINED
        remedy = f"; the broker retains it: `mosquitto_pub -r -n -t {topic}` removes it" if is_retained else ""
        log.warning("ignored a packet of %d bytes on %s: above the current limit of that topic%s", size, topic, remedy)
