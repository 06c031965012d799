"""Repeat announcements and requests that broker or server may have lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Message
from shared.runtime import backports
from shared.transport.base import Transport

ASK_S, MOST_ASK_S = 5.0, 60.0
"""Seconds without an answer before a request is repeated: at first, and at most."""
ANNOUNCE_S, RETRY_S = 60.0, 2.0
"""Pause between announcements without changes, since a broker without a disk forgets retained messages; and after an
unreachable broker."""

Answer = TypeVar("Answer")


async def announce(
    transport: Transport, name: str, changed: asyncio.Event, current: Callable[[], Awaitable[Message]]
) -> None:
    """Publish the board's status, retained, on every change and periodically, until cancelled.

    Args:
        changed: Set on every change.
        current: Builds the message to publish.
    """
    while True:
        changed.clear()
        message, pause_s = wire.encode(await current()), ANNOUNCE_S
        try:
            await transport.publish(name, message, retain=True)
        except Unreachable:
            pause_s = RETRY_S
        with suppress(TimeoutError):
            async with backports.timeout(pause_s):
                await changed.wait()


async def ask(
    request: Callable[[], Awaitable[None]], answered: asyncio.Event, answer: Callable[[], Answer | None]
) -> Answer:
    """Repeat a request, with growing pauses, until there is an answer; return it.

    Args:
        request: Sends the request; it may raise Unreachable.
        answered: Set on every message received.
        answer: Returns the answer, or None if it has not arrived yet.
    """
    pause_s = ASK_S
    while True:
        answered.clear()
        with suppress(Unreachable):
            await request()
        with suppress(TimeoutError):
            async with backports.timeout(pause_s):
                while (reply := answer()) is None:
                    await answered.wait()
                    answered.clear()
                return reply
        pause_s = min(2 * pause_s, MOST_ASK_S)
