"""Evaluation by all devices, and devices that leave for good: when, of what, and where the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from edge_server.cli.commands import explain_shortfall
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    UpdateAccepted,
    closed_rounds,
    drop_void,
)
from edge_server.journal.runs import StoredRun, summarise_run
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.plan.evaluation import EvaluationPlan
from edge_server.plan.plan import Plan
from edge_server.replay.comparison.compare import compare_runs
from edge_server.replay.run import replay_plan as play_replay
from edge_server.replay.trace.anonymise import anonymise
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from edge_server.report.csv_export import csv_text
from edge_server.report.summarise import digest_run
from edge_server.report.targets import last_evaluated
from edge_server.rounds.check_plan import load
from edge_server.rounds.round_figures import mean_accuracy
from edge_server.trial.tables import device_lines, rounds_table
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Departure
from shared.algorithms.fedavg import fedavg
from shared.algorithms.local_only import local_only
from shared.errors import ConfigError
from shared.protocol.messages import Update
from shared.tensors.tree import Mean, State
from tests.edge_server.fleets import RUN, End, Network, Site
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.textbook import DEVICES, NAMES
from tests.naming import names_all, naming


def one_by_one(min_alive: int = 1, *, personal: bool = False) -> Algorithm:
    """Return a method of which a device leaves with every aggregation: a, then b, then c."""
    plain = local_only() if personal else fedavg()

    def aggregate(state: State, mean: Mean) -> State:
        after = plain.aggregate(state, mean)
        return State(after.tree, after.facts | {"gone": int(after.facts.get("gone", 0)) + 1})

    return replace(
        plain,
        aggregate=aggregate,
        departure=Departure(lambda state: frozenset(NAMES[: int(state.facts.get("gone", 0))]), min_alive),
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "one-by-one", one_by_one)


def make_plan(folder: Path, algorithm: str, *, rounds: int = 4, every: int = 2, **sections: Any) -> Plan:
    usual = {
        "cohort": "size = 1\nmin_devices = 3\nwait_s = 20.0",
        "more": f'[partition]\nkind = "even"\n{DEVICES}',
    }
    path = write_plan(
        folder,
        rounds=rounds,
        algorithm=f'name = "{algorithm.partition(" ")[0]}"\n{algorithm.partition(" ")[2]}',
        model='name = "mlp"\noptions = { features = 8, hidden = 8, classes = 3 }',
        hyper="batch_size = 8\nlearning_rate = 0.2",
        data=f"{write_examples(folder, 90)}\nholdout = 0.2\nvalidation = 0.1",
        evaluation=f"every = 1\ndevices_every = {every}",
        **(usual | sections),
    )
    return load(path, folder)


def run(folder: Path, plan: Plan, at: Callable[[object], bool] | None = None) -> End:
    """Run a plan; where `at` is given, with a server that dies there and comes again."""
    here = Site(Network(), plan, folder)
    return here.play((lambda: here.serve_twice(at)) if at else None)


async def until(true: Callable[[], bool]) -> None:
    """Let others go on until something is so; no virtual second passes."""
    while not true():  # noqa: ASYNC110 - it is a file that changes
        await asyncio.sleep(0)


def evaluations(records: list[AnyRecord]) -> list[Evaluated]:
    return [one for one in drop_void(records) if isinstance(one, Evaluated)]


def told(records: list[AnyRecord]) -> dict[int, tuple[str, ...]]:
    return {one.round: tuple(one.assignments) for one in records if isinstance(one, RoundOpened)}


def end_of(records: list[AnyRecord]) -> RunClosed:
    [found] = [one for one in records if isinstance(one, RunClosed)]
    assert records[-1] == found
    return found


@pytest.mark.parametrize("algorithm", ["local_only", "fedavg"])
def test_every_second_round_all_devices_evaluate(tmp_path, algorithm):
    """Also those that were not in the round; the mean is over devices where each has a model of its own."""
    _, records = run(tmp_path, make_plan(tmp_path, algorithm, rounds=5))
    found = evaluations(records)
    assert [one.round for one in found] == [2, 4, 5]
    assert all(len(one.arrived) == 1 for one in closed_rounds(records))
    for one in found:
        assert set(one.by_device) == set(NAMES)
        assert one.personal == (algorithm == "local_only")
        pairs = [(metrics["eval_accuracy"], metrics["eval_examples"]) for metrics in one.by_device.values()]
        weights = sum(weight for _, weight in pairs)
        mean = sum(share * weight for share, weight in pairs) / weights
        assert one.accuracy == pytest.approx(fmean(share for share, _ in pairs) if one.personal else mean)


def test_no_evaluation_is_owed_twice(tmp_path):
    """After the last round, which is one of those; and none where the plan says nothing of it."""
    _, records = run(tmp_path, make_plan(tmp_path, "local_only", rounds=2))
    assert [one.round for one in evaluations(records)] == [2]
    (other := tmp_path / "other").mkdir()
    _, records = run(other, make_plan(other, "local_only", rounds=2, every=0))
    assert evaluations(records) == []


MOMENTS: dict[str, Callable[[object], bool]] = {
    "its round is closed": lambda written: isinstance(written, RoundClosed) and written.round == 2,
    "one device has answered": lambda written: isinstance(written, UpdateAccepted) and written.round == 7,
    "it is recorded": lambda written: isinstance(written, Evaluated) and written.round == 2,
    "the next round is open": lambda written: isinstance(written, RoundOpened) and written.round == 3,
    "the last one is recorded": lambda written: isinstance(written, Evaluated) and written.round == 4,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cut_run_evaluates_as_if_nothing_had_happened(tmp_path, moment):
    for place in ("cut", "whole"):
        (tmp_path / place).mkdir()
    _, cut = run(tmp_path / "cut", make_plan(tmp_path / "cut", "local_only"), at=MOMENTS[moment])
    _, whole = run(tmp_path / "whole", make_plan(tmp_path / "whole", "local_only"))
    assert evaluations(cut) == evaluations(whole)
    assert [one.round for one in evaluations(cut)] == [2, 4]


def test_what_was_measured_of_a_lost_round_is_void():
    """The evaluation after it, and its costs; not those of the round before."""
    tried = [Evaluated(accuracy=0.5, by_device={}, round=number) for number in (1, 2)]
    assert drop_void([*tried, Rewound(round=2, cause="lost")])[:-1] == tried[:1]


def test_a_personal_accuracy_is_the_runs(tmp_path):
    """In the digest, hence in reports, studies and gaps; in the list of runs, in the table; after export and import."""
    _, records = run(tmp_path, make_plan(tmp_path, "local_only"))
    came = digest_run(records)
    two, four = evaluations(records)
    assert came.personal
    assert [one.accuracy for one in came.rounds] == [None, two.accuracy, None, four.accuracy]
    assert [one.global_accuracy for one in came.rounds] == [one.accuracy for one in closed_rounds(records)]
    assert last_evaluated(came).accuracy == came.device_accuracy == four.accuracy
    assert summarise_run(StoredRun(tmp_path, records)).accuracy == four.accuracy
    assert [column.heading for column in rounds_table(records).columns][2:4] == ["personal", "accuracy"]
    assert {"fleet_accuracy", "global_accuracy"} <= {line.split(",")[3] for line in csv_text([came])}
    assert names_all(device_lines(records)[0], f"{four.accuracy:.4f}")
    again = to_records(trace_of(records))
    assert evaluations(again) == [two, four]
    assert digest_run(again).rounds == came.rounds


def test_an_anonymous_trace_names_no_device_where_it_was_told_its_name(tmp_path):
    _, records = run(tmp_path, make_plan(tmp_path, "local_only", rounds=2))
    named = trace_of(records)
    for row in named.tables["decisions"]:
        row.values["device"] = row.device  # as servers before this version told it
    nameless = anonymise(named)
    assert all(row.values["device"] == row.device for row in nameless.tables["decisions"])
    assert not {row.device for row in nameless.tables["decisions"]} & set(NAMES)


def test_of_one_model_the_servers_accuracy_stays_the_runs(tmp_path):
    _, records = run(tmp_path, make_plan(tmp_path, "fedavg"))
    came = digest_run(records)
    assert not came.personal
    assert [one.accuracy for one in came.rounds] == [one.accuracy for one in closed_rounds(records)]
    assert [one.fleet_accuracy for one in came.rounds][1::2] == [one.accuracy for one in evaluations(records)]
    assert all(one.global_accuracy is None for one in came.rounds)


@pytest.mark.parametrize(("least", "rounds"), [(1, 3), (2, 2), (3, 1)])
def test_a_run_ends_when_too_few_have_not_left(tmp_path, least, rounds):
    """Who has left is in no later round, evaluates all the same, and the run is what its plan says."""
    plan = make_plan(tmp_path, f"one-by-one options = {{ min_alive = {least} }}", rounds=9, cohort="min_devices = 3")
    _, records = run(tmp_path, plan)
    assert told(records) == {number: NAMES[number - 1 :] for number in range(1, rounds + 1)}
    ended = end_of(records)
    assert ended.outcome == "finished"
    gone, left = rounds, 3 - rounds
    assert names_all(ended.cause, gone, 3, *([left, least] if left else []))
    assert explain_shortfall(records) == ""
    final = evaluations(records)[-1]
    assert (final.round, set(final.by_device)) == (rounds, set(NAMES))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_server_that_comes_again_knows_who_has_left(tmp_path, number):
    plan = make_plan(tmp_path, "one-by-one", rounds=9, cohort="min_devices = 3")
    _, records = run(tmp_path, plan, at=lambda written: isinstance(written, RoundClosed) and written.round == number)
    assert told(records) == {1: NAMES, 2: NAMES[1:], 3: NAMES[2:]}
    assert end_of(records).outcome == "finished"
    assert names_all(end_of(records).cause, 3)


def test_a_run_waits_for_one_who_has_not_left_and_then_ends(tmp_path):
    """c went away for good before its turn: of those that are connected, all have left."""
    here = Site(Network(), make_plan(tmp_path, "one-by-one", rounds=9, every=0, cohort="wait_s = 20.0"), tmp_path)

    async def play() -> tuple[End, float]:
        async with here.devices(*NAMES):
            serving = asyncio.create_task(here.serve())
            await until(lambda: (tmp_path / RUN / JOURNAL).exists() and 1 in told(read_records(tmp_path / RUN)))
            await here.stop("c")
            end = await serving
        return end, asyncio.get_running_loop().time()

    (_, records), now_s = here.network.run(play())
    assert end_of(records).outcome == "finished"
    assert names_all(end_of(records).cause, 2)
    assert now_s >= 20.0


def test_a_replay_ends_so_too_and_writes_the_same_bytes_twice(tmp_path):
    plan = make_plan(tmp_path, "one-by-one options = { personal = true }", rounds=9, cohort="min_devices = 3")
    for place in ("one", "two"):
        _, records = play_replay(plan, tmp_path / place / "run")
        assert told(records) == {1: NAMES, 2: NAMES[1:], 3: NAMES[2:]}
        assert end_of(records).outcome == "finished"
        assert names_all(end_of(records).cause, 3)
        assert [(one.round, len(one.by_device)) for one in evaluations(records)] == [(2, 3), (3, 3)]
    one, two = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "two"))
    assert one == two


def test_a_replay_measures_what_a_run_does(tmp_path):
    """The same personal models, to the bit: they live on the replayed devices' disks from round to round."""
    plan = make_plan(tmp_path, "local_only")
    _, records = run(tmp_path, plan)
    _, replayed = play_replay(plan, tmp_path / "replay")
    assert evaluations(replayed) == evaluations(records)
    found = compare_runs(records, replayed)
    for name in ("accuracy", "fleet_accuracy", "global_accuracy"):
        spread = found.spread(name)
        assert spread.exact == spread.count > 0, name


def test_devices_every_is_not_below_zero(tmp_path):
    with pytest.raises(ConfigError, match=naming("evaluation", "devices_every")):
        make_plan(tmp_path, "fedavg", every=-1)


def test_plans_of_before_are_the_same():
    """A journal whose plan says nothing of it reads as it did."""
    old = msgspec.json.decode(b'{"every": 1, "on_device": true}', type=EvaluationPlan)
    assert old.devices_every == 0


def test_each_personal_model_counts_as_much_and_one_model_by_examples():
    told = {
        name: Update(
            run=RUN, round=1, device=name, params=None, metrics={"eval_accuracy": good, "eval_examples": count}
        )
        for name, good, count in (("a", 1.0, 30.0), ("b", 0.0, 10.0))
    }
    assert mean_accuracy(told, personal=True) == 0.5
    assert mean_accuracy(told, personal=False) == 0.75
