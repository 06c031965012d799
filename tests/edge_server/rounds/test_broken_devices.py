"""A device whose operator must edit something is asked no more until it is born anew, and is named."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.journal.records import AnyRecord, LeftOut, RoundOpened, RunClosed, closed_rounds
from edge_server.trial.tables import failure_lines, rounds_table
from shared.protocol.messages import Status
from shared.runtime.executor import background
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import Puppet, Site, moved, site, update_for
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time

CAUSE = "ConfigError: data: 9 classes, and the model has 10: correct agent.toml"


async def serve(here: Site, puppet: Puppet, cause: str = "") -> None:
    """Do every task, or fail every one."""
    while True:
        task = await puppet.task()
        if cause:
            await puppet.offer(update_for(task, b"", params=None, failure=cause))
        else:
            await asyncio.sleep(1)
            await puppet.answer(task, moved(here.plan, 0.5))


def asked(records: list[AnyRecord]) -> list[list[str]]:
    return [sorted(one.assignments) for one in records if isinstance(one, RoundOpened)]


async def test_a_device_that_cannot_do_its_tasks_is_asked_once_and_named(tmp_path):
    """It was asked again every round, and stood nowhere; its operator mends it, starts it anew, and it takes part."""
    async with site(tmp_path, rounds=6) as here:
        good, bad = await here.device("good"), await here.device("bad")
        async with background(serve(here, good)):
            async with background(serve(here, bad, CAUSE)):
                await asyncio.sleep(3.5)
            await bad.status(online=True, session=2)  # it only connects again
            await asyncio.sleep(1)
            await bad.say(Status(device="bad", session=3, instance="anew", online=True), "status")
            async with background(serve(here, bad)):
                await here.ended()
        records = here.store.records()
    assert asked(records) == [["bad", "good"], ["good"], ["good"], ["good"], ["good"], ["bad", "good"]]
    [left_out] = [one for one in records if isinstance(one, LeftOut)]
    assert (left_out.device, left_out.round, left_out.cause) == ("bad", 1, CAUSE)
    [line] = failure_lines(records)
    assert names_all(line, "bad", 1, CAUSE)
    rows = rounds_table(records).rows
    assert [row[2] for row in rows] == ["bad", "-", "-", "-", "-", "-"]
    over = (*closed_rounds(records)[5:], *(one for one in records if isinstance(one, RunClosed)))
    until_then = [one for one in records if one not in over]
    [advice] = failure_lines(until_then)
    assert advice.startswith(line)
    assert len(advice) > len(line), "while the run goes on it says what helps"


async def test_a_restarted_server_remembers_whom_to_ask_no_more(tmp_path):
    """By its journal: the same process of the device is as unable as before."""
    broker = MemoryTransport()
    async with site(tmp_path, broker, rounds=3) as here:
        good, bad = await here.device("good"), await here.device("bad")
        async with background(serve(here, good), serve(here, bad, CAUSE)):
            await asyncio.sleep(1.5)
    async with site(tmp_path, broker, rounds=3) as here:
        good, bad = await here.device("good"), await here.device("bad")
        async with background(serve(here, good), serve(here, bad, CAUSE)):
            await here.ended()
        records = here.store.records()
    assert asked(records)[0] == ["bad", "good"]
    assert all(devices == ["good"] for devices in asked(records)[1:])


async def test_a_round_waits_for_a_device_that_can(tmp_path):
    """Where all that are there cannot, none is burned: one that comes is taken at once."""
    async with site(tmp_path, rounds=2, cohort="min_devices = 1\nwait_s = 50.0") as here:
        async with background(serve(here, await here.device("bad"), CAUSE)):
            await asyncio.sleep(20)
            async with background(serve(here, await here.device("good"))):
                await here.ended()
        records = here.store.records()
    assert [one.arrived for one in closed_rounds(records)] == [("good",), ("good",)]
    assert asked(records) == [["bad"], ["good"], ["good"]]
