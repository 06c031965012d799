"""Blocking work on a thread in the field, or inline in replay; and tasks that run while a block lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from shared.runtime import backports

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


@dataclass(frozen=True)
class Effect(Generic[P, R]):
    """A calculation with a name, by which a replay charges its time."""

    cost: str
    function: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calculate it."""
        return self.function(*args, **kwargs)


def build_charging_worker(costs: Mapping[str, Callable[..., float]]) -> Worker:
    """Return a worker that runs inline, then lets the virtual seconds pass that an effect's name costs.

    Args:
        costs: Seconds by name, as a function of the arguments that the effect is given; other work takes no time.
    """

    async def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        cost: Callable[..., float] | None = costs.get(function.cost) if isinstance(function, Effect) else None
        if cost:
            await asyncio.sleep(cost(*args, **kwargs))
        return result

    return run


async def uninterrupted(work: Awaitable[R]) -> R:
    """Wait for work; when cancelled, until it has ended: nobody else may draw or use its tensors meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@asynccontextmanager
async def background(*routines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block and cancel them after it; one that fails ends the block.

    A single error leaves as itself, not in a group, whether the block raised it or a coroutine.
    """
    try:
        async with backports.TaskGroup() as group:
            tasks = [group.create_task(routine) for routine in routines]
            yield
            for task in tasks:
                task.cancel()
    except backports.BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:
            error = errors.exceptions[0]
            raise error from error.__cause__  # "from None" would take away its own cause
        raise
