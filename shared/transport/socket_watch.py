"""Read and write an MQTT client's socket on the asyncio event loop.

Data are written at once, and only what the socket does not accept waits for the loop. With TLS a readable socket says
little: decrypted data wait in no socket, and reading may have to wait for room to write, as writing for data to read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

from shared.transport.mqtt_client import BoundedClient
from shared.transport.tcp_info import Traffic

BATCH_PACKETS, BATCH_BYTES = 64, 256 << 10
"""Packets, and about as many bytes, that are handled before the event loop gets its turn: unhandled data take memory,
and a frame that is used at once is still in the processor's cache."""
UNREADABLE = "it sent a malformed message"


class SocketWatch:
    """Watches the socket of a client.

    Attributes:
        waits_to_write: Whether the socket accepts no more data now.
    """

    def __init__(self, client: BoundedClient, traffic: Traffic, lose: Callable[[str], None]) -> None:
        self._client, self._traffic, self._lose, self._loop = client, traffic, lose, asyncio.get_running_loop()
        self._reads = self._wants_to_write = self.waits_to_write = False
        client.on_socket_open, client.on_socket_close = self._on_open, self._on_close
        client.on_socket_register_write = lambda *_: self._set_wants_to_write(True)
        client.on_socket_unregister_write = lambda *_: self._set_wants_to_write(False)

    def read(self) -> None:
        """Handle received data, a bounded number of packets at a time."""
        client = self._client
        until = client.read_bytes + BATCH_BYTES
        try:
            for _ in range(BATCH_PACKETS):
                self._traffic.begins(anew=not client.is_within)
                client.loop_read()
                if not client.has_more or client.read_bytes >= until:
                    break
            if client.has_more:
                self._loop.call_soon(self._continue_reading)
        except (OSError, ValueError, IndexError, struct.error) as error:  # the last two: malformed packets
            self._lose(UNREADABLE if self._client.is_unreadable else str(error))
        self.write()

    def _continue_reading(self) -> None:
        if self._client.has_more and self._client.socket():
            self.read()

    def write(self) -> None:
        """Write queued data; watch the socket only for what it does not accept now."""
        if self._wants_to_write:
            try:
                self._client.loop_write()
            except (OSError, ValueError) as error:
                self._lose(str(error))
        self._watch()

    def _watch(self) -> None:
        """Watch for room to write, if data wait for it or if reading waits for it."""
        sock = self._client.socket()
        if not sock:
            return
        crossed = self._client.read_waits_for_room
        waits = crossed or (self._wants_to_write and not self._client.write_waits_for_bytes)
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
        if self._client.read_waits_for_room:
            self.begin_reading()
            self.read()
        else:
            self.write()

    def _on_open(self, _client: object, _data: object, sock: Any) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._traffic.track(sock)

    def begin_reading(self) -> None:
        """Read from now on, unless the socket was closed meanwhile."""
        sock = self._client.socket()
        if sock and sock.fileno() >= 0 and not self._reads:
            self._loop.add_reader(sock.fileno(), self.read)
            self._reads = True

    def _on_close(self, _client: object, _data: object, sock: Any) -> None:
        """Stop watching a socket; a number that was never watched may belong to another socket by now."""
        if sock.fileno() >= 0 and self._reads:
            self._loop.remove_reader(sock.fileno())
        if sock.fileno() >= 0 and self.waits_to_write:
            self._loop.remove_writer(sock.fileno())
        self._reads = self.waits_to_write = False

    def _set_wants_to_write(self, wants: bool) -> None:  # noqa: FBT001 - the only argument
        self._wants_to_write = wants
