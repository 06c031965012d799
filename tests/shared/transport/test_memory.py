"""What only the broker in memory can do."""

from __future__ import annotations

import pytest

from shared.transport.memory import MemoryTransport

pytestmark = pytest.mark.virtual_time


async def test_what_comes_for_a_session_that_is_away_waits_for_it():
    """In order, once, for the next subscriber of that very topic; a retained message comes first and once."""
    broker = MemoryTransport()
    await broker.publish("a/task", b"kept", retain=True)
    broker.keep("a/task")
    broker.keep("a/task")
    for number in (b"1", b"2"):
        await broker.publish("a/task", number)
    await broker.publish("b/task", b"another's")
    async with broker.subscribe("a/task") as inbox:
        await broker.publish("a/task", b"3")
        assert [delivery[1] for delivery in inbox.drain()] == [b"kept", b"1", b"2", b"3"]
    async with broker.subscribe("a/task") as inbox:
        assert [delivery[1] for delivery in inbox.drain()] == [b"kept"]
