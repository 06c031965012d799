"""Running statistics of a network whose devices train all of it: measured anew before it is tested and kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.trainer.workspace import TaskBatches
from edge_server.journal.records import AnyRecord, Evaluated, UpdateAccepted, closed_rounds
from edge_server.plan import data as plan_data
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.rounds.running_statistics import session_number
from shared.algorithms.base import Cohort, assign_alike
from shared.data.load import load as load_examples
from shared.models.build import build_blank, build_initial
from shared.models.evaluate import score
from shared.models.running_statistics import measure_several, statistic_names
from shared.protocol.messages import Spec
from shared.tensors.tree import Mean, State, Tree, accumulate, finish_mean
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import moved, site, update_for
from tests.edge_server.textbook import NAMES, make_plan, require_equal, shares

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.virtual_time]

ROUNDS = 3
EMNIST = Spec(name="spu_emnist", options={"side": 8, "width": 4, "classes": 10})
SECTIONS = {
    "model": 'name = "spu_emnist"\noptions = { side = 8, width = 4, classes = 10 }',
    "hyper": "batch_size = 16\nlearning_rate = 0.1",
    "data": 'source = "digits"\nholdout = 0.2',
    "partition": 'kind = "dirichlet"\nalpha = 0.3',
}


def plan_of(folder: Path, batches: int | None, **sections: str) -> Plan:
    told = "" if batches is None else f"statistics_batches = {batches}"
    return make_plan(folder, ROUNDS, **(SECTIONS | {"evaluation": f"every = 2\n{told}"} | sections))


def by_devices(plan: Plan, tree: Tree, number: int, steps: int) -> Tree:
    """Return what three devices measure of a tree, the mean by batches, written down here."""
    network, mean = build_blank(plan.model).layers, Mean()
    told = assign_alike(State(), Cohort(NAMES, plan.hyper, plan.seed), {}, number)
    for name, own in zip(NAMES, shares(plan), strict=True):
        batches = TaskBatches(own, msgspec.structs.replace(told[name]), lambda: False)
        inputs = [one for _, (one, _) in zip(range(steps), batches, strict=False)]
        found, count = measure_several(network, tree, inputs)
        mean = accumulate(mean, {key: found[key] for key in statistic_names(network)}, float(count))
    return {**tree, **finish_mean(mean)}


def test_an_average_over_skewed_devices_is_tested_with_what_they_measure_of_it(tmp_path):
    """Fifteen batches of three devices after rounds 2 and 3; live as in replay, and after a kill within."""
    plan = plan_of(tmp_path, 15)
    state, records = replay_plan(plan, tmp_path / "replay")
    plain, without = replay_plan(plan_of(tmp_path, 0), tmp_path / "plain")
    assert [one.statistics_batches for one in closed_rounds(records)] == [None, 15, 15]
    assert [one.statistics_batches for one in closed_rounds(without)] == [None, None, None]
    own = statistic_names(build_blank(plan.model).layers)
    assert all(torch.equal(state.tree[key], plain.tree[key]) for key in state.tree.keys() - set(own))
    require_equal(state.tree, by_devices(plan, plain.tree, session_number(plan, ROUNDS), 5))
    test = load_examples(plan_data.test_data(plan))
    assert score(build_blank(plan.model).layers, state.tree, test).accuracy == closed_rounds(records)[-1].accuracy
    assert closed_rounds(records)[-1].accuracy > closed_rounds(without)[-1].accuracy
    here = Site(Network(), plan, tmp_path)

    def cut(written: object) -> bool:
        return isinstance(written, UpdateAccepted) and written.round == session_number(plan, 2)

    again, live = here.play(lambda: here.serve_twice(cut))
    require_equal(again.tree, state.tree)
    assert here.trained.count(("a", 2)) == 1, "the round itself is not done again"
    assert [one.accuracy for one in closed_rounds(live)] == [one.accuracy for one in closed_rounds(records)]


def accuracies(records: list[AnyRecord]) -> list[float | None]:
    return [one.accuracy for one in records if isinstance(one, Evaluated)]


def test_devices_with_models_of_their_own_measure_before_they_evaluate(tmp_path):
    """Nothing more travels, and nothing of the training changes; the server's model is nobody's, and stays."""
    sections = {"algorithm": 'name = "fedspu"', "evaluation": "every = 2\ndevices_every = 3\nstatistics_batches = {}"}
    ends = {}
    for count in (0, 4):
        evaluation = sections["evaluation"].format(count)
        plan = plan_of(tmp_path, None, algorithm=sections["algorithm"], evaluation=evaluation)
        ends[count] = replay_plan(plan, tmp_path / str(count))
    require_equal(ends[4][0].tree, ends[0][0].tree)
    rounds = [closed_rounds(records) for _, records in ends.values()]
    assert [one.bytes_up for one in rounds[0]] == [one.bytes_up for one in rounds[1]]
    assert {one.statistics_batches for one in rounds[1]} == {None}
    stored, anew = (accuracies(records)[-1] for _, records in ends.values())
    assert anew > stored
    here = Site(Network(), plan, tmp_path)
    assert accuracies(here.play()[1]) == accuracies(ends[4][1])


async def test_devices_of_before_send_nothing_back_and_statistics_stay_as_they_were_averaged(tmp_path):
    """To them the task asks for nothing; the round ends all the same, and says that nothing was measured."""
    async with site(tmp_path, rounds=1, **(SECTIONS | {"evaluation": "every = 1"})) as here:
        puppets = [await here.device(name) for name in ("a", "b")]
        for one in puppets:
            await one.answer(await one.task(), moved(here.plan, 0.25))
        for one in puppets:
            task = await one.task()
            assert (task.train, task.evaluate, task.assignment.batches_to_measure) == (False, False, 8)
            ack = await one.offer(update_for(task, b"", params=None, weight=0.0, num_examples=0))
            assert ack.verdict == "accepted"
        state, [closed] = await here.ended()
    assert (closed.outcome, closed.statistics_batches, closed.arrived) == ("aggregated", 0, ("a", "b"))
    first = build_initial(EMNIST, 0).tree()
    for key in statistic_names(build_blank(EMNIST).layers):
        assert torch.equal(state.tree[key], first[key] + 0.25)


async def test_statistics_of_one_device_do_not_spoil_the_model(tmp_path):
    """Three tell them alike; a fourth 1e30 for all, a fifth variances below zero, both of a million batches."""
    sections = SECTIONS | {"evaluation": "every = 1", "cohort": "min_devices = 5"}
    async with site(tmp_path, rounds=1, **sections) as here:
        puppets = [await here.device(name) for name in "abcde"]
        for one in puppets:
            await one.answer(await one.task(), moved(here.plan, 0.0))
        for one in puppets:
            value = {"d": 1e30, "e": -0.5}.get(one.name, 0.5)
            task, names = await one.task(), statistic_names(build_blank(here.plan.model).layers)
            tree = {name: torch.full_like(leaf, value) for name, leaf in moved(here.plan, 0.0).items() if name in names}
            batches = {"statistics_batches": 4.0 if one.name in "abc" else 1e6}
            assert (await one.answer(task, tree, metrics=batches)).verdict == "accepted"
        state, [closed] = await here.ended()
    assert closed.statistics_batches == 12
    assert {state.tree[name].unique().item() for name in statistic_names(build_blank(EMNIST).layers)} == {0.5}
