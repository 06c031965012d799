"""Listeners of the inference process: loopback and a Unix socket, with limits that all connections share."""

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
"""So many of the largest size may be here together; of small ones as many as there are connections."""
SWEEP_S = 0.5


class HttpServer:
    """Takes connections, and hands their requests on.

    Attributes:
        patience_s: In which a request must have come, and an answer been taken.
        connections: Those that are open.
        reserved_bytes: Of bodies that are here, or on their way.
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
        """Begin to take connections.

        Args:
            port: Of the loopback address; 0 for none.
            socket: Path of a Unix socket, of which a dead process may have left one; empty for none.

        Raises:
            ConfigError: Another process listens there, or the path cannot be used.
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
        """Part with peers whose time is up, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.expire()

    def expire(self) -> None:
        """Part with peers whose time is up."""
        now = self.clock()
        for connection in [one for one in self.connections if one.deadline < now]:
            connection.expire()

    def close(self) -> None:
        """Listen no more."""
        for listener in self._listeners:
            with suppress(OSError):
                listener.close()

    def admit(self, connection: Connection) -> bool:
        if len(self.connections) >= MAX_CONNECTIONS:
            self._close_idlest()
        self.connections.add(connection)
        return len(self.connections) <= MAX_CONNECTIONS

    def _close_idlest(self) -> None:
        """Part with the connection that has been idle longest, if one is."""
        idle = [one for one in self.connections if one.is_idle]
        if idle:
            longest = min(idle, key=lambda one: one.deadline)
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
