"""Where blocking work runs: on a thread in the field, inline in replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Worker(Protocol):
    """Run a blocking function without blocking the event loop."""

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...


async def in_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run on a thread: hashing, file writes and torch release the GIL, the loop keeps answering."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def inline(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run at once, in no virtual time."""
    return function(*args, **kwargs)


def costing(seconds: float) -> Worker:
    """Return a worker that runs inline, then lets `seconds` of virtual time pass."""

    async def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        await asyncio.sleep(seconds)
        return result

    return run
