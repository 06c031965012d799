"""Read retained device status with an anonymous, read-only MQTT client."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from edge_server.fleet.state import Fleet
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.clip import clip_releases
from shared.protocol.inference.rollout import ModelStatus, Releases
from shared.protocol.messages import Report, Status
from shared.protocol.topics import ANY, is_name, parse_device, topic
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import background
from shared.transport.base import Broker, Inbox
from shared.transport.mqtt import MqttTransport

log = logging.getLogger(__name__)

CONNECT_S = 5.0
QUIET_S, LISTEN_S = 0.3, 5.0
"""Seconds without a message after which all retained ones have arrived, and most seconds to wait."""


@dataclass
class RetainedView:
    """Device state as retained by a site's broker.

    Attributes:
        heard_now: Calendar seconds of reports that arrived while listening.
        models: Status of the models that each device serves.
        is_settled: Whether all retained messages have arrived.
    """

    fleet: Fleet = field(default_factory=Fleet)
    heard_now: dict[str, float] = field(default_factory=dict)
    models: dict[str, tuple[ModelStatus, ...]] = field(default_factory=dict)
    is_settled: bool = False

    def take(self, name: str, data: bytes) -> None:
        """Handle a message; unusable ones are ignored, since the server reports them."""
        device = parse_device(name)
        if not is_name(device) or not data:
            return
        try:
            message = wire.decode(data)
        except WireError as error:
            log.debug("%s: %s", name, error)
            return
        if not isinstance(message, Status | Report | Releases) or message.device != device:
            return
        if isinstance(message, Releases):
            self.models[device] = clip_releases(message).models
            return
        if self.fleet.observe(message) and isinstance(message, Report):
            self.heard_now.pop(device, None)
            if self.is_settled:
                self.heard_now[device] = utc_seconds()


@asynccontextmanager
async def connect_anonymously(broker: Broker, site: str) -> AsyncIterator[MqttTransport]:
    """Connect under a random client id during the block.

    Raises:
        Unreachable: There is no broker.
    """
    quiet = msgspec.structs.replace(broker, session_expiry_s=0)
    transport = MqttTransport(quiet, f"{site}.look.{uuid.uuid4().hex[:12]}")
    async with transport.running():
        try:
            async with asyncio.timeout(CONNECT_S):
                await transport.connected.wait()
        except TimeoutError:
            raise Unreachable(f"no broker answers at {broker.host}:{broker.port}") from None
        yield transport


async def read_retained(inbox: Inbox, take: Callable[[str, bytes], None]) -> None:
    """Handle the retained messages of a new subscription."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S):
            while True:
                async with asyncio.timeout(QUIET_S):
                    take(*await anext(inbox))


@asynccontextmanager
async def watch_site(broker: Broker, site: str) -> AsyncIterator[RetainedView]:
    """Follow a site's devices during the block, which begins after the retained messages have arrived.

    Raises:
        Unreachable: There is no broker.
    """
    look = RetainedView()
    async with connect_anonymously(broker, site) as transport:
        patterns = (topic(site, ANY, channel) for channel in ("status", "report", "release"))
        async with transport.subscribe(*patterns) as inbox:
            await read_retained(inbox, look.take)
            look.is_settled = True
            async with background(_follow(look, inbox)):
                yield look


async def _follow(look: RetainedView, inbox: Inbox) -> None:
    async for name, data in inbox:
        look.take(name, data)
