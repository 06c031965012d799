"""What every registered algorithm must do, whoever wrote it."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort, evaluated_parameters
from shared.protocol.messages import Spec, StepOptions
from shared.registry import build
from shared.tensors import file, mixed_precision
from shared.tensors.tree import Mean, State
from tests.shared.conftest import ROUND

SHORT = {"steps": 6, "supervised_steps": 8, "labelled_queue": 16, "unlabelled_queue": 16}
"""Options of rounds that are over soon; whoever has them takes a hundred steps by default."""


@pytest.fixture(params=sorted(name for name, builder in ALGORITHMS.items() if not builder().program))
def name(request):
    return request.param


@pytest.fixture
def algorithm(name):
    return build(ALGORITHMS, Spec(name=name), "algorithm")


@pytest.fixture
def brief(name):
    """Return the algorithm with rounds of a few steps: what holds of them holds of longer ones."""
    options = inspect.signature(ALGORITHMS[name]).parameters.keys() & SHORT.keys()
    return build(ALGORITHMS, Spec(name=name, options={one: SHORT[one] for one in options}), "algorithm")


def test_has_its_own_tests(name):
    """A test file imports the module or has its name; a variant is its method's builder with options."""
    builder = ALGORITHMS[name]
    while isinstance(builder, partial):
        builder = builder.func
    paths = [path for path in Path(__file__).parent.rglob("test_*.py") if path != Path(__file__)]
    own = f"test_{builder.__module__.rpartition('.')[2]}"
    assert any(path.stem == own or f"from {builder.__module__} import" in path.read_text() for path in paths)


def test_rounds_lower_the_loss(algorithm, play, fleet, model, hyper):
    """On examples that a line can part, twenty rounds more than halve the loss of all the fleet's examples.

    Of a split method whose rounds are short, as many as make a hundred steps; of one whose server trains, two.
    """
    state, kept = algorithm.init(model(), 5), {}
    told = algorithm.assign(state, Cohort(tuple(fleet), hyper, seed=1), {}, 1)

    def loss(state):
        """Of all examples, by the model that each device uses: the server's, or what it serves itself."""
        total = 0.0
        for device, data in fleet.items():
            tree = evaluated_parameters(algorithm, model(), state)
            if algorithm.personal:
                came = algorithm.broadcast(state, device, told[device])
                tree = algorithm.personal.parameters(model(), kept.get(device, State()), came, told[device])
            outputs = functional_call(model().layers, tree, (data.inputs,))
            total += functional.cross_entropy(outputs, data.labels, reduction="sum").item()
        return total

    before = loss(state)
    rounds = 2 if algorithm.server else 100 // (told["a"].steps or 5)
    assert loss(play(algorithm, fleet, rounds, kept=kept)) < before / 2


def test_is_a_function_of_its_seeds(brief, play, fleet):
    """Two runs agree in every bit, whatever torch's global generator does meanwhile."""
    first = play(brief, fleet, 2).tree
    torch.rand(3)
    again = play(brief, fleet, 2).tree
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_assigns_every_device_of_the_cohort(algorithm, model, hyper):
    """And nobody else; asking twice gives the same answer, another round other seeds."""
    state = algorithm.init(model(), 5)
    cohort = Cohort(("a", "b"), hyper, seed=1)
    told = algorithm.assign(state, cohort, {}, 1)
    assert sorted(told) == ["a", "b"]
    assert algorithm.assign(state, cohort, {}, 1) == told
    assert {one.seed for one in told.values()}.isdisjoint(
        one.seed for one in algorithm.assign(state, cohort, {}, 2).values()
    )


def test_a_round_without_updates_changes_nothing(algorithm, model):
    """No device before the deadline: aggregating nothing is the state as it was."""
    state = algorithm.init(model(), 5)
    after = algorithm.aggregate(state, Mean())
    assert after.facts == state.facts
    assert all(torch.equal(after.tree[key], leaf) for key, leaf in state.tree.items())


def test_a_leaf_beside_the_network_is_neither_evaluated_nor_sent(algorithm, model, hyper):
    """A method may keep more than the network in its state, such as the momentum of a server optimizer."""
    state = algorithm.init(model(), 5)
    more = State({**state.tree, "beside/0": torch.ones(3)}, state.facts)
    evaluated, also = (evaluated_parameters(algorithm, model(), one) for one in (state, more))
    assert evaluated.keys() == also.keys() <= model().layers.state_dict().keys()
    assert all(torch.equal(leaf, also[name]) for name, leaf in evaluated.items())
    personal = algorithm.personal and algorithm.personal.sent_for_evaluation
    for device, told in algorithm.assign(state, Cohort(("a", "b"), hyper, seed=1), {}, 1).items():
        for send in (algorithm.broadcast, *([personal] if personal else [])):
            assert send(more, device, told).keys() == send(state, device, told).keys()
    if algorithm.mixing:
        assert algorithm.mixing.shared_tree(more).keys() == algorithm.mixing.shared_tree(state).keys()


def test_a_leaf_beside_the_network_outlives_checkpoint_and_round(algorithm, model, tmp_path):
    state = algorithm.init(model(), 5)
    file.save(tmp_path / "state", State({**state.tree, "beside/0": torch.ones(3)}, state.facts))
    after = algorithm.aggregate(file.load(tmp_path / "state"), Mean())
    assert after.facts == state.facts
    assert after.tree.keys() == {*state.tree, "beside/0"}
    assert torch.equal(after.tree["beside/0"], torch.ones(3))


STEPS = {
    "optimizer": StepOptions(optimizer="adam"),
    "clip_norm": StepOptions(clip_norm=1e-3),
    "precision": StepOptions(precision="bfloat16"),
}


def test_supports_the_options_of_a_step_that_it_names(name, algorithm, play, fleet, monkeypatch):
    """Each changes what devices train, and all others are refused with the plan."""
    monkeypatch.setattr(mixed_precision, "computes_in", lambda _precision, _device: True)
    for option in algorithm.step_options:
        plain, kept = {}, {}
        play(algorithm, fleet, 2, ROUND, kept=plain)
        state = play(algorithm, fleet, 2, msgspec.structs.replace(ROUND, step_options=STEPS[option]), kept=kept)
        before = play(algorithm, fleet, 2)
        trees = [(state.tree, before.tree)] + [(kept[device].tree, plain[device].tree) for device in fleet]
        changed = [not torch.equal(leaf, was[key]) for now, was in trees for key, leaf in now.items() if key in was]
        assert any(changed), option
