"""A look at a site's broker: hears what it has retained of the devices, as a client of no name that says nothing."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from edge_server.fleet.state import Fleet, observe
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Report, Status
from shared.protocol.topics import ANY, device_of, is_name, topic
from shared.runtime.clock import utc_seconds
from shared.runtime.tasks import background
from shared.transport.base import Broker, Inbox
from shared.transport.mqtt import MqttTransport

log = logging.getLogger(__name__)

CONNECT_S = 5.0
QUIET_S, LISTEN_S = 0.3, 5.0
"""All that was retained has come after this long without anything, or after this long."""


@dataclass
class Look:
    """What was heard of a site's devices.

    Attributes:
        heard_now: Calendar seconds of the reports that were made while we listened.
    """

    fleet: Fleet = field(default_factory=Fleet)
    heard_now: dict[str, float] = field(default_factory=dict)
    is_settled: bool = False

    def take(self, name: str, data: bytes) -> None:
        """Take what came on a topic; what cannot be used is for the server to report."""
        device = device_of(name)
        if not is_name(device) or not data:
            return
        try:
            message = wire.decode(data)
        except WireError as error:
            log.debug("%s: %s", name, error)
            return
        if not isinstance(message, Status | Report) or message.device != device:
            return
        before, self.fleet = self.fleet, observe(self.fleet, message)
        if isinstance(message, Report) and self.fleet is not before:
            self.heard_now.pop(device, None)
            if self.is_settled:
                self.heard_now[device] = utc_seconds()


@asynccontextmanager
async def looking(broker: Broker, site: str) -> AsyncIterator[Look]:
    """Listen while the block lasts; it begins when what the broker has retained is there.

    Raises:
        Unreachable: There is no broker.
    """
    quiet = msgspec.structs.replace(broker, session_expiry_s=0)
    transport, look = MqttTransport(quiet, f"{site}.look.{uuid.uuid4().hex[:12]}"), Look()
    async with transport.running():
        try:
            async with asyncio.timeout(CONNECT_S):
                await transport.connected.wait()
        except TimeoutError:
            raise Unreachable(f"no broker answers at {broker.host}:{broker.port}") from None
        patterns = (topic(site, ANY, channel) for channel in ("status", "report"))
        async with transport.subscribe(*patterns) as inbox:
            await _catch_up(look, inbox)
            async with background(_hear(look, inbox)):
                yield look


async def _catch_up(look: Look, inbox: Inbox) -> None:
    try:
        async with asyncio.timeout(LISTEN_S):
            while True:
                async with asyncio.timeout(QUIET_S):
                    look.take(*await anext(inbox))
    except TimeoutError:
        look.is_settled = True


async def _hear(look: Look, inbox: Inbox) -> None:
    async for name, data in inbox:
        look.take(name, data)
