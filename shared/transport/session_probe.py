"""Detect an MQTT session to which the broker no longer delivers.

A broker may acknowledge messages and hold them back for ever: mosquitto 2.0 keeps a message that it will not deliver in
one of the session's `max_inflight_messages` slots. Once all are occupied, QoS 1 messages wait, while the connection
stays open and pings are answered. So a client that receives nothing publishes a message to itself. If the broker
acknowledges that and does not deliver it, only a new session helps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from shared.errors import Unreachable
from shared.protocol.topics import SERVER, topic

log = logging.getLogger(__name__)

STUCK = "it acknowledges messages but delivers none: this session is stuck"
SERVER_EVERY_S = 15.0
"""Interval of servers, for which devices wait. Devices probe less often, to spare their link."""
EVERY_S, LONGEST_S = 120.0, 3600.0
PATIENCE_S, LOOK_S = 10.0, 0.5
MOST_DOUBLINGS = 32


class Deliveries(Protocol):
    """Counters of a connection's incoming messages."""

    lost: asyncio.Future[str]
    delivered: int
    confirmed: int

    @property
    def is_within(self) -> bool:
        """True if a message has arrived in part."""


@dataclass
class SessionProbe:
    """Decides when a session is probed and when it counts as stuck.

    A broker that never returns a probe may just not allow it. It gets a clean session once; after that its silence
    means nothing. Where probes have been returned before, each unanswered one doubles the pause until the next.

    Attributes:
        topic: Topic of the probe; empty for the topic of the client's own birth.
        every_s: Seconds without a delivery after which to probe.
        patience_s: Seconds that the broker has to deliver a probe, once it has acknowledged it.
    """

    topic: str = ""
    every_s: float = EVERY_S
    patience_s: float = PATIENCE_S
    _has_worked: bool = False
    _unanswered: int = 0

    @classmethod
    def of_server(cls, site: str) -> SessionProbe:
        """Return the probe of an edge server's process."""
        return cls(topic(site, SERVER, "probe"), every_s=SERVER_EVERY_S)

    async def is_stuck(self, connection: Deliveries, publish: Callable[[], Awaitable[Any]]) -> bool:
        """Wait for a delivery, the loss of the connection, or a timeout; return whether to end the session.

        Args:
            publish: Publishes a probe; returns when the broker has acknowledged it.
        """
        before = connection.confirmed
        await self._wait_for_delivery(connection, before, min(LONGEST_S, self.every_s * 2.0**self._unanswered))
        if connection.confirmed > before or connection.lost.done():
            return False
        try:
            await publish()
        except Unreachable as error:
            log.debug("the session is not probed now: %s", error)
            return False
        await self._wait_for_delivery(connection, before, self.patience_s)
        if connection.confirmed > before:
            self._has_worked, self._unanswered = True, 0
            return False
        return not connection.lost.done() and self._note_silence()

    async def _wait_for_delivery(self, connection: Deliveries, before: int, patience_s: float) -> None:
        """Wait for a QoS 1 message; the transmission time of one large message does not count."""
        loop = asyncio.get_running_loop()
        until, delivered = loop.time() + patience_s, connection.delivered
        while connection.confirmed == before and not connection.lost.done() and loop.time() < until:
            await asyncio.sleep(min(LOOK_S, patience_s))
            if connection.is_within and connection.delivered == delivered:
                until = loop.time() + patience_s
            delivered = connection.delivered

    def _note_silence(self) -> bool:
        is_first, is_second = self._unanswered == 0, self._unanswered == 1
        self._unanswered = min(self._unanswered + 1, MOST_DOUBLINGS)
        if is_second:
            log.error(
                "the broker delivers nothing to a new session either, not even what we publish to %s: look for "
                "messages that it refuses to deliver in its log, and allow us that topic in its access list",
                self.topic or "our own status",
            )
        return is_first or self._has_worked
