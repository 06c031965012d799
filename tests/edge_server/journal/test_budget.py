"""Budget accounting, and runs that end when a budget is spent."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.journal.budget import Ledger, RunSpending, affordable, describe_spent_budget, foreseen_joules
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.costs import costs_by_round
from edge_server.journal.decision import Decision, DeviceDecision
from edge_server.journal.records import (
    IMPLAUSIBLE_COST,
    AnyRecord,
    CostSettled,
    Evaluated,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.plan.budget import BudgetPlan
from edge_server.replay.run import replay_plan
from shared.errors import Infeasible
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper, Update
from tests.edge_server.harness import RUN, moved, site, update_for, virtual
from tests.edge_server.replay.test_budget import least_seconds
from tests.edge_server.textbook import make_plan
from tests.naming import names_all

TOLD = Assignment(seed=0, hyper=Hyper())


def opened(number: int, *names: str) -> RoundOpened:
    return RoundOpened(round=number, assignments=dict.fromkeys(names, TOLD))


def closed(number: int, seconds: float) -> RoundClosed:
    return RoundClosed(round=number, outcome="aggregated", arrived=(), seconds=seconds)


def came(number: int, name: str, **cost: float) -> UpdateAccepted:
    update = Update(run="r", round=number, device=name, params=None, cost=Cost(**cost))
    return UpdateAccepted(round=number, device=name, update=update, bytes_up=1)


def joules(down: float, compute: float, up: float) -> dict[str, float]:
    return {"download_joules": down, "compute_joules": compute, "upload_joules": up}


def settled(number: int, name: str, **cost: float) -> CostSettled:
    return CostSettled(round=number, device=name, cost=Cost(**cost))


def spent(*records: AnyRecord) -> RunSpending:
    ledger = Ledger()
    ledger.take(records)
    return ledger.spending()


def test_what_every_task_told_adds_up_and_the_settled_cost_stands_for_the_updates():
    """1 + 10 + 2, and of another device 1 + 20 + 3; rounds of 5 and 7 s."""
    found = spent(
        opened(1, "a", "b"),
        came(1, "a", download_joules=1.0, compute_joules=9.0),
        settled(1, "a", **joules(1.0, 10.0, 2.0)),
        closed(1, 5.0),
        opened(2, "b"),
        settled(1, "b", **joules(1.0, 20.0, 3.0)),
        came(2, "b", **joules(0.0, 0.0, 0.0)),
        closed(2, 7.0),
    )
    assert found == RunSpending(seconds=12.0, joules=37.0, charged=0.0, is_whole=True, unmetered=())


def test_joules_that_nobody_told_are_charged_as_the_dearest_of_that_device_and_part():
    """Asked three times: told 1 + 10 + 2, then only 30 of computing, then nothing at all, for it died."""
    found = spent(
        opened(1, "a"),
        came(1, "a", **joules(1.0, 10.0, 2.0)),
        opened(2, "a"),
        came(2, "a", compute_joules=30.0),
        opened(3, "a"),
        closed(3, 1.0),
    )
    assert found == RunSpending(seconds=1.0, joules=13.0 + 33.0 + 33.0, charged=3.0 + 33.0, is_whole=True, unmetered=())


def test_joules_that_are_not_told_yet_are_charged_as_they_were_predicted_for_that_task():
    """An upload's joules are told with the next message: 0.5 J were predicted of it, and the dearest one took 20 J.

    Charged are 2 % more.
    """
    decision = Decision(devices={"a": DeviceDecision(predicted=Cost(**joules(1.0, 8.0, 0.5)))})
    records = [
        opened(1, "a"),
        settled(1, "a", **joules(1.0, 10.0, 20.0)),
        RoundOpened(round=2, assignments={"a": TOLD}, decision=decision),
        came(2, "a", download_joules=1.0, compute_joules=9.0),
    ]
    assert spent(*records) == RunSpending(0.0, 41.51, charged=0.51, is_whole=True, unmetered=())
    after = [settled(2, "a", **joules(1.0, 9.0, 2.0)), RoundOpened(round=3, assignments={"a": TOLD}, decision=decision)]
    assert spent(*records, *after[:1]) == RunSpending(0.0, 43.0, charged=0.0, is_whole=True, unmetered=())
    assert spent(*records, *after) == RunSpending(0.0, 52.69, charged=9.69, is_whole=True, unmetered=())


def test_a_first_upload_is_charged_though_nobody_has_told_what_one_takes():
    decision = Decision(devices={"a": DeviceDecision(predicted=Cost(**joules(1.0, 8.0, 0.5)))})
    opening = RoundOpened(round=1, assignments={"a": TOLD}, decision=decision)
    found = spent(opening, came(1, "a", download_joules=1.0, compute_joules=9.0))
    assert (found.joules, found.charged) == (10.51, 0.51)


def test_figures_that_no_sum_could_hold_are_none():
    """Two of 1.7e308 J would have ended the run, and every server that read its journal again."""
    boast = {f"{part}_joules": 1.7e308 for part in ("download", "compute", "upload")}
    found = spent(
        *(opened(1, "a", "b"), came(1, "a", **boast), settled(1, "a", **boast), came(1, "b", **joules(1, 2, 3))),
        *(opened(2, "a"), came(2, "a", **boast)),
    )
    assert found.joules == 6.0
    assert found.unmetered == ("a",)


def test_of_who_tells_nothing_nothing_can_be_charged_and_the_sum_is_a_bound():
    """Device b trained and told no joules of it; c never answered, and may tell them yet."""
    found = spent(
        opened(1, "a", "b", "c"),
        came(1, "a", **joules(1.0, 10.0, 2.0)),
        came(1, "b", upload_joules=5.0),
        closed(1, 1.0),
    )
    assert found == RunSpending(seconds=1.0, joules=18.0, charged=0.0, is_whole=False, unmetered=("b",))
    assert spent(opened(1, "b"), came(1, "b", compute_s=1.0)).joules is None
    assert spent(came(0, "b", compute_s=1.0)).unmetered == (), "what was measured before round 1 is no training"
    assert spent(opened(1, "b"), came(1, "b", compute_joules=-3.0)).unmetered == ("b",), "below zero cannot be true"


@pytest.mark.parametrize("reopened", [False, True])
def test_what_was_made_void_is_spent_all_the_same(reopened):
    """A round done twice costs twice; where its opening stays, who was asked is asked anew."""
    first = [opened(1, "a"), came(1, "a", **joules(1.0, 10.0, 2.0)), closed(1, 5.0)]
    back = Rewound(round=1, cause="lost", reopened=reopened)
    assert spent(*first, back, *first) == RunSpending(10.0, 26.0, 0.0, is_whole=True, unmetered=())
    assert spent(*first, back).joules == (26.0 if reopened else 13.0)


figures = st.none() | st.integers(0, 10**6).map(float)  # whole joules: what is taken back leaves no rounding
tasks = st.tuples(st.integers(1, 4), st.sampled_from("abc"), figures, figures, figures)


@given(st.lists(tasks, max_size=12), st.integers(0, 12))
def test_a_journal_read_in_two_parts_says_the_same_and_no_less_than_what_was_told(found, cut):
    """So a server that was killed knows what the one before it knew."""
    records: list[AnyRecord] = []
    for number, name, *parts in found:
        cost = {key: one for key, one in joules(*parts).items() if one is not None}
        records += [opened(number, name), settled(number, name, **cost), closed(number, 1.0)]
    ledger = Ledger()
    ledger.take(records[:cut])
    ledger.spending()
    ledger.take(records[cut:])
    assert ledger.spending() == spent(*records)
    assert ledger.seen == len(records)
    last = {(number, name): parts for number, name, *parts in found}
    told = [one for parts in last.values() for one in parts if one is not None]
    assert (ledger.spending().joules or 0.0) >= sum(told) * (1 - 1e-12)
    assert (ledger.spending().joules is None) == (not told)


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (BudgetPlan(), ()),
        (BudgetPlan(time_s=12.5, joules=40.5), ()),
        (BudgetPlan(time_s=12.0), ("budget.time_s", "12 s")),
        (BudgetPlan(joules=40.0), ("budget.joules", "40 J", "3 J")),
    ],
)
def test_a_budget_is_spent_when_it_is_reached(budget, named):
    cause = describe_spent_budget(budget, RunSpending(12.0, 40.0, 3.0, is_whole=False, unmetered=()))
    assert bool(cause) == bool(named)
    assert names_all(cause, *named)


def test_joules_that_nobody_knows_spend_no_budget():
    assert (
        describe_spent_budget(BudgetPlan(joules=1.0), RunSpending(12.0, None, 0.0, is_whole=False, unmetered=("a",)))
        == ""
    )


def answering(figures: dict[str, list[float | None]], folder: Path, budget: str, rounds: int = 9, **keys: str):
    """Run a plan with devices of which each takes 5 s and tells so many joules of its tasks; return the journal."""

    async def play() -> list[AnyRecord]:
        more = f"[budget]\n{budget}"
        least = f"min_devices = {len(figures)}"
        async with site(folder, rounds=rounds, cohort=least, more=more, **keys) as here:
            await asyncio.gather(*(work(here, name, iter(told)) for name, told in figures.items()), wait(here))
            return here.store.records()

    async def wait(here) -> None:
        await here.ended()
        raise Ended

    async def work(here, name, told) -> None:
        puppet = await here.device(name)
        while True:
            task = await puppet.task()
            await asyncio.sleep(5)
            compute = next(told)
            cost = Cost() if compute is None else Cost(**joules(0.0, compute, 0.0))
            if task.train:
                await puppet.answer(task, moved(here.plan, 0.5), cost=cost)
            else:
                tried = {"eval_accuracy": 0.5, "eval_examples": 8.0}
                await puppet.offer(update_for(task, b"", params=None, weight=0.0, metrics=tried, cost=cost))

    async def caught() -> None:
        with suppress(Ended):
            await play()

    virtual(caught())
    store = SqliteStore(folder / RUN)
    records = store.records()
    store.close()
    return records


class Ended(Exception):
    """The run is over, and its devices may go."""


def ends(records: list[AnyRecord]) -> RunClosed:
    [end] = [one for one in records if isinstance(one, RunClosed)]
    return end


def test_a_run_ends_after_the_round_that_reaches_its_seconds(tmp_path):
    """Rounds of 5 s: 10 are less than 12, 15 are not; nothing is evaluated on devices any more."""
    records = answering({"a": [1.0] * 9}, tmp_path, "time_s = 12.0", evaluation="every = 0\non_device = true")
    assert [one.seconds for one in closed_rounds(records)] == pytest.approx([5.0] * 3)
    assert ends(records).outcome == "stopped"
    assert names_all(ends(records).cause, "budget.time_s", "15 s")
    assert not [one for one in records if isinstance(one, Evaluated)]


def test_a_run_whose_last_round_reaches_the_budget_has_finished(tmp_path):
    records = answering({"a": [1.0] * 2}, tmp_path, "time_s = 10.0\njoules = 2.0", rounds=2)
    assert ends(records) == RunClosed(outcome="finished")


def test_a_run_ends_after_the_round_that_reaches_its_joules(tmp_path):
    """3 + 4 a round."""
    records = answering({"a": [3.0] * 9, "b": [4.0] * 9}, tmp_path, "joules = 21.0")
    assert len(closed_rounds(records)) == 3
    assert ends(records).outcome == "stopped"
    assert names_all(ends(records).cause, "budget.joules", "21 J")


@pytest.mark.parametrize(
    ("budget", "asked", "named"),
    [
        (15.0, ["ab", "ab"], ("14 J", "15 J", "round 3", "3 J")),
        (17.5, ["ab", "ab", "a"], ("17 J", "17.5 J", "round 4", "3 J")),
        (20.0, ["ab", "ab", "a", "a"], ("20 J",)),
    ],
)
def test_a_round_that_cannot_be_afforded_is_begun_with_those_that_can_or_not_at_all(tmp_path, budget, asked, named):
    """3 + 4 a round; whole rounds alone would have taken 21 J of each of these budgets."""
    records = answering({"a": [3.0] * 9, "b": [4.0] * 9}, tmp_path, f"joules = {budget}")
    assert ["".join(one.assignments) for one in records if isinstance(one, RoundOpened)] == asked
    assert ends(records).outcome == "stopped"
    assert names_all(ends(records).cause, "budget.joules", *named)
    assert len([one for one in records if isinstance(one, Noted)]) == len(asked) - 2


def test_a_round_needs_as_many_as_its_plan_says(tmp_path):
    records = answering(
        {"a": [3.0] * 9, "b": [4.0] * 9}, tmp_path, "joules = 20.0", round="deadline_s = 30.0\nmin_updates = 2"
    )
    assert len(closed_rounds(records)) == 2
    assert names_all(ends(records).cause, "budget.joules", "14 J", "20 J", "round 3", "7 J")


def test_an_evaluation_that_cannot_be_afforded_is_left_out_and_the_record_says_so(tmp_path):
    """5 J a round and 2 an evaluation: of 20 J 19 are spent after the third round, and its evaluation took 21."""
    records = answering({"a": [5.0, 2.0] * 9}, tmp_path, "joules = 20.0", evaluation="every = 0\ndevices_every = 1")
    assert [one.round for one in closed_rounds(records)] == [1, 2, 3]
    assert [one.round for one in records if isinstance(one, Evaluated)] == [1, 2]
    [note] = [one.what for one in records if isinstance(one, Noted)]
    assert names_all(note, "round 3", "1 J", "budget.joules", "2 J")
    assert names_all(ends(records).cause, "budget.joules", "19 J", "20 J", "round 4", "5 J")


def test_fewer_devices_are_the_cheapest_as_many_as_can_be_paid():
    assert affordable({"b": 4.0, "a": 3.0, "c": 2.0}, 9.0) == ("a", "b", "c")
    assert affordable({"b": 4.0, "a": 3.0, "c": 2.0}, 8.9) == ("a", "c")
    assert affordable({"b": 4.0, "a": 3.0}, 2.0) == ()
    assert foreseen_joules(("a", "b", "c"), {"a": 2.0}, {"a": 9.0, "b": 5.0, "z": 6.0}) == {
        "a": 2.0,
        "b": 5.0,
        "c": 6.0,
    }
    assert foreseen_joules(("a",), {}, {}) == {"a": 0.0}


def test_a_part_of_zero_joules_does_not_make_untold_computing_free():
    """b has told tasks without a step alone: its task with steps is charged as others' dearest."""
    records = [
        *(opened(1, "a", "b"), came(1, "a", **joules(1.0, 4.0, 1.0)), came(1, "b", **joules(1.0, 0.0, 1.0))),
        *(
            opened(2, "a", "b"),
            came(2, "a", **joules(1.0, 6.0, 1.0)),
            came(2, "b", download_joules=1.0, upload_joules=1.0),
        ),
    ]
    found = spent(*records)
    assert (found.joules, found.charged, found.is_whole) == (6.0 + 2.0 + 8.0 + 2.0 + 6.0, 6.0, True)
    assert not spent(*(one for one in records if getattr(one, "device", "b") == "b")).is_whole


def test_rounding_leaves_nobody_out():
    """Ten tenths are not one in floating point; what is more than that is."""
    foreseen = {f"d{index}": 0.1 for index in range(10)}
    assert len(affordable(foreseen, 1.0 - 1e-15)) == 10
    assert len(affordable(foreseen, 0.999)) == 9
    assert affordable({"a": 1e-15}, 0.0) == ()


def test_a_split_session_is_charged_for_its_exchange():
    """Of 20 J of it nothing was told in round 2: as much again; a task that is no session has none."""
    session = Assignment(seed=0, hyper=Hyper(), steps=5)
    first = RoundOpened(round=1, assignments={"a": session, "b": TOLD})
    second = RoundOpened(round=2, assignments={"a": session})
    told = [came(1, "a", **joules(1.0, 10.0, 2.0), exchange_joules=20.0), came(1, "b", **joules(1.0, 10.0, 2.0))]
    found = spent(first, *told, second, came(2, "a", **joules(1.0, 10.0, 2.0)))
    assert found == RunSpending(seconds=0.0, joules=33.0 + 13.0 + 33.0, charged=20.0, is_whole=True, unmetered=())


@pytest.mark.parametrize("claim", [1e18, 1e9, 1e5, 500.0])
def test_one_claim_that_cannot_be_true_ends_no_run(tmp_path, claim):
    """Of 5 s: 500 J are 100 times as much, at 100 times the watts, as the other device takes."""
    figures: dict[str, list[float | None]] = {"a": [3.0, claim, *[3.0] * 7], "b": [4.0] * 9}
    records = answering(figures, tmp_path, "joules = 64.0")
    assert len(closed_rounds(records)) == 9
    assert ends(records) == RunClosed(outcome="finished")
    [note] = [one.what for one in records if isinstance(one, Noted)]
    assert names_all(note, "a", f"{claim:.4g} J", "round 2", "5 s")
    assert costs_by_round(records)[2]["a"].compute_joules is None
    assert costs_by_round(records)[3]["a"].compute_joules == 3.0


def test_who_claims_nothing_else_takes_no_further_part_and_is_named_once(tmp_path):
    records = answering({"a": [1e18] * 9, "b": [4.0] * 9}, tmp_path, "joules = 40.0")
    assert [len(one.assignments) for one in records if isinstance(one, RoundOpened)] == [2, *[1] * 8]
    assert ends(records) == RunClosed(outcome="finished")
    doubts = [one for one in records if isinstance(one, Noted) and one.reason == IMPLAUSIBLE_COST]
    assert [one.device for one in doubts] == ["a"]
    assert names_all(doubts[0].what, "a", "1e+18 J")


def test_a_device_without_joules_takes_no_part_after_its_first_task(tmp_path):
    """Said at once and recorded once; whose figure fails later is charged, and stays."""
    records = answering({"a": [3.0, None, 3.0, 3.0], "b": [None]}, tmp_path, "joules = 12.0")
    asked = [set(one.assignments) for one in records if isinstance(one, RoundOpened)]
    assert asked == [{"a", "b"}, {"a"}, {"a"}, {"a"}]
    [note] = [one.what for one in records if isinstance(one, Noted)]
    assert names_all(note, "b", "budget.joules")
    assert names_all(ends(records).cause, "budget.joules", "12 J", "3 J")


def test_a_run_in_which_nobody_tells_joules_ends_at_once(tmp_path):
    records = answering({"a": [None], "b": [None]}, tmp_path, "joules = 12.0")
    assert len(closed_rounds(records)) == 1
    assert ends(records).outcome == "stopped"
    assert names_all(ends(records).cause, "budget.joules", "a, b")


def test_without_a_budget_of_joules_nobody_asks_for_them(tmp_path):
    records = answering({"a": [None] * 3}, tmp_path, "time_s = 1000.0", rounds=3)
    assert ends(records) == RunClosed(outcome="finished")
    assert not [one for one in records if isinstance(one, Noted)]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_server_that_was_killed_after_any_round_comes_to_the_same_end(tmp_path, kept):
    """Also between the last round's end and the record that the run has ended: what was spent is in the journal."""
    figures = {"a": [3.0] * 9, "b": [4.0] * 9}
    (tmp_path / "whole").mkdir()
    whole = list(answering(figures, tmp_path / "whole", "joules = 21.0"))
    last = next(at for at, one in enumerate(whole) if isinstance(one, RoundClosed) and one.round == kept)
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / RUN).rename(tmp_path / "cut" / RUN)
    for path in (tmp_path / "cut" / RUN).glob("journal*"):
        path.unlink()
    checkpoint_after(tmp_path / "cut" / RUN, kept)
    store = SqliteStore(tmp_path / "cut" / RUN)
    store.extend(whole[: last + 1])
    store.close()
    again = answering(figures, tmp_path / "cut", "joules = 21.0")
    assert ends(again) == ends(whole)
    assert [one.round for one in closed_rounds(again)] == [1, 2, 3]


def checkpoint_after(folder: Path, number: int) -> None:
    """Leave the checkpoint of that round alone, of which a whole run keeps only the last two."""
    checkpoints = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    content = checkpoints[-1].read_bytes()
    for path in checkpoints:
        path.unlink()
    checkpoints[-1].with_name(checkpoints[-1].name.replace("3", str(number))).write_bytes(content)


def test_a_replay_ends_when_its_budget_is_spent_though_it_might_have_been_kept(tmp_path):
    """Clocks are drawn from 1 to 2 GHz: with the best luck 6 rounds fit into the budget, and such luck nobody has."""
    device = """
        [[device]]
        name = "a"
        count = 3
        compute = { kind = "ranges", hertz = [1e9, 2e9], cycles_per_step = 1e9, again = "round" }
    """
    with pytest.raises(Infeasible) as refused:
        replay_plan(make_plan(tmp_path, rounds=6, more=f"{device}\n[budget]\ntime_s = 0.1"), tmp_path / "none")
    least = least_seconds(refused.value)
    plan = make_plan(tmp_path, rounds=6, more=f"{device}\n[budget]\ntime_s = {least}")
    _, records = replay_plan(plan, tmp_path / "run")
    seconds = [one.seconds for one in closed_rounds(records)]
    assert len(seconds) < 6
    assert sum(seconds[:-1]) < least <= sum(seconds)
    assert ends(records).outcome == "stopped"
    assert names_all(ends(records).cause, "budget.time_s")


def test_a_session_that_measures_running_statistics_is_charged_with_its_exchange_though_no_round_opened_it():
    """Round 5 of two rounds: 1 + 2 + 3 J, and 4 J of features."""
    session = came(5, "a", exchange_s=1.0, exchange_joules=4.0, **joules(1.0, 2.0, 3.0))
    assert spent(opened(1, "a"), came(1, "a", **joules(1.0, 1.0, 1.0)), closed(1, 9.0), session).joules == 13.0
