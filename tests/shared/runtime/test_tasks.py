"""Background tasks of a block: cancellation, failure, cause of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from shared.errors import Unreachable
from shared.runtime.executor import background

T = TypeVar("T")


def run(routine: Coroutine[Any, Any, T]) -> T:
    """Run in real time; what hangs is an error."""
    return asyncio.run(asyncio.wait_for(routine, 300))


async def forever(left: list[str], name: str = "x") -> None:
    try:
        await asyncio.Event().wait()
    finally:
        left.append(name)


async def fail() -> None:
    await asyncio.sleep(0)
    raise Unreachable("away") from OSError("socket")


async def test_tasks_end_with_the_block():
    """All of them, and before the block is left."""
    left: list[str] = []
    async with background(forever(left, "a"), forever(left, "b")):
        await asyncio.sleep(0)
    assert sorted(left) == ["a", "b"]


def test_a_task_may_end_by_itself():
    async def use() -> str:
        async with background(asyncio.sleep(0)):
            await asyncio.sleep(0.01)
        return "after"

    assert run(use()) == "after"


def test_a_tasks_error_ends_the_block_as_itself_with_its_cause():
    """Not in a group, so that `except Unreachable` catches it; the cause is still told to whoever reads the log."""
    left: list[str] = []

    async def use() -> None:
        async with background(forever(left), fail()):
            await asyncio.Event().wait()

    with pytest.raises(Unreachable) as caught:
        run(use())
    assert isinstance(caught.value.__cause__, OSError)
    assert left == ["x"]


def test_the_blocks_own_error_leaves_as_itself():
    """An error of ours, and one that is no Exception at all."""
    left: list[str] = []

    async def use(error: BaseException) -> None:
        async with background(forever(left)):
            await asyncio.sleep(0)
            raise error

    for error in (Unreachable("away"), ValueError("no")):
        with pytest.raises(type(error)) as caught:
            run(use(error))
        assert caught.value is error
    assert left == ["x", "x"]


def test_two_errors_stay_a_group():
    """Neither may hide the other."""

    async def use() -> None:
        async with background(fail(), fail()):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        run(use())
    assert [type(error) for error in caught.value.exceptions] == [Unreachable, Unreachable]


async def test_cancelling_from_outside_is_no_error():
    """The tasks end, and the canceller sees a cancelled task."""
    left: list[str] = []

    async def block() -> None:
        async with background(forever(left)):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() is True
    assert left == ["x"]
