"""Group commit: items that arrive during a write share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupCommit(Generic[T]):
    """Writes items in batches, one at a time, so that the number of disk waits does not grow with their rate.

    Args:
        write: Writes a batch; the items themselves carry any results.
    """

    def __init__(self, write: Callable[[list[T]], Awaitable[None]]) -> None:
        self._write = write
        self._batch: list[T] = []
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def add(self, item: T) -> None:
        """Return when the item's batch is written, or raise its error. Cancelling the call does not stop the write."""
        if self._writing is None:
            self._batch = []
            self._writing = asyncio.create_task(self._write_next(self._batch), name="group commit")
        self._batch.append(item)
        await asyncio.shield(self._writing)

    async def _write_next(self, batch: list[T]) -> None:
        async with self._lock:
            self._writing = None  # later items belong to the next batch
            await self._write(batch)
