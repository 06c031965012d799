"""Run blocking work on a thread, or inline in replays; background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping
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
    """Run on a thread: hashing, file writes and torch release the GIL, so the loop stays responsive."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def inline(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run on the event loop, in no virtual time."""
    return function(*args, **kwargs)


@dataclass(frozen=True)
class Effect(Generic[P, R]):
    """A named calculation, whose time a replay charges by the name."""

    cost: str
    function: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calculate it."""
        return self.function(*args, **kwargs)


def build_charging_worker(costs: Mapping[str, Callable[..., float]]) -> Worker:
    """Return a worker that runs inline, then sleeps for the effect's virtual cost.

    Args:
        costs: Seconds by effect name, as a function of the effect's arguments; other work takes no time.
    """

    async def run(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        cost: Callable[..., float] | None = costs.get(function.cost) if isinstance(function, Effect) else None
        if cost:
            await asyncio.sleep(cost(*args, **kwargs))
        return result

    return run


class BackgroundTasks:
    """Tasks beside the caller, at most one for each key."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tasks

    def start(self, work: Coroutine[Any, Any, None], name: str, key: Hashable | None = None) -> None:
        """Start a task; without a key there may be any number of them."""
        key = object() if key is None else key
        self._tasks[key] = task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def wait(self) -> None:
        """Wait for the tasks in flight; their errors are ignored."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Cancel the tasks in flight."""
        for task in self._tasks.values():
            task.cancel()
        await self.wait()


async def run_uninterrupted(work: Awaitable[R]) -> R:
    """Await work; if cancelled, only after it has finished, because its tensors must not be used meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@asynccontextmanager
async def background(*routines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block and cancel them after it; a failing one ends the block.

    A single error is raised as itself, not in a group, whether from the block or a coroutine.
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
            raise error from error.__cause__  # "from None" would drop its cause
        raise
