"""Say how a board stands, and ask for what it lacks, again and again: a broker or a server may have lost either."""

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
"""Seconds without an answer after which a board asks again for what it lacks, at first and at most."""
ANNOUNCE_S, RETRY_S = 60.0, 2.0
"""Between two announcements without news, since a broker without a disk forgets what it retained; where it is away."""

Answer = TypeVar("Answer")


async def announce(
    transport: Transport, name: str, changed: asyncio.Event, current: Callable[[], Awaitable[Message]]
) -> None:
    """Publish how a board stands, retained, whenever that changes and now and then, until cancelled.

    Args:
        transport: Way to the broker.
        changed: Is set where there is news.
        current: Returns what there is to say now.
    """
    while True:
        changed.clear()
        word, pause_s = wire.encode(await current()), ANNOUNCE_S
        try:
            await transport.publish(name, word, retain=True)
        except Unreachable:
            pause_s = RETRY_S
        with suppress(TimeoutError):
            async with backports.timeout(pause_s):
                await changed.wait()


async def ask(
    say: Callable[[], Awaitable[None]], answered: asyncio.Event, answer: Callable[[], Answer | None]
) -> Answer:
    """Ask, ever less often, until there is an answer; return it.

    Args:
        say: Asks; what is unreachable is asked again.
        answered: Is set where something came.
        answer: Returns the answer, None where what came is none.
    """
    pause_s = ASK_S
    while True:
        answered.clear()
        with suppress(Unreachable):
            await say()
        with suppress(TimeoutError):
            async with backports.timeout(pause_s):
                while (found := answer()) is None:
                    await answered.wait()
                    answered.clear()
                return found
        pause_s = min(2 * pause_s, MOST_ASK_S)
