"""systemd notifications (sd_notify): ready, watchdog pings, stopping.

Datagrams to the socket in NOTIFY_SOCKET, see sd_notify(3) and sd_watchdog_enabled(3). A blocked event loop stops
pinging, so systemd restarts the process.
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
    """Notification socket of the service manager that started this process.

    Attributes:
        address: Socket address; a leading zero byte marks an abstract one. Empty where there is no manager.
        watchdog_s: Seconds without a ping after which the process is killed; 0 for never.
    """

    address: str = ""
    watchdog_s: float = 0.0

    def tell(self, state: bytes) -> None:
        """Send a state; a failure is logged, since it explains a later kill by the watchdog."""
        if not self.address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out:
            try:
                out.sendto(state, self.address)
            except OSError as error:
                log.warning("cannot notify systemd of %s: %s", state.decode(), error.strerror)

    async def ping(self) -> None:
        """Ping twice per watchdog period, until cancelled."""
        while self.watchdog_s:
            self.tell(ALIVE)
            await asyncio.sleep(self.watchdog_s / 2)


def find_supervisor(environment: MutableMapping[str, str] = os.environ) -> Supervisor:
    """Read the supervisor from the environment and remove it there, so that child processes do not notify it."""
    address = environment.pop("NOTIFY_SOCKET", "")
    span, owner = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return Supervisor()
    watchdog_s = int(span) * MICRO if span.isdecimal() and owner in ("", str(os.getpid())) else 0.0
    return Supervisor("\0" + address[1:] if address[0] == "@" else address, watchdog_s)


@asynccontextmanager
async def notify_supervisor(supervisor: Supervisor | None = None) -> AsyncIterator[None]:
    """Notify the supervisor, if any, that the block has begun, is alive, and ends.

    Args:
        supervisor: None for the one in the environment.
    """
    to = supervisor or find_supervisor()
    to.tell(READY)
    async with background(to.ping()):
        try:
            yield
        finally:
            to.tell(STOPPING)
