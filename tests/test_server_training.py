"""Server training on its own labelled examples: live, resumed, replayed."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from edge_server.journal.records import RoundOpened, UpdateAccepted, closed_rounds
from edge_server.plan import data as plan_data
from edge_server.plan import plan as plans
from edge_server.replay.run import replay_plan
from edge_server.replay.trace.transfer import make_portable
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.data import load as data
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial
from shared.models.evaluate import score
from shared.protocol.messages import derive_seed
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State
from tests.edge_server.fleets import Network, Site
from tests.edge_server.harness import write_examples
from tests.edge_server.textbook import NAMES, ROUNDS, labelled_server, make_plan, part, require_equal, shares
from tests.naming import naming
from tests.shared.algorithms.sessions import Own

numbers = itertools.count()
SECTIONS = {
    "algorithm": 'name = "labelled-server"',
    "server_data": 'source = "npz"\npath = "examples.npz"\nlimit = 20',
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "labelled-server", labelled_server)


def alone(plan: plans.Plan) -> tuple[State, list[float]]:
    """Return the last state of one loop without messages or files, and the teacher's accuracy after every round."""
    algorithm, model, accuracies = labelled_server(), build_blank(plan.model), []
    labelled, test = data.load(plan.server_data), data.load(plan_data.test_data(plan))
    state = algorithm.init(build_initial(plan.model, plan.seed), plan.seed)
    cohort = Cohort(NAMES, plan.hyper, plan.seed, plan.rounds)
    for number in range(1, plan.rounds + 1):
        told, mean = algorithm.assign(state, cohort, {}, number), Mean()
        with seed_torch(derive_seed(plan.seed, number, "_server/training")):
            state = algorithm.server.train(model, state, (labelled.inputs, labelled.labels), cohort, number)
        for name, own in zip(NAMES, shares(plan), strict=True):
            start = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, name, told[name]).items()}
            outcome = algorithm.local(build_initial(plan.model, 0), State(), start, Own(own, told[name]), told[name])
            mean = algorithm.absorb(mean, name, told[name], outcome[1])
        state = algorithm.aggregate(state, mean)
        accuracies.append(score(model.layers.eval(), part(state, teacher=True), test).accuracy)
    return state, accuracies


@pytest.fixture
def here(network, tmp_path) -> Site:
    """Return a site of its own on the network."""
    return Site(network, make_plan(tmp_path, **SECTIONS), tmp_path, name=f"labelled{next(numbers)}")


def test_live_and_replayed_it_is_what_one_process_computes_alone_bit_for_bit(here, tmp_path):
    """Student and teacher; what is evaluated is the teacher."""
    expected, accuracies = alone(here.plan)
    live, records = here.play()
    replayed, again = replay_plan(here.plan, tmp_path / "replayed")
    for state, journal in ((live, records), (replayed, again)):
        require_equal(state.tree, expected.tree)
        assert [(one.outcome, one.accuracy) for one in closed_rounds(journal)] == [
            ("aggregated", accuracy) for accuracy in accuracies
        ]
    student = part(expected, teacher=False)
    assert not any(torch.equal(leaf, student[key]) for key, leaf in part(expected, teacher=True).items())


@pytest.mark.parametrize("kind", [RoundOpened, UpdateAccepted])
def test_after_a_kill_in_a_round_its_training_is_done_again_to_the_same_bits(tmp_path, kind):
    """Updates that were stored before count: what they were trained from comes again."""
    plan = make_plan(tmp_path, **SECTIONS)
    here = Site(Network(), plan, tmp_path)
    state, records = here.play(lambda: here.serve_twice(lambda one: isinstance(one, kind) and one.round == 2))
    require_equal(state.tree, alone(plan)[0].tree)
    assert len([one for one in records if isinstance(one, UpdateAccepted)]) == ROUNDS * len(NAMES)


def test_a_missed_round_leaves_nothing_of_the_servers_training(tmp_path):
    """As it leaves nothing of what devices trained; the next begins with the state before it."""
    plan = make_plan(tmp_path, rounds=1, round="min_updates = 4", **SECTIONS)
    here = Site(Network(), plan, tmp_path)
    state, records = here.play()
    assert [one.outcome for one in closed_rounds(records)] == ["missed"]
    require_equal(state.tree, labelled_server().init(build_initial(plan.model, plan.seed), plan.seed).tree)


def test_a_plan_gives_the_server_examples_where_it_trains_and_nowhere_else(tmp_path):
    with pytest.raises(ConfigError, match=naming("labelled-server", "[server_data]")):
        make_plan(tmp_path, algorithm=SECTIONS["algorithm"])
    with pytest.raises(ConfigError, match=naming("fedavg", "[server_data]")):
        make_plan(tmp_path, server_data=SECTIONS["server_data"])


def drawn_plan(folder, drawn: str = "drawn = { per_class = 5 }", data: str = "", **sections: str) -> plans.Plan:
    """Return a plan whose server draws its examples from the devices' own data set."""
    files = 'source = "npz"\npath = "examples.npz"'
    data = f"{files}\n{data}"
    return make_plan(folder, algorithm=SECTIONS["algorithm"], server_data=f"{files}\n{drawn}", data=data, **sections)


def test_what_the_server_draws_no_device_has(tmp_path):
    """Of every class as many; the test split is whole, and has labels."""
    write_examples(tmp_path, 90)
    plan = drawn_plan(tmp_path)
    own = data.load(plan.server_data)
    assert own.labels.bincount().tolist() == [5, 5, 5]
    theirs = shares(plan)
    whole = data.load(msgspec.structs.replace(plan.data, holdout=0.0))
    rows = [row for one in (own, *theirs) for row in one.inputs.flatten(1).tolist()]
    assert sorted(rows) == sorted(whole.inputs.flatten(1).tolist())
    assert plan_data.test_data(plan).without is msgspec.UNSET


@pytest.mark.parametrize(
    ("drawn", "theirs", "key"),
    [
        ("drawn = { per_class = 5 }\nlimit = 50", "", "server_data.limit"),
        ("drawn = { per_class = 5 }", "without = { per_class = 5 }", "data.without"),
        ('labels = "none"', "", "server_data.labels"),
        ("drawn = { per_class = 5 }", 'labels = "none"', "data.labels"),
    ],
)
def test_draws_that_make_no_sense_are_refused(tmp_path, drawn, theirs, key):
    write_examples(tmp_path, 90)
    with pytest.raises(ConfigError, match=naming(key)):
        drawn_plan(tmp_path, drawn, theirs)


def test_live_and_replayed_the_servers_draw_is_left_out_alike(network, tmp_path):
    write_examples(tmp_path, 90)
    here = Site(network, drawn_plan(tmp_path), tmp_path, name=f"labelled{next(numbers)}")
    live, _ = here.play()
    require_equal(replay_plan(here.plan, tmp_path / "replayed")[0].tree, live.tree)


def test_the_servers_examples_are_found_below_the_data_root_and_named_relative_to_it(tmp_path):
    plan = make_plan(tmp_path, **SECTIONS)
    assert plan.server_data.path == str(tmp_path / "examples.npz")
    assert make_portable(plan, tmp_path).server_data.path == "examples.npz"


def test_a_plan_without_them_is_recorded_as_versions_before_recorded_it(tmp_path):
    """They refuse a key that they do not have, in a trace for example."""
    assert "server_data" not in msgspec.to_builtins(make_plan(tmp_path))
    assert "server_data" in msgspec.to_builtins(make_plan(tmp_path, **SECTIONS))
