"""Run whose devices all refuse their tasks ends with code 1."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.cli.commands import outcome_code
from edge_server.journal.records import LeftOut, RoundOpened, RunClosed
from edge_server.journal.runs import StoredRun, outcome_of
from edge_server.trial.tables import failure_lines
from shared.runtime.executor import background
from tests.edge_server.harness import site
from tests.edge_server.rounds.test_broken_devices import CAUSE, serve
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time

NAMED = '[[device]]\nname = "a"\n[[device]]\nname = "b"'


async def test_named_devices_that_all_refuse_end_the_run_at_once(tmp_path):
    async with site(tmp_path, rounds=6, cohort="min_devices = 2", more=NAMED) as here:
        a, b = await here.device("a"), await here.device("b")
        async with background(serve(here, a, CAUSE), serve(here, b, CAUSE)):
            await here.ended()
        records = here.store.records()
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == "refused"
    assert names_all(end.cause, "a, b", CAUSE)
    assert len([one for one in records if isinstance(one, RoundOpened)]) == 1
    assert len([one for one in records if isinstance(one, LeftOut)]) == 2
    assert outcome_code(records) == 1
    assert outcome_of(StoredRun(tmp_path, list(records))) == "refused"
    [line] = failure_lines(records)  # once, and no advice after the end
    assert names_all(line, "a, b", 1)
    assert line.endswith(CAUSE)


async def test_one_that_is_still_away_is_waited_for(tmp_path):
    """It may do what the other cannot."""
    async with site(tmp_path, rounds=2, cohort="min_devices = 1\nwait_s = 5.0", more=NAMED) as here:
        async with background(serve(here, await here.device("a"), CAUSE)):
            await asyncio.sleep(8)
            async with background(serve(here, await here.device("b"))):
                await here.ended()
        records = here.store.records()
    assert [one for one in records if isinstance(one, RunClosed)] == [RunClosed(outcome="finished")]


async def test_where_the_plan_names_nobody_others_are_waited_for_once(tmp_path):
    async with site(tmp_path, rounds=2, cohort="min_devices = 1\nwait_s = 5.0") as here:
        async with background(serve(here, await here.device("bad"), CAUSE)):
            await here.ended()
        records, took_s = here.store.records(), asyncio.get_running_loop().time()
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == "refused"
    assert 5 <= took_s < 20


async def test_where_several_refuse_for_one_reason_none_is_waited_for(tmp_path):
    """The plan is to blame; only the path of the examples is another one on each device."""
    async with site(tmp_path, rounds=2, cohort="min_devices = 2\nwait_s = 50.0") as here:
        a, b = await here.device("a"), await here.device("b")
        causes = [f"ConfigError: /data/{name}.csv: model: it returns the shape 5" for name in "ab"]
        async with background(serve(here, a, causes[0]), serve(here, b, causes[1])):
            await here.ended()
        records, took_s = here.store.records(), asyncio.get_running_loop().time()
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == "refused"
    assert names_all(end.cause, "/data/a.csv", "/data/b.csv", "shape 5")
    assert took_s < 5


async def test_a_device_that_fails_and_may_do_better_is_asked_again(tmp_path):
    """An example file that is away may come back: that is no refusal."""
    async with site(tmp_path, rounds=1, cohort="min_devices = 1", more='[[device]]\nname = "a"') as here:
        device = await here.device("a")
        async with background(serve(here, device, "TaskFailed: examples.npz is not there")):
            await asyncio.sleep(20)
        async with background(serve(here, device)):
            await here.ended()
        records = here.store.records()
    assert [one for one in records if isinstance(one, RunClosed)] == [RunClosed(outcome="finished")]
