"""Devices that evaluate rounds by ONNX Runtime: as their trainers would, with a graph that comes once."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import msgspec
import pytest

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, Evaluated, RoundOpened, closed_rounds
from edge_server.plan.plan import Plan
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from shared.protocol import evaluation_graph as graphs
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.textbook import DEVICES, NAMES, require_equal
from tests.naming import naming

pytest.importorskip("onnx")

NUMBERS = count()
ONNX = '\nruntime = "onnx"'


def make_plan(folder: Path, evaluation: str, **sections: str) -> Plan:
    usual = {
        "cohort": "min_devices = 3",
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 8, classes = 3 }',
        "hyper": "batch_size = 8\nlearning_rate = 0.2",
        "data": f"{write_examples(folder, 300)}\nholdout = 0.4",
        "more": f'[partition]\nkind = "even"\n{DEVICES}',
    }
    return load(write_plan(folder, evaluation=evaluation, **(usual | sections)), folder)


def evaluations(records: list[AnyRecord]) -> list[Evaluated]:
    return [one for one in records if isinstance(one, Evaluated)]


def require_alike(found: list[AnyRecord], expected: list[AnyRecord]) -> None:
    """Both runs' devices have evaluated the same examples, to the same but for one of them."""
    pairs = list(zip(evaluations(found), evaluations(expected), strict=True))
    assert len(pairs) == 2
    for one, other in pairs:
        assert sorted(one.by_device) == sorted(other.by_device) == sorted(NAMES)
        for device, own in one.by_device.items():
            theirs = other.by_device[device]
            assert own["eval_examples"] == theirs["eval_examples"] == 40
            assert abs(own["eval_accuracy"] - theirs["eval_accuracy"]) * 40 <= 1 + 1e-9
            assert own["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-3)


@pytest.fixture(scope="module")
def by_trainers(tmp_path_factory) -> list[AnyRecord]:
    """Return the journal of a run whose devices evaluate with torch."""
    folder = tmp_path_factory.mktemp("trainers")
    return Site(Network(), make_plan(folder, "every = 0\ndevices_every = 1"), folder).play()[1]


def test_live_it_comes_to_what_trainers_find_and_the_graph_comes_once(network, by_trainers, tmp_path):
    """The first evaluation has a graph to fetch besides, the second the parameters alone."""
    plan = make_plan(tmp_path, f"every = 0\ndevices_every = 1{ONNX}")
    state, records = Site(network, plan, tmp_path, name=f"onnx{next(NUMBERS)}").play()
    require_alike(records, by_trainers)
    assert [one.loss for one in closed_rounds(records)] == [one.loss for one in closed_rounds(by_trainers)]
    costs = costs_by_round(records)
    first, second = (costs[plan.evaluation.number(2, after)] for after in (1, 2))
    size = len(make_evaluation_graph(plan))
    for device in NAMES:
        assert first[device].bytes_down - second[device].bytes_down >= size
        assert [path.stat().st_size for path in (tmp_path / device / "graphs").iterdir()] == [size]
    if network.runner is None:
        replayed, again = replay_plan(plan, tmp_path / "replay", workers=1)
        require_equal(replayed.tree, state.tree)
        assert [one.by_device for one in evaluations(again)] == [one.by_device for one in evaluations(records)]


def test_a_device_without_torch_evaluates_and_never_trains(tmp_path):
    """It says so when it connects; it is in no cohort, and counts for none."""
    plan = make_plan(tmp_path, f"every = 0\ndevices_every = 1{ONNX}", cohort="min_devices = 2")
    here = Site(Network(), plan, tmp_path)

    async def whole():
        async with here.devices("a", "b"):
            await here.start("c", trains=False)
            return (await here.serve())[1]

    records = here.network.run(whole())
    assert {tuple(one.assignments) for one in records if isinstance(one, RoundOpened)} == {("a", "b")}
    assert [sorted(one.by_device) for one in evaluations(records)] == [["a", "b", "c"]] * 2


def test_a_device_without_torch_is_given_nothing_where_trainers_evaluate(tmp_path):
    plan = make_plan(tmp_path, "every = 0\ndevices_every = 1", cohort="min_devices = 2")
    here = Site(Network(), plan, tmp_path)

    async def whole():
        async with here.devices("a", "b"):
            await here.start("c", trains=False)
            return (await here.serve())[1]

    assert [sorted(one.by_device) for one in evaluations(here.network.run(whole()))] == [["a", "b"]] * 2


def test_one_network_has_one_graph_whatever_it_has_learnt(tmp_path):
    plan = make_plan(tmp_path, f"every = 0\ndevices_every = 1{ONNX}")
    data = make_evaluation_graph(plan)
    assert data == make_evaluation_graph(msgspec.structs.replace(plan, seed=9))
    graph = graphs.decode(data)
    assert set(graph.parameters) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert (graph.input.shape, graph.output.shape) == ((-1, 8), (-1, 3))


@pytest.mark.parametrize(
    ("algorithm", "evaluation", "named"),
    [
        ('name = "local_only"', f"every = 0\ndevices_every = 1{ONNX}", "local_only"),
        ('name = "fedavg"', f"every = 1{ONNX}", "evaluation.devices_every"),
    ],
)
def test_a_plan_that_cannot_be_evaluated_so_is_refused(tmp_path, algorithm, evaluation, named):
    with pytest.raises(ConfigError, match=naming("evaluation.runtime", named)):
        make_plan(tmp_path, evaluation, algorithm=algorithm)


def test_without_its_packages_the_server_says_which_to_install(tmp_path, monkeypatch):
    plan = make_plan(tmp_path, f"every = 0\ndevices_every = 1{ONNX}")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=naming("evaluation.runtime", "onnx", "pip install", "[release]")):
        make_evaluation_graph(plan)
