"""What tasks cost, uploads included, reaches the run's journal once, whatever devices and restarts do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import msgspec
import pytest

from edge_server.fleet.hub import Server
from edge_server.fleet.state import Fleet
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.claims import MAX_SOURCE, drop_implausible
from edge_server.journal.costs import Costs, costs_by_round
from edge_server.journal.records import CostSettled, Rewound, UpdateAccepted
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_plan import load
from edge_server.rounds.run import run_plan
from edge_server.trial.tables import format_longest_times, total_joules
from shared.protocol import wire
from shared.protocol.measurements import Cost, Provenance, TaskCost
from shared.protocol.messages import Report, Update
from shared.protocol.topics import topic
from shared.runtime.executor import background, inline
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import RUN, SITE, moved, site, virtual, write_plan

COST = Cost(compute_s=2.0, upload_s=0.5, compute_joules=6.0, upload_joules=1.5)


def report(device: str, number: int, *, at: float = 1.0, run: str = RUN, cost: Cost = COST) -> Report:
    return Report(device=device, at=at, spent=TaskCost(run=run, round=number, cost=cost), instance=device)


async def tell(here, said: Report) -> None:
    await here.broker.publish(topic(SITE, said.device, "report"), wire.encode(said), retain=True)


def settled(here) -> list[tuple[int, str]]:
    return [(one.round, one.device) for one in here.store.records() if isinstance(one, CostSettled)]


@pytest.mark.virtual_time
async def test_a_settled_cost_is_recorded_once_also_when_the_server_is_another(tmp_path):
    """The broker has retained the report, and gives it to every server that comes."""

    async def first(broker=None):
        async with site(tmp_path, rounds=2) as here:
            one, two = await here.device("one"), await here.device("two")
            for puppet in (one, two):
                await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
            for at in (1.0, 1.0, 2.0):
                await tell(here, report("one", 1, at=at))
            await asyncio.sleep(1)
            assert settled(here) == [(1, "one")]
            return here.broker

    async def second(broker):
        async with site(tmp_path, broker, rounds=2) as here:
            one, two = await here.device("one"), await here.device("two")
            await asyncio.sleep(1)
            assert settled(here) == [(1, "one")]
            for puppet in (one, two):
                await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
            await tell(here, report("one", 2, at=3.0))
            await here.ended()
            assert settled(here) == [(1, "one"), (2, "one")]
            assert costs_by_round(here.store.records())[2] == {"one": COST, "two": Cost()}

    await second(await first())


def test_a_run_waits_a_moment_for_what_its_last_uploads_cost(tmp_path):
    """Not for a device that has never reported, and not for ever; the run's end is its last record."""

    async def play(*, answers: bool) -> tuple[float, list[tuple[int, str]]]:
        folder = tmp_path / str(answers)
        folder.mkdir()
        async with site(folder, rounds=1) as here:
            one, two = await here.device("one"), await here.device("two")
            await tell(here, Report(device="one", at=1.0))
            for puppet in (one, two):
                await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
            before = asyncio.get_running_loop().time()
            await asyncio.sleep(0.25)
            if answers:
                await tell(here, report("one", 1, at=2.0))
            await here.ended()
            assert type(here.store.records()[-1]).__name__ == "RunClosed"
            return asyncio.get_running_loop().time() - before, settled(here)

    assert virtual(play(answers=True)) == (pytest.approx(0.25), [(1, "one")])
    assert virtual(play(answers=False)) == (pytest.approx(2.0), [])


@pytest.mark.virtual_time
async def test_what_was_heard_before_the_run_went_on_counts(tmp_path):
    """A server listens before it has read its journal."""
    plan = load(write_plan(tmp_path, rounds=1, cohort="min_devices = 1\nwait_s = 1.0"), tmp_path)
    store, fleet = SqliteStore(tmp_path / RUN, durable=False), Fleet(reports={"one": report("one", 1)})
    clock = asyncio.get_running_loop().time
    server = Server(SITE, MemoryTransport(), clock, inline, fleet=fleet)
    await run_plan(plan, RUN, server, store, LinkConfig(), started="")
    found = [(one.round, one.device) for one in store.records() if isinstance(one, CostSettled)]
    store.close()
    assert server.presence.report_listeners == []
    assert found == [(1, "one")]


@pytest.mark.virtual_time
async def test_what_is_not_of_this_run_is_not_taken():
    """Another run's, what is neither round nor evaluation, one earlier than what is recorded, a second word on one.

    Of three rounds: evaluations have numbers from 4 to 7, and their order says nothing of the rounds'.
    """
    kept: list[CostSettled] = []

    async def extend(batch: Sequence[CostSettled]) -> None:
        kept.extend(batch)

    costs = Costs("run", 3, extend)
    costs.recall([CostSettled(round=2, device="a", cost=COST)])
    for device, number, run in (
        *(("a", 1, "run"), ("a", 2, "run"), ("a", 3, "other"), ("a", 8, "run"), ("a", -5, "run")),
        *(("b", 1, "run"), ("b", 1, "run"), ("a", 6, "run"), ("a", 5, "run"), ("a", 3, "run")),
    ):
        costs.hear(report(device, number, run=run))
    task = asyncio.create_task(costs.keep())
    await costs.wait_recorded(1, ["a", "b"])
    task.cancel()
    assert [(one.device, one.round) for one in kept] == [("b", 1), ("a", 6), ("a", 3)]


def test_a_repeated_round_costs_anew():
    """What was recorded of it before the checkpoint was lost is void."""

    async def nothing(record: CostSettled) -> None:
        raise AssertionError(record)

    costs = Costs("run", 3, nothing)
    records = [CostSettled(round=n, device="a", cost=COST) for n in (1, 2)]
    costs.recall([*records, Rewound(round=2, cause="lost")])
    assert costs.last == {"a": 1}
    assert costs_by_round([*records, Rewound(round=2, cause="lost")]) == {1: {"a": COST}}


def test_the_settled_cost_stands_for_the_updates():
    """It is the whole one; of who has not reported it, what the update says."""
    update = Update(run="run", round=1, device="a", params=None, cost=Cost(compute_s=2.0))
    accepted = [
        UpdateAccepted(round=1, device=device, update=msgspec.structs.replace(update, device=device), bytes_up=1)
        for device in "ab"
    ]
    found = costs_by_round([*accepted, CostSettled(round=1, device="a", cost=COST)])
    assert found == {1: {"a": COST, "b": Cost(compute_s=2.0)}}


def test_only_what_can_be_true_is_recorded():
    """No figure below zero or that is none; no source of a figure that is not there; no long text."""
    modelled = Provenance(source="s" * 999, quality="modelled", uncertainty=math.nan)
    said = Cost(
        compute_s=math.nan,
        upload_s=math.inf,
        compute_joules=-1.0,
        bytes_up=-3,
        bytes_down=5,
        idle_w=0.0,
        provenance={f"{i}": modelled for i in range(9999)} | {"idle_w": modelled, "compute_s": modelled},
    )
    kept = Provenance(source="s" * MAX_SOURCE, quality="modelled")
    assert drop_implausible(said) == Cost(bytes_down=5, idle_w=0.0, provenance={"idle_w": kept})


def test_a_rounds_cost_in_a_table():
    """The slowest computation and upload; the sum of joules with its worst mark, and whether it is all."""
    modelled = Provenance(source="model", quality="modelled")
    corrected = Provenance(source="pmic", quality="corrected")
    whole = Cost(
        compute_s=4.0,
        download_joules=0.5,
        compute_joules=7.0,
        upload_joules=0.25,
        provenance={"upload_joules": corrected},
    )
    assert format_longest_times({"a": whole, "b": COST}) == "4.00/0.50"
    assert format_longest_times({}) == "-/-"
    assert total_joules({"a": whole}) == "7.75~"
    assert total_joules({"a": whole, "b": COST}) == "≥15.2~"
    other = msgspec.structs.replace(whole, provenance={"compute_joules": modelled})
    assert total_joules({"a": whole, "b": other}) == "15.5≈"
    assert total_joules({"a": Cost()}) == "-"


async def test_a_round_made_void_has_not_its_first_costs():
    """A lost checkpoint sends the run back to round 1; the broker still holds what the first try of round 2 cost."""
    noted: list[CostSettled] = []
    first = [CostSettled(round=number, device="one", cost=COST) for number in (1, 2)]
    again = msgspec.structs.replace(COST, upload_s=9.0)

    async def extend(batch: Sequence[CostSettled]) -> None:
        noted.extend(batch)

    costs = Costs(RUN, 3, extend)
    costs.recall([*first, Rewound(round=1, cause="lost")])
    for number, cost in ((2, COST), (1, again), (2, again)):
        costs.hear(report("one", number, cost=cost))
    async with asyncio.timeout(1), background(costs.keep()):
        await costs.wait_recorded(2, ["one"])
    assert noted == [CostSettled(round=number, device="one", cost=again) for number in (1, 2)]


@pytest.mark.virtual_time
async def test_a_report_tells_of_several_tasks(tmp_path):
    """Two rounds were settled between two reports: both are recorded, and what was told before is not again."""
    async with site(tmp_path, rounds=3) as here:
        one, two = await here.device("one"), await here.device("two")
        for _ in range(2):
            for puppet in (one, two):
                await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        await tell(here, report("one", 1))
        both = msgspec.structs.replace(report("one", 2, at=2.0), earlier=[TaskCost(run=RUN, round=1, cost=Cost())])
        await tell(here, both)
        other = [TaskCost(run="other", round=9, cost=COST), TaskCost(run=RUN, round=1, cost=COST)]
        await tell(here, msgspec.structs.replace(report("two", 2, at=2.0), earlier=other))
        await asyncio.sleep(1)
        assert settled(here) == [(1, "one"), (2, "one"), (1, "two"), (2, "two")]
