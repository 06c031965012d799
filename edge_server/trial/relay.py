"""TCP relay on loopback that emulates a link's rate and delay.

It needs no privileges, and both ends run unmodified: they see a slow connection whose bytes are acknowledged only when
the link has taken them, except for the few in its buffers. Losses are not emulated, since TCP hides them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.runtime.clock import monotonic
from shared.runtime.executor import background
from shared.transport.simulated_link import Direction, Flow, Rate

log = logging.getLogger(__name__)

LOOPBACK, WAITING = "127.0.0.1", 16
CHUNK_S, SEGMENT_BYTES, MOST_CHUNK_BYTES = 0.005, 1448, 1 << 16
"""Size of a chunk, in seconds of the rate, and its limits. With loopback's own segments of 64 KiB, a window as small as
this relay's would stall.
"""
MOST_UNDER_WAY = 4096
"""Chunks in flight."""
BURST_S = 0.02
"""Burst that an idle link accepts, in seconds of its rate, to make up for late wake-ups of the event loop."""


class _Direction:
    """One direction of the link, shared by all connections."""

    def __init__(self, bits_per_second: float | Flow | None, delay_s: float) -> None:
        self.way, self.delay_s = Direction(lambda: monotonic() - BURST_S, bits_per_second, 0.0), delay_s
        passed = CHUNK_S * bits_per_second / 8 if isinstance(bits_per_second, float | int) else MOST_CHUNK_BYTES
        self.chunk_bytes = int(min(MOST_CHUNK_BYTES, max(SEGMENT_BYTES, passed)))

    def socket(self) -> socket.socket:
        """Return a socket with a small receive buffer, so that senders wait for the link."""
        new_socket = socket.socket()
        new_socket.setblocking(False)
        new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * self.chunk_bytes)
        new_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        return new_socket


@asynccontextmanager
async def run_relay(port: int, rate: Rate) -> AsyncIterator[int]:
    """Relay connections to a loopback port while the block lasts; yield the port of the relay.

    Args:
        rate: Of the link; up is towards `port`. Losses are ignored.
    """
    up, down = _Direction(rate.up_bits_per_second, rate.delay_s), _Direction(rate.down_bits_per_second, rate.delay_s)
    with up.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(WAITING)
        async with background(_accept(listener, port, up, down)):
            yield listener.getsockname()[1]


async def _accept(listener: socket.socket, port: int, up: _Direction, down: _Direction) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as connections:
        while True:
            client, _ = await loop.sock_accept(listener)
            connections.create_task(_serve(client, port, up, down))


async def _serve(client: socket.socket, port: int, up: _Direction, down: _Direction) -> None:
    with client, down.socket() as far:
        for end in (client, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(far, (LOOPBACK, port))
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_pass(client, far, up))
                directions.create_task(_pass(far, client, down))
        except* OSError as errors:
            log.debug("relay to port %d: %s", port, errors.exceptions)


async def _pass(source: socket.socket, target: socket.socket, direction: _Direction) -> None:
    """Pass bytes in one direction until they end, then shut down the other end's input."""
    air, loop = asyncio.Queue[tuple[float, bytes]](MOST_UNDER_WAY), asyncio.get_running_loop()

    async def arrive() -> None:
        while True:
            moment, data = await air.get()
            await _until(moment)
            if not data:
                return
            await loop.sock_sendall(target, data)

    async with asyncio.TaskGroup() as group:
        group.create_task(arrive())
        data = b"begun"
        while data:
            data = await loop.sock_recv(source, direction.chunk_bytes)
            departure_s, _ = direction.way.enter(len(data))
            await air.put((max(departure_s, monotonic()) + direction.delay_s, data))
            await _until(departure_s)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


async def _until(moment: float) -> None:
    if (wait_s := moment - monotonic()) > 0:
        await asyncio.sleep(wait_s)
