"""Tasks that run while a block lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*routines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block and cancel them after it; one that fails ends the block.

    A single error leaves as itself, not in a group, whether the block raised it or a coroutine.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(routine) for routine in routines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:
            error = errors.exceptions[0]
            raise error from error.__cause__  # "from None" would take away its own cause
        raise
