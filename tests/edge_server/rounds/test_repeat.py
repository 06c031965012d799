"""Missed rounds are repeated under their number, after a pause."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from edge_server.cli.commands import explain_shortfall
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import (
    AnyRecord,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    closed_rounds,
)
from edge_server.journal.runs import find_unfinished
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from edge_server.trial.tables import count_retries, missed_lines
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import RUN, Puppet, Site, moved, site, update_for, virtual, write_examples, write_plan
from tests.naming import log_messages, names_all

pytestmark = pytest.mark.virtual_time

LIVE = "20261122T000000Z"
AWAY_S = 10.0
CAUSE = "examples.npz: No such file"


async def serve(here: Site, puppet: Puppet, mended_s: float) -> None:
    """Fail every task until a moment, as a board whose data file is away; do them from then on."""
    while True:
        task = await puppet.task()
        if asyncio.get_running_loop().time() < mended_s:
            await puppet.offer(update_for(task, b"", params=None, failure=CAUSE))
        else:
            await puppet.answer(task, moved(here.plan, 0.5))


async def play(here: Site, mended_s: float) -> list[AnyRecord]:
    """Run two devices to the run's end."""
    serving = [asyncio.create_task(serve(here, await here.device(name), mended_s)) for name in ("one", "two")]
    try:
        await here.ended()
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
    return here.store.records()


async def test_devices_that_fail_for_ten_seconds_burn_no_round(tmp_path, caplog):
    """Of 200 rounds 197 were missed in seconds; now each gives a model, and the record says what was done again."""
    caplog.set_level("INFO")
    async with site(tmp_path, started=LIVE, rounds=40) as here:
        records = await play(here, AWAY_S)
    assert log_messages(caplog, "updates=0", "seconds=0.000", "failed=2", "one, two", CAUSE)
    assert len(log_messages(caplog, "round 1", 3, level="WARNING")) == 1
    assert [(one.round, one.outcome) for one in closed_rounds(records)] == [(n, "aggregated") for n in range(1, 41)]
    assert count_retries(records) == {1: 4}  # after 1, 2, 4 and 8 s
    assert [one for one in records if isinstance(one, RunClosed)] == [RunClosed(outcome="finished")]
    assert explain_shortfall(records) == ""
    [line] = missed_lines(records)
    assert names_all(line, 1, 4, 0, "one, two", CAUSE)
    assert sum(one.seconds for one in records if isinstance(one, RoundClosed)) == pytest.approx(15.0)


async def test_the_pause_doubles_up_to_the_deadline(tmp_path):
    """A cause that lasts costs a try in every deadline, not thousands."""
    async with site(tmp_path, started=LIVE, rounds=1, round="deadline_s = 6.0") as here:
        tries = [one.at for one in await play(here, 30.0) if isinstance(one, RoundOpened)]
    assert tries == [0.0, 1.0, 3.0, 7.0, 13.0, 19.0, 25.0, 31.0]


@pytest.mark.parametrize("is_void", [False, True], ids=["before it was made void", "in the pause"])
def test_a_server_that_ends_between_two_tries_goes_on_with_that_round(tmp_path, is_void):
    """A restart passes over nothing: neither between the record of the miss and that of the repetition, nor after."""

    async def whole() -> list[AnyRecord]:
        broker = MemoryTransport()
        async with site(tmp_path, broker, started=LIVE, rounds=2) as here:
            serving = asyncio.create_task(play(here, 100.0))
            await asyncio.sleep(0.5)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            records = list(here.store.records())
        assert isinstance(records[-1], Rewound)
        assert isinstance(records[-2], RoundClosed)
        if not is_void:
            for path in (tmp_path / RUN).glob("journal*"):
                path.unlink()
            store = SqliteStore(tmp_path / RUN)
            store.extend(records[:-1])
            store.close()
        async with site(tmp_path, broker, started=LIVE, rounds=2) as here:
            return await play(here, 0.0)

    records = virtual(whole())
    assert [(one.round, one.outcome) for one in closed_rounds(records)] == [(1, "aggregated"), (2, "aggregated")]
    assert count_retries(records) == {1: 1}


def test_a_replay_repeats_a_round_three_times(tmp_path):
    """Its devices fail by rule, so that for ever would be for ever; a run of which so much is missed is short."""
    keys = {"rounds": 3, "cohort": "min_devices = 2\nwait_s = 5.0", "round": "deadline_s = 20.0\nmin_updates = 2"}
    fleet = '[[device]]\nname = "a"\ncompute_s = 1.0\n[[device]]\nname = "b"\ncompute_s = 1000.0'
    model = 'name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }'
    plan = load(write_plan(tmp_path, more=fleet, model=model, data=write_examples(tmp_path), **keys), tmp_path)
    _, records = replay_plan(plan, tmp_path / "run")
    assert [(one.round, one.outcome) for one in closed_rounds(records)] == [(n, "missed") for n in (1, 2, 3)]
    assert count_retries(records) == {1: 3, 2: 3, 3: 3}
    assert names_all(explain_shortfall(records), "[round]")


@pytest.mark.parametrize(("missed", "is_short"), [(1, False), (2, True)])
def test_a_run_of_which_a_share_was_missed_is_short_of_its_plan(tmp_path, missed, is_short):
    """Also where the plan passes over missed rounds: it says so, and ends with code 1."""
    plan = load(write_plan(tmp_path, rounds=10, round='on_missed = "continue"'), tmp_path)
    closed = [
        RoundClosed(round=n, outcome="missed" if n <= missed else "aggregated", arrived=(), seconds=1.0)
        for n in range(1, 11)
    ]
    records = [RunOpened(run=RUN, plan=plan), *closed, RunClosed(outcome="finished")]
    assert names_all(explain_shortfall(records), missed, 10) == is_short
    assert bool(explain_shortfall(records)) == is_short


async def test_a_run_of_before_goes_on_by_its_own_rule(tmp_path):
    """Its record says `continue`, which was what a plan meant that said nothing."""
    plan = load(write_plan(tmp_path, rounds=2), tmp_path)
    assert plan.round.on_missed == "retry"
    begun = msgspec.structs.replace(plan, round=msgspec.structs.replace(plan.round, on_missed="continue"))
    store = SqliteStore(tmp_path / RUN)
    store.append(RunOpened(run=RUN, plan=begun, started=LIVE))
    store.close()
    assert find_unfinished(tmp_path, plan) == RUN
    async with site(tmp_path, rounds=2, started=LIVE) as here:
        assert [one.outcome for one in closed_rounds(await play(here, 0.5))] == ["missed", "missed"]


def test_a_run_whose_number_of_batches_was_settled_is_gone_on_with(tmp_path):
    """Its record says how many beside the plan, which leaves it open."""
    plan = load(write_plan(tmp_path, rounds=2), tmp_path)
    store = SqliteStore(tmp_path / RUN)
    store.append(RunOpened(run=RUN, plan=plan, statistics_batches=50, started=LIVE))
    store.close()
    assert find_unfinished(tmp_path, plan) == RUN
