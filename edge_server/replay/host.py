"""Process that a replay runs in."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Watch(Protocol):
    """Wrapper of a coroutine, such as one that can be cancelled from outside."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Coroutine[Any, Any, T]:
        """Return a coroutine that awaits `work` and returns its result."""
        ...


async def run_unwatched(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine."""
    return await work


@dataclass(frozen=True)
class Host:
    """Process that a replay runs in.

    Attributes:
        is_owned: Whether the replay may tune the process's memory allocator, which nothing can undo.
        watch: Wraps the replay's main coroutine.
    """

    is_owned: bool = True
    watch: Watch = run_unwatched
