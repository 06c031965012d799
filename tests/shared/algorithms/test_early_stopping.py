"""Who stops, by which loss, and what the server makes of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Batch, Outcome, Result
from shared.algorithms.early_stopping import LOSS, STOPPED, Stopping, can_stop_early, with_departures
from shared.algorithms.fedavg import fedavg
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State
from tests.shared.algorithms.dropouts import Site, network
from tests.shared.algorithms.sessions import Own, examples

METHODS = sorted(name for name, builder in ALGORITHMS.items() if can_stop_early(builder))
NOTHING = (torch.empty(0, 3), torch.empty(0, dtype=torch.int64))


def verdicts(losses: list[float]) -> list[int]:
    """Return at which participations a device stops whose losses these are."""
    model, facts, found = Model(nn.Sequential(nn.Linear(3, 2))), {}, []
    for place, loss in enumerate(losses):
        facts, metrics = Stopping(is_on=True).judge(facts, loss, model, {}, NOTHING)
        found += [place] if metrics[STOPPED] else []
    return found


@pytest.mark.parametrize(
    ("losses", "stops"), [([3, 2, 1], []), ([3, 2, 2], []), ([3, 2, 2.5], [2]), ([9], []), ([1, math.inf], [1])]
)
def test_a_device_stops_where_its_loss_is_worse_than_at_its_participation_before(losses, stops):
    """The first never stops, nor does an equal loss."""
    assert verdicts([float(loss) for loss in losses]) == stops


def test_the_loss_is_seven_parts_training_and_three_validation_in_evaluation_mode():
    """With running statistics, which stay as they are: nothing leaks from validation into the model."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    tree = {key: leaf.clone() for key, leaf in layers.state_dict().items()}
    inputs, labels = torch.randn(700, 3), torch.arange(700) % 2
    layers.train()
    facts, metrics = Stopping(is_on=True).judge({"kept": 1}, 2.0, Model(layers), tree, (inputs, labels))
    expected = functional.cross_entropy(layers.eval()(inputs), labels).item()
    assert metrics["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics[LOSS] == pytest.approx(0.7 * 2.0 + 0.3 * expected)
    assert facts == {"kept": 1, LOSS: metrics[LOSS]}
    assert all(torch.equal(leaf, tree[key]) for key, leaf in layers.state_dict().items())


def test_without_a_step_or_without_the_option_nobody_judges():
    model, facts = Model(nn.Sequential(nn.Linear(3, 2))), {LOSS: 1.0}
    assert Stopping(is_on=True).judge(facts, None, model, {}, NOTHING) == (facts, {})
    assert Stopping().judge(facts, 9.0, model, {}, NOTHING) == (facts, {})


def test_who_stops_still_counts_in_its_round_and_has_left_for_good_after_it():
    """Over rounds that it is not in, and over none at all; what was aggregated is what would have been without."""
    algorithm = with_departures(fedavg(), Stopping(is_on=True, min_alive=10))
    state, plain = State({"w": torch.zeros(1)}), State({"w": torch.zeros(1)})
    told = {name: Assignment(seed=1, hyper=Hyper(), values={}) for name in ("a", "b c")}
    for stops in ({"a": 0.0, "b c": 1.0}, {"a": 0.0}, {}):
        means = [algorithm.empty(state), Mean()]
        for device, stopped in stops.items():
            for place, one in enumerate((algorithm, fedavg())):
                result = Result({"w": torch.ones(1)}, 2.0, 2, 1.0, metrics={STOPPED: stopped})
                means[place] = one.absorb(means[place], device, told[device], result)
        state, plain = algorithm.aggregate(state, means[0]), fedavg().aggregate(plain, means[1])
        assert algorithm.departure.departed(state) == {"b c"}
        assert torch.equal(state.tree["w"], plain.tree["w"])
    assert algorithm.departure.min_alive == 10
    assert state.facts == {"left/b c": True}


def test_without_the_option_an_algorithm_is_itself():
    algorithm = fedavg()
    assert with_departures(algorithm, Stopping()) is algorithm
    assert algorithm.departure is None


class Validating(Own):
    """A device with examples that it neither trains on nor is tested with."""

    @property
    def validation(self) -> Batch:
        data = examples((1, 6, 6), 12, 8)
        return data.inputs, data.labels


@pytest.mark.parametrize("name", METHODS)
def test_every_method_judges_what_it_has_trained_by_the_devices_own_history(name):
    """By the network that it left, and by the options given; what else the device remembers stays."""
    algorithm = ALGORITHMS[name](early_stopping=True, share=0.4, min_alive=2)
    site = Site(algorithm, {"a": 0.5})
    site.tell("a")
    told, down = site.told["a"], site.down["a"]
    own, batches = network(7).tree() if name in {"fedspu", "local_only"} else {}, Validating(site.data("a"), told)

    def train(**facts: float) -> Outcome:
        with seed_torch(1):
            return algorithm.local(network(6), State(own, facts), down, batches, told)

    after, result = train(old=1)
    trained = algorithm.personal.parameters(network(), after, result.tree, told)
    inputs, labels = batches.validation
    validation = functional.cross_entropy(functional_call(network().layers.eval(), trained, (inputs,)), labels).item()
    loss = 0.4 * result.loss + 0.6 * validation
    expected = {"validation_loss": validation, LOSS: loss, STOPPED: 0.0}
    assert result.metrics == pytest.approx(expected, rel=1e-5)
    assert {"old": 1, LOSS: result.metrics[LOSS]}.items() <= after.facts.items()
    for before, stops in ((loss - 0.01, 1.0), (loss + 0.01, 0.0)):
        assert train(**{LOSS: before})[1].metrics[STOPPED] == stops
    assert algorithm.departure.min_alive == 2


@pytest.mark.parametrize("bad", [{"share": 1.5}, {"share": math.nan}, {"share": -0.1}])
def test_a_share_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="share"):
        Stopping(**bad)


@pytest.mark.parametrize("bad", ["false", 0, None])
def test_a_switch_is_true_or_false(bad):
    """The word false in quotes would be on."""
    with pytest.raises(ValueError, match="early_stopping"):
        Stopping(bad)


def test_a_run_goes_on_with_somebody():
    with pytest.raises(ValueError, match="min_alive"):
        Stopping(min_alive=0)
