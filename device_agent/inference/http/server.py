"""HTTP listeners on loopback and a Unix socket, with shared limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from device_agent.inference.http.connection import Connection
from device_agent.inference.http.message import Request, Response
from shared.errors import ConfigError
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 64
BODIES_AT_ONCE = 4
"""Bodies of the maximum size held at once; smaller ones are limited by the number of connections."""
SWEEP_S = 0.5


class HttpServer:
    """Accepts connections and passes their requests to a handler.

    Attributes:
        patience_s: Seconds within which a request must arrive, and a response be read.
        reserved_bytes: Bytes reserved for bodies received or on their way.
    """

    def __init__(
        self,
        answer: Callable[[Request], Response | Awaitable[Response]],
        max_body_bytes: int,
        patience_s: float,
        clock: Clock,
    ) -> None:
        self.answer, self.max_body_bytes, self.patience_s, self.clock = answer, max_body_bytes, patience_s, clock
        self.connections: set[Connection] = set()
        self.reserved_bytes = 0
        self._listeners: list[asyncio.Server] = []

    async def listen(self, port: int, socket: str) -> None:
        """Start listening.

        Args:
            port: Port on the loopback address; 0 for none.
            socket: Path of a Unix socket, replaced if a dead process left one; empty for none.

        Raises:
            ConfigError: The port is taken, or the path cannot be used.
        """
        loop = asyncio.get_running_loop()
        try:
            if port:
                self._listeners.append(await loop.create_server(lambda: Connection(self), LOOPBACK, port))
        except OSError as error:
            remedy = "end what listens there, or name another one, 0 for none"
            raise ConfigError(f"serve.port = {port}: {error.strerror}; {remedy}") from error
        try:
            if socket:
                self._listeners.append(await loop.create_unix_server(lambda: Connection(self), socket))
        except OSError as error:
            raise ConfigError(f"serve.socket: {socket}: {error.strerror}; name another path") from error

    async def sweep(self) -> None:
        """Close expired connections periodically until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.expire()

    def expire(self) -> None:
        """Close connections past their deadline."""
        now = self.clock()
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            connection.expire()

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            with suppress(OSError):
                listener.close()

    def admit(self, connection: Connection) -> bool:
        if len(self.connections) >= MAX_CONNECTIONS:
            self._close_idlest()
        self.connections.add(connection)
        return len(self.connections) <= MAX_CONNECTIONS

    def _close_idlest(self) -> None:
        """Close the connection that has been idle longest, if any is idle."""
        idle = [connection for connection in self.connections if connection.is_idle]
        if idle:
            longest = min(idle, key=lambda connection: connection.deadline)
            self.connections.discard(longest)
            longest.expire()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > BODIES_AT_ONCE * self.max_body_bytes:
            return False
        self.reserved_bytes += size
        return True

    def release(self, size: int) -> None:
        self.reserved_bytes -= size
