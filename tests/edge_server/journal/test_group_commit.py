"""Items that arrive during a write share the next one; none is reported as written before it is."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.journal.group_commit import GroupCommit


async def test_items_that_arrive_during_a_write_share_the_next_one():
    written = list[list[int]]()

    async def write(batch: list[int]) -> None:
        await asyncio.sleep(0.01)
        written.append(batch)

    async def add(commit: GroupCommit[int], item: int) -> None:
        await commit.add(item)
        assert any(item in batch for batch in written)

    commit = GroupCommit(write)
    first = asyncio.create_task(add(commit, 0))
    await asyncio.sleep(0.005)
    await asyncio.gather(first, *(add(commit, item) for item in range(1, 50)))
    assert written == [[0], list(range(1, 50))]


async def test_an_error_reaches_every_item_of_its_batch_and_no_other():
    async def write(batch: list[int]) -> None:
        await asyncio.sleep(0)
        if 1 in batch:
            raise OSError("no disk")

    commit = GroupCommit(write)
    failed = await asyncio.gather(*(commit.add(item) for item in (1, 2)), return_exceptions=True)
    await commit.add(3)
    assert [str(error) for error in failed] == ["no disk", "no disk"]


async def test_a_write_is_completed_after_its_caller_is_cancelled():
    written = list[list[int]]()

    async def write(batch: list[int]) -> None:
        await asyncio.sleep(0.01)
        written.append(batch)

    commit = GroupCommit(write)
    adding = [asyncio.create_task(commit.add(item)) for item in (1, 2)]
    await asyncio.sleep(0.005)
    adding[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding[0]
    await adding[1]
    assert written == [[1, 2]]
