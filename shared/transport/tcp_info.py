"""TCP counters of the kernel (`tcp_info`): bytes of our connection, round trips, and the time it was busy.

Linux's `struct tcp_info` only grows at its end (include/uapi/linux/tcp.h): a shorter answer is an older kernel, and
what it does not hold is not known. Kernel 4.9 has all of it but `tcpi_busy_time`.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from shared.runtime.clock import Clock, monotonic

ASKED_BYTES = 256
LEAST_BYTES = 128
"""Less than this is no message with a payload that matters: an acknowledgement, or the answer to a ping."""

_UNACKED, _LAST_SENT_MS, _LAST_CAME_MS, _RTT_US = 24, 44, 52, 68
_ACKED, _RECEIVED, _UNSENT, _MIN_RTT_US, _BUSY_US = 120, 128, 144, 148, 168
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_OLDEST_BYTES, _BUSY_BYTES = _MIN_RTT_US + 4, _BUSY_US + 8


@dataclass(frozen=True)
class Counts:
    """What was counted of one connection until now.

    Attributes:
        connection: Which one; counters of different ones have nothing in common.
        address: This end's IP address: another one is another way to the broker.
        at: When it was counted.
        acked_bytes: Bytes sent that the other end has.
        received_bytes: Bytes that came.
        busy_s: Seconds in which some were under way; None on a kernel before 4.10.
        quiet_s: Seconds that nothing has been sent, beyond the round trip of the last of it.
        is_idle: Whether nothing is under way.
        min_rtt_s: Round trip of the empty link.
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
        info: Bytes that the kernel gave.
        connection: Which connection they are of.
        address: This end's IP address.
        at: Monotonic seconds when they were read.
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
    """The socket of the connection there is now, and what arrived on all there were.

    What arrives is timed from the first bytes of a message to its last: its sender has handed it over whole, so that in
    between only the link made us wait. While a sender takes its time, or waits for others, nothing is counted.

    Attributes:
        watched: Whether arrivals are timed; the server does without.
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

    def opened(self, sock: socket.socket) -> None:
        """Count from now on what passes this socket."""
        self._socket, self._since = sock, None
        self._before = came[1] if (came := self._came()) else 0  # a handshake's
        self._connection += 1

    def begins(self, *, anew: bool = False) -> None:
        """Note that there is something to read: the first bytes of a message, or more of it.

        Args:
            anew: Whether whatever came before has come to its end; what was noted for it began no message.
        """
        if not self.watched or (not anew and self._since and self._since[1] - self._before >= LEAST_BYTES):
            return
        if came := self._came():
            self._since = came

    def ended(self) -> None:
        """Note that a message has come to its end."""
        if not self._since or not (came := self._came()):
            return
        self.arriving_s += max(0.0, came[0] - self._since[0])
        self.arrived_bytes += came[1] - self._since[1]
        self._since, self._before = None, came[1]

    def counts(self) -> Counts | None:
        """Return what the kernel counted of the connection so far; None where there is none, or it does not say."""
        info = self._info()
        if not info or not self._socket:
            return None
        try:
            address = str(self._socket.getsockname()[0])
        except OSError:
            return None
        return parse_tcp_info(info, self._connection, address, self.clock())

    def _came(self) -> tuple[float, int] | None:
        """Return when the last bytes came, however late we look, and how many came so far."""
        info = self._info()
        if len(info) < _OLDEST_BYTES:
            return None
        return self.clock() - _U32.unpack_from(info, _LAST_CAME_MS)[0] / 1e3, _U64.unpack_from(info, _RECEIVED)[0]

    def _info(self) -> bytes:
        if not self._socket:
            return b""
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ASKED_BYTES)
        except (OSError, AttributeError):  # closed, or a system other than Linux
            return b""
