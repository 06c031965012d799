"""Tell systemd how this process is: its work has begun, its event loop still turns, it stops.

Datagrams to the socket that NOTIFY_SOCKET names, after sd_notify(3) and sd_watchdog_enabled(3). A loop that hangs no
longer pings: systemd ends the process and starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.runtime.executor import background

log = logging.getLogger(__name__)

READY, ALIVE, STOPPING = b"READY=1", b"WATCHDOG=1", b"STOPPING=1"
MICRO = 1e-6


@dataclass(frozen=True)
class Supervisor:
    """What started this process and watches it.

    Attributes:
        address: Of its socket; a leading zero byte is that of an abstract one. Empty where nobody listens.
        watchdog_s: Seconds without a ping after which it ends this process; 0 for never.
    """

    address: str = ""
    watchdog_s: float = 0.0

    def tell(self, state: bytes) -> None:
        """Send a state; one that cannot be sent is logged, since nobody else would know why the watchdog bites."""
        if not self.address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out:
            try:
                out.sendto(state, self.address)
            except OSError as error:
                log.warning("systemd is not told %s: %s", state.decode(), error.strerror)

    async def ping(self) -> None:
        """Say twice in the time of the watchdog that this event loop turns, until cancelled."""
        while self.watchdog_s:
            self.tell(ALIVE)
            await asyncio.sleep(self.watchdog_s / 2)


def find_supervisor(environment: MutableMapping[str, str] = os.environ) -> Supervisor:
    """Return who wants to be told, and take it out of the environment: no child of ours speaks for us."""
    address = environment.pop("NOTIFY_SOCKET", "")
    span, owner = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return Supervisor()
    watchdog_s = int(span) * MICRO if span.isdecimal() and owner in ("", str(os.getpid())) else 0.0
    return Supervisor("\0" + address[1:] if address[0] == "@" else address, watchdog_s)


@asynccontextmanager
async def supervised(supervisor: Supervisor | None = None) -> AsyncIterator[None]:
    """Tell who started this process, if it wants to know, that the block has begun, goes on, and ends.

    Args:
        supervisor: Who wants to know; None for what the environment says.
    """
    to = supervisor or find_supervisor()
    to.tell(READY)
    async with background(to.ping()):
        try:
            yield
        finally:
            to.tell(STOPPING)
