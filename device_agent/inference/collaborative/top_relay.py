"""Agent's end of the socket pair: forward requests for upper halves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

import msgspec

from device_agent.inference.collaborative.interface import AskTop, Half, TopReply
from device_agent.inference.collaborative.pipe import relay
from shared.errors import Unreachable

log = logging.getLogger(__name__)


class TopRelay:
    """Requests of the process to the server's client.

    Attributes:
        ask: Client for upper halves on the server; None while there is no connection.
    """

    def __init__(self) -> None:
        self.ask: AskTop | None = None

    async def run(self, agent_socket: socket.socket) -> None:
        """Relay upper-half requests of the process to the server until it closes."""
        try:
            await relay(*await asyncio.open_connection(sock=agent_socket), self._ask)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("relay of upper halves failed: %s", error)

    async def _ask(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> TopReply:
        if self.ask is None:
            raise Unreachable("there is no connection to the site's broker yet")
        return await self.ask(half, parts, deadline_s)
