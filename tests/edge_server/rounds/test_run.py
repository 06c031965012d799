"""How rounds and runs end: by quorum, by deadline, by the plan's rule, with whoever is there."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import Evaluated, Noted, RoundClosed, RoundOpened, RunClosed
from edge_server.journal.runs import checkpoint_path
from edge_server.trial.tables import device_lines, restart_lines
from shared.protocol.messages import Status
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import RUN, Site, beginning, moved, packed, site, update_for, virtual
from tests.naming import log_messages, names_all

pytestmark = pytest.mark.virtual_time


def now() -> float:
    """Return virtual seconds since the test began."""
    return asyncio.get_running_loop().time()


def ends(here: Site) -> list[RunClosed]:
    """Return how the run ended; once, one hopes."""
    return [record for record in here.store.records() if isinstance(record, RunClosed)]


def checkpoint(folder, number):
    return checkpoint_path(folder / RUN / "checkpoints", number)


async def test_a_run_without_devices_may_miss_its_rounds_and_go_on(tmp_path):
    """If its plan says so: so does the journal, the model stays as it is, and when devices come they are taken."""
    keys = {"cohort": "min_devices = 2\nwait_s = 5.0", "round": 'on_missed = "continue"'}
    async with site(tmp_path, rounds=3, **keys) as here:
        one = await here.device("one")
        await asyncio.sleep(6)
        two = await here.device("two")
        for number in (2, 3):
            for puppet in (one, two):
                task = await puppet.task()
                assert task.round == number
                await puppet.answer(task, moved(here.plan, 0.5))
        state, rounds = await here.ended()
        assert not checkpoint(tmp_path, 1).exists()
        for key, first in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], first + 1.0, rtol=0, atol=1e-6)
        assert ends(here) == [RunClosed(outcome="finished")]
    assert [closed.outcome for closed in rounds] == ["missed", "aggregated", "aggregated"]
    assert rounds[0] == RoundClosed(round=1, outcome="missed", arrived=(), seconds=5.0, at=5.0)


async def test_a_run_may_stop_at_its_first_missed_round(tmp_path):
    """The plan's rule, with the cause in the record; the rest of the rounds is not begun."""
    rule = 'deadline_s = 5.0\non_missed = "stop"'
    async with site(tmp_path, rounds=3, cohort="wait_s = 7.0", round=rule) as here:
        _, rounds = await here.ended()
        assert [closed.outcome for closed in rounds] == ["missed"]
        [closed] = ends(here)
        assert closed.outcome == "stopped"
        assert "round 1" in closed.cause
        assert not [one for one in here.store.records() if isinstance(one, RoundOpened) and one.round > 1]
        assert now() == 7.0


def test_too_few_updates_leave_the_model_as_it_is(tmp_path):
    """One of two is below `min_updates`: missed, although the cohort was complete."""

    async def play() -> list[RoundClosed]:
        rule = 'deadline_s = 9.0\nmin_updates = 2\non_missed = "continue"'
        async with site(tmp_path, round=rule) as here:
            one, two = await here.device("one"), await here.device("two")
            await one.answer(await one.task(), moved(here.plan, 9.0))
            await two.offer(update_for(await two.task(), b"", params=None, failure="no memory"))
            for puppet in (one, two):
                await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
            state, rounds = await here.ended()
            assert not checkpoint(tmp_path, 1).exists()
            for key, first in beginning(here.plan).items():
                torch.testing.assert_close(state.tree[key], first + 0.5, rtol=0, atol=1e-6)
            return rounds

    first, second = virtual(play())
    assert (first.outcome, first.arrived, first.failed) == ("missed", ("one",), {"two": "no memory"})
    assert second.outcome == "aggregated"


@pytest.mark.parametrize(("quorum", "needed"), [("0.1", 1), ("0.5", 2), ("0.51", 3), ("1.0", 4)])
async def test_a_quorum_ends_the_round_at_once(tmp_path, quorum, needed):
    """The share is rounded up; who comes later is late."""
    rule = f"deadline_s = 60.0\nquorum = {quorum}"
    async with site(tmp_path, rounds=1, cohort="min_devices = 4", round=rule) as here:
        puppets = [await here.device(f"d{number}") for number in range(4)]
        for number, puppet in enumerate(puppets[:needed], start=1):
            assert not here.run.done()
            await asyncio.sleep(1)
            await puppet.answer(await puppet.task(), moved(here.plan, float(number)))
        _, [closed] = await here.ended()
        assert now() == needed
        assert len(closed.arrived) == needed


async def test_a_silent_device_costs_the_deadline_and_nothing_more(tmp_path, caplog):
    """The others' updates count; the log says who was missing."""
    async with site(tmp_path, rounds=1, round="deadline_s = 20.0") as here:
        one = await here.device("one")
        await here.device("silent")
        await one.answer(await one.task(), moved(here.plan, 0.5))
        closed, ended_at = (await here.ended())[1][0], now()
    assert (closed.outcome, closed.arrived, closed.failed) == ("aggregated", ("one",), {})
    assert closed.seconds == pytest.approx(20.0)
    assert ended_at == pytest.approx(20.0)
    assert log_messages(caplog, "silent", level="WARNING")


async def test_a_device_that_joins_in_the_middle_takes_part_in_the_next_round(tmp_path):
    """Not in the one that is open."""
    async with site(tmp_path, rounds=2, cohort="min_devices = 1") as here:
        one = await here.device("one")
        task = await one.task()
        two = await here.device("two")
        await asyncio.sleep(1)
        assert not [*two.tasks.drain()]
        await one.answer(task, moved(here.plan, 0.5))
        for puppet in (one, two):
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        assert [closed.arrived for closed in (await here.ended())[1]] == [("one",), ("one", "two")]


async def test_a_device_that_comes_back_is_given_its_task_again(tmp_path):
    """It died while the round was open; another's late death, or its own, changes nothing."""
    async with site(tmp_path, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        task = await one.task()
        await one.status(online=False)
        await asyncio.sleep(1)
        assert here.server.fleet.online == ("two",)
        await one.status(online=True, session=2)
        await one.say(Status(device="one", session=1, instance="one", online=False), "status")
        assert await one.task() == msgspec.structs.replace(task, payload=b""), "it has the payload"
        assert here.server.fleet.online == ("one", "two")
        await one.answer(task, moved(here.plan, 0.5))
        await one.status(online=True, session=3)
        await asyncio.sleep(1)
        assert not [*one.tasks.drain()]
        await two.answer(await two.task(), moved(here.plan, 0.5))
        assert (await here.ended())[1][0].arrived == ("one", "two")


async def test_a_round_asks_as_many_as_the_plan_says(tmp_path):
    """The assignment of every one is in the journal, with a seed of its own."""
    async with site(tmp_path, rounds=3, cohort="size = 2\nmin_devices = 4") as here:
        puppets = {name: await here.device(name) for name in "abcd"}
        answers = [asyncio.create_task(_serve(here, puppet)) for puppet in puppets.values()]
        _, rounds = await here.ended()
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        opened = [one for one in here.store.records() if isinstance(one, RoundOpened)]
    assert [len(closed.arrived) for closed in rounds] == [2, 2, 2]
    assert [tuple(sorted(one.assignments)) for one in opened] == [closed.arrived for closed in rounds]
    seeds = [told.seed for one in opened for told in one.assignments.values()]
    assert len(set(seeds)) == len(seeds)


async def _serve(here: Site, puppet) -> None:
    while True:
        await puppet.answer(await puppet.task(), moved(here.plan, 0.5))


async def test_figures_are_means_weighted_by_examples(tmp_path):
    """Loss by examples trained on; a device that measured nothing does not count as zero."""
    async with site(tmp_path, rounds=1, cohort="min_devices = 3") as here:
        one, two, three = [await here.device(name) for name in ("one", "two", "three")]
        data = moved(here.plan, 0.5)
        await one.answer(await one.task(), data, loss=1.0, num_examples=30)
        await two.answer(
            await two.task(), data, loss=3.0, num_examples=10, metrics={"eval_accuracy": 0.5, "eval_examples": 4.0}
        )
        await three.answer(await three.task(), data, loss=None, num_examples=100)
        closed = (await here.ended())[1][0]
    assert closed.loss == 1.5
    assert closed.device_accuracy == 0.5
    assert closed.accuracy is None
    assert all(size > len(packed({})) for size in closed.bytes_up.values())


async def test_the_final_model_is_tried_by_the_devices(tmp_path):
    """After the last round, weighted by held-out examples; parameters in an answer were not asked for."""
    async with site(tmp_path, rounds=1, evaluation="every = 0\non_device = true") as here:
        one, two = await here.device("one"), await here.device("two")
        for puppet in (one, two):
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        task = await one.task()
        assert (task.round, task.train, task.evaluate) == (2, False, True)
        assert (await one.answer(task, moved(here.plan, 9.0))).verdict == "refused"
        metrics = {"eval_accuracy": 0.25, "eval_examples": 8.0}
        answer = update_for(await two.task(), b"", params=None, weight=0.0, metrics=metrics)
        assert (await two.offer(answer)).verdict == "accepted"
        state, _ = await here.ended()
        for key, first in beginning(here.plan).items():
            torch.testing.assert_close(state.tree[key], first + 0.5, rtol=0, atol=1e-6)
        assert ends(here) == [RunClosed(outcome="finished")]
        [evaluated] = [record for record in here.store.records() if isinstance(record, Evaluated)]
    assert evaluated.accuracy == 0.25
    assert set(evaluated.by_device) == {"two"}
    assert evaluated.by_device["two"]["eval_examples"] == 8.0


async def test_a_round_that_a_restart_cut_counts_from_its_opening(tmp_path):
    """Open for 4 s when the server was ended, and for 3 s after; without a calendar nobody knows the 20 s between."""
    broker = MemoryTransport()
    async with site(tmp_path, broker, rounds=1) as here:
        one, two = await here.device("one"), await here.device("two")
        await one.task()
        task = await two.task()
        await asyncio.sleep(4)
        await two.answer(task, moved(here.plan, 0.5))
    await asyncio.sleep(20)
    async with site(tmp_path, broker, rounds=1) as here:
        one = await here.device("one")
        task = await one.task()
        await asyncio.sleep(3)
        await one.answer(task, moved(here.plan, 0.5))
        _, [closed] = await here.ended()
        records = here.store.records()
    assert closed.seconds == pytest.approx(7.0)
    [note] = restart_lines(records)
    assert [one.what for one in records if isinstance(one, Noted)] == [note]
    assert names_all(note, "round 1")


async def test_a_last_evaluation_that_nobody_answers_is_told_as_that(tmp_path, caplog):
    """It is no round; what is not known is not shown as a figure."""
    rule = "deadline_s = 5.0"
    async with site(tmp_path, rounds=1, evaluation="every = 0\non_device = true", round=rule) as here:
        one, two = await here.device("one"), await here.device("two")
        for puppet in (one, two):
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        await here.ended()
        [line] = device_lines(here.store.records())
    assert not any(char.isdigit() for char in line), "no figure"
    assert log_messages(caplog, "one, two", level="WARNING")
    assert not log_messages(caplog, "round 2")


async def test_a_run_that_was_cut_after_the_round_that_stops_it_does_not_go_on(tmp_path):
    """Between a missed round and the record that the run has ended, `on_missed = "stop"` is not forgotten."""
    keys = {"rounds": 3, "cohort": "wait_s = 7.0", "round": 'on_missed = "stop"'}
    async with site(tmp_path, **keys) as here:
        await here.ended()
        records = here.store.records()
    for path in (tmp_path / RUN).glob("journal*"):
        path.unlink()
    store = SqliteStore(tmp_path / RUN)
    store.extend([record for record in records if not isinstance(record, RunClosed)])
    store.close()
    async with site(tmp_path, **keys) as here:
        _, rounds = await here.ended()
        [end] = ends(here)
        assert names_all(end.cause, 1)
        assert len(rounds) == 1


async def test_no_update_of_a_finished_run_stays(tmp_path):
    """There was a file of a model's size for each device and run, for ever."""
    async with site(tmp_path, rounds=1, cohort="min_devices = 1") as here:
        one = await here.device("one")
        await one.answer(await one.task(), moved(here.plan, 0.5))
        await here.ended()
        assert checkpoint(tmp_path, 1).exists()
        assert list((tmp_path / RUN / "updates").iterdir()) == []
