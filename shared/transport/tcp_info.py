"""Kernel counters of a TCP connection (`tcp_info`): bytes, round trips, busy time.

Linux's `struct tcp_info` only grows at its end (include/uapi/linux/tcp.h): a shorter result is of an older kernel, and
its missing counters are unknown. Kernel 4.9 has all but `tcpi_busy_time`.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from shared.runtime.clock import Clock, monotonic

BUFFER_BYTES = 256
LEAST_BYTES = 128
"""Smaller packets carry no payload that matters: an acknowledgement, or the answer to a ping."""

_UNACKED, _LAST_SENT_MS, _LAST_CAME_MS, _RTT_US = 24, 44, 52, 68
_ACKED, _RECEIVED, _UNSENT, _MIN_RTT_US, _BUSY_US = 120, 128, 144, 148, 168
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_OLDEST_BYTES, _BUSY_BYTES = _MIN_RTT_US + 4, _BUSY_US + 8


@dataclass(frozen=True)
class Counts:
    """Counters of one connection.

    Attributes:
        connection: Connection number; counters of different connections are unrelated.
        address: Local IP address: it changes with the route to the broker.
        at: Monotonic seconds of the measurement.
        acked_bytes: Bytes sent and acknowledged.
        received_bytes: Bytes received on this connection.
        busy_s: Seconds in which bytes were in flight; None on a kernel before 4.10.
        quiet_s: Seconds since the last bytes were sent, beyond their round trip.
        is_idle: Whether nothing is in flight.
        min_rtt_s: Round trip of the idle link.
    """

    connection: int
    address: str
    at: float
    acked_bytes: int
    received_bytes: int
    busy_s: float | None
    quiet_s: float
    is_idle: bool
    rtt_s: float
    min_rtt_s: float


def parse_tcp_info(info: bytes, connection: int, address: str, at: float) -> Counts | None:
    """Parse a `struct tcp_info`; None where the kernel is too old for it.

    Args:
        info: Bytes returned by `getsockopt`; the other arguments become fields of the result.
    """
    if len(info) < _OLDEST_BYTES:
        return None
    unacked, last_sent_ms, rtt_us, unsent, min_rtt_us = (
        _U32.unpack_from(info, offset)[0] for offset in (_UNACKED, _LAST_SENT_MS, _RTT_US, _UNSENT, _MIN_RTT_US)
    )
    return Counts(
        connection=connection,
        address=address,
        at=at,
        acked_bytes=_U64.unpack_from(info, _ACKED)[0],
        received_bytes=_U64.unpack_from(info, _RECEIVED)[0],
        busy_s=_U64.unpack_from(info, _BUSY_US)[0] / 1e6 if len(info) >= _BUSY_BYTES else None,
        quiet_s=max(0.0, last_sent_ms / 1e3 - rtt_us / 1e6),
        is_idle=not unacked and not unsent,
        rtt_s=rtt_us / 1e6,
        min_rtt_s=min(min_rtt_us, rtt_us) / 1e6,
    )


@dataclass
class Traffic:
    """Current socket, and arrival statistics of all connections.

    Arrivals are timed from the first bytes of a message to its last: its sender has handed it over whole, so in between
    only the link was slow. While a sender takes its time, or waits for others, nothing is counted.

    Attributes:
        watched: Whether arrivals are timed; not on the server.
        arrived_bytes: Bytes that arrived in `arriving_s`: those after the first of each message.
        arriving_s: Seconds in which messages arrived.
    """

    clock: Clock = monotonic
    watched: bool = False
    arrived_bytes: int = 0
    arriving_s: float = 0.0
    _socket: socket.socket | None = None
    _connection: int = 0
    _since: tuple[float, int] | None = None
    _before: int = 0

    def track(self, sock: socket.socket) -> None:
        """Count the traffic of this socket from now on."""
        self._socket, self._since = sock, None
        self._before = arrival[1] if (arrival := self._last_arrival()) else 0  # bytes of a handshake
        self._connection += 1

    def begins(self, *, anew: bool = False) -> None:
        """Note that data are readable: the first bytes of a message, or more of it.

        Args:
            anew: Whether the previous message is complete; data noted for it began no message.
        """
        if not self.watched or (not anew and self._since and self._since[1] - self._before >= LEAST_BYTES):
            return
        if arrival := self._last_arrival():
            self._since = arrival

    def end_message(self) -> None:
        """Note that a message is complete."""
        if not self._since or not (arrival := self._last_arrival()):
            return
        self.arriving_s += max(0.0, arrival[0] - self._since[0])
        self.arrived_bytes += arrival[1] - self._since[1]
        self._since, self._before = None, arrival[1]

    def counts(self) -> Counts | None:
        """Read the kernel's counters of the connection; None where there is none, or the kernel has no counters."""
        info = self._info()
        if not info or not self._socket:
            return None
        try:
            address = str(self._socket.getsockname()[0])
        except OSError:
            return None
        return parse_tcp_info(info, self._connection, address, self.clock())

    def _last_arrival(self) -> tuple[float, int] | None:
        """Return the time of the last received bytes, and their count so far."""
        info = self._info()
        if len(info) < _OLDEST_BYTES:
            return None
        return self.clock() - _U32.unpack_from(info, _LAST_CAME_MS)[0] / 1e3, _U64.unpack_from(info, _RECEIVED)[0]

    def _info(self) -> bytes:
        if not self._socket:
            return b""
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BUFFER_BYTES)
        except (OSError, AttributeError):  # closed, or a system other than Linux
            return b""
