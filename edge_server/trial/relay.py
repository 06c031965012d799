"""A relay on loopback that passes the bytes of TCP connections at a link's rate, and as late as it delivers them.

It needs no rights, and the processes at both ends stay what they are: they see a slow connection, whose bytes are not
acknowledged before the link has taken them, but for the few that its buffers hold. Nothing is lost, as to TCP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.runtime.clock import monotonic
from shared.runtime.executor import background
from shared.transport.simulated_link import Flow, Rate, Way

log = logging.getLogger(__name__)

LOOPBACK, WAITING = "127.0.0.1", 16
CHUNK_S, SEGMENT_BYTES, MOST_CHUNK_BYTES = 0.005, 1448, 1 << 16
"""What passes at once, in seconds of the rate; a segment at the least, since with loopback's own of 64 KiB a window as
small as this relay's would stall."""
MOST_UNDER_WAY = 4096
"""Chunks in the air."""
BURST_S = 0.02
"""What a link that was idle takes at once, in seconds of its rate, so that a loop which wakes late loses none of it."""


class _Direction:
    """One way of the link, which all its connections share."""

    def __init__(self, bits_per_second: float | Flow | None, delay_s: float) -> None:
        self.way, self.delay_s = Way(lambda: monotonic() - BURST_S, bits_per_second, 0.0), delay_s
        passed = CHUNK_S * bits_per_second / 8 if isinstance(bits_per_second, float | int) else MOST_CHUNK_BYTES
        self.chunk_bytes = int(min(MOST_CHUNK_BYTES, max(SEGMENT_BYTES, passed)))

    def socket(self) -> socket.socket:
        """Return a socket that holds few bytes on their way in, so that a sender waits for the link."""
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * self.chunk_bytes)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        return made


@asynccontextmanager
async def relaying(port: int, rate: Rate) -> AsyncIterator[int]:
    """Relay connections to a port of loopback while the block lasts; yield the port at which to reach it.

    Args:
        rate: Of the link; up is towards that port. Its losses are left out.
    """
    up, down = _Direction(rate.up_bits_per_second, rate.delay_s), _Direction(rate.down_bits_per_second, rate.delay_s)
    with up.socket() as here:
        here.bind((LOOPBACK, 0))
        here.listen(WAITING)
        async with background(_accept(here, port, up, down)):
            yield here.getsockname()[1]


async def _accept(here: socket.socket, port: int, up: _Direction, down: _Direction) -> None:
    """Serve connections for ever."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as connections:
        while True:
            near, _ = await loop.sock_accept(here)
            connections.create_task(_serve(near, port, up, down))


async def _serve(near: socket.socket, port: int, up: _Direction, down: _Direction) -> None:
    """Pass the bytes of a connection both ways, until either end closes it."""
    with near, down.socket() as far:
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(far, (LOOPBACK, port))
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass(near, far, up))
                both.create_task(_pass(far, near, down))
        except* OSError as errors:
            log.debug("relay to port %d: %s", port, errors.exceptions)


async def _pass(source: socket.socket, target: socket.socket, direction: _Direction) -> None:
    """Pass bytes one way until they end; then the other end is told so."""
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
            left, _ = direction.way.enter(len(data))
            await air.put((max(left, monotonic()) + direction.delay_s, data))
            await _until(left)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


async def _until(moment: float) -> None:
    if (wait_s := moment - monotonic()) > 0:
        await asyncio.sleep(wait_s)
