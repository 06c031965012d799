"""Lightweight FedSL as a whole: what it is without its three savings, how it averages, its baselines and ablations."""

from __future__ import annotations

import math
from functools import partial

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort, Result
from shared.algorithms.split.fedsl import VARIANTS, fedsl, splitfed
from shared.algorithms.split.settings import FedslSettings
from shared.data.examples import batches
from shared.errors import ConfigError
from shared.protocol.messages import Assignment, Hyper, Spec
from shared.registry import build
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State
from tests.naming import naming
from tests.shared.algorithms.sessions import HYPER, Fleet, drive, make

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
PLAIN = partial(splitfed, schedule="constant")


def settings_of(algorithm) -> FedslSettings:
    return algorithm.local.args[0]


@pytest.mark.parametrize(("name", "cut"), [("mlp", 1), ("cnn", 1), ("cnn", 2), ("cnn", 3)])
@pytest.mark.parametrize("period", [1, 3])
def test_one_device_is_sgd_of_the_uncut_network(name, cut, period):
    """K = 1, p = 0, rho_f = 0, no quantizer, with weight decay: parameters after three rounds, to 1e-6."""
    hyper = msgspec.structs.replace(HYPER, weight_decay=0.01)
    fleet = Fleet(PLAIN(cut=cut, period=period), name, (10,), hyper)
    layers = make(name)[0].layers
    sgd = torch.optim.SGD(layers.parameters(), hyper.learning_rate, weight_decay=hyper.weight_decay)
    for number in (1, 2, 3):
        fleet.play()
        told = fleet.told(number)["a"]
        data = batches(fleet.data["a"], batch_size=4, epochs=period, seed=told.seed)
        for _, (inputs, labels) in zip(range(period), data, strict=False):
            sgd.zero_grad()
            functional.cross_entropy(layers(inputs), labels).backward()
            sgd.step()
    torch.testing.assert_close(fleet.state.tree, dict(layers.state_dict()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("counts", [(8, 8, 8), (3, 10, 6)], ids=["equal", "unequal"])
def test_several_devices_are_the_papers_equations(counts):
    """One round of three steps: each bottom by its own batch's mean loss (8), (13), the top by the mean over devices
    of those (6), (7), then the mean of the bottoms (14), written down as autograd on one graph a step."""
    fleet = Fleet(PLAIN(period=3), "cnn", counts)
    told, start = fleet.told(1), {key: leaf.clone() for key, leaf in fleet.state.tree.items()}
    fleet.play()
    below = set(fleet.skeleton.below(1).state_dict())
    bottoms = {device: {key: start[key].clone().requires_grad_() for key in below} for device in fleet.names}
    top = {key: leaf.clone().requires_grad_() for key, leaf in start.items() if key not in below}
    own = {device: iter(one) for device, one in fleet.own(told).items()}
    for _ in range(3):
        losses = []
        for device in fleet.names:
            inputs, labels = next(own[device])
            outputs = functional_call(fleet.skeleton.layers, {**bottoms[device], **top}, (inputs,))
            losses.append(functional.cross_entropy(outputs, labels))
        torch.stack(losses).sum().backward()
        with torch.no_grad():
            for leaf in [leaf for bottom in bottoms.values() for leaf in bottom.values()]:
                leaf.sub_(HYPER.learning_rate * leaf.grad)
                leaf.grad = None
            for leaf in top.values():
                leaf.sub_(HYPER.learning_rate * leaf.grad / len(fleet.names))
                leaf.grad = None
    expected = {key: torch.stack([bottom[key] for bottom in bottoms.values()]).mean(0) for key in below} | top
    assert fleet.state.tree.keys() == expected.keys()
    for key, leaf in expected.items():
        torch.testing.assert_close(fleet.state.tree[key], leaf.detach(), **CLOSE)


def test_two_cuts_learn_the_same():
    """Where the network is cut changes what travels and not what is learned, as long as all of it travels."""
    ends = []
    for cut in (1, 2, 3):
        fleet = Fleet(PLAIN(cut=cut, period=2), "cnn", (10,))
        for _ in range(2):
            fleet.play()
        ends.append(fleet.state.tree)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], **CLOSE)


def test_the_average_is_arithmetic_with_zeros_included():
    """Weights 1 and 3 of examples count alike: [2, 0] and [4, 6] give [3, 3]; counters of BatchNorm are rounded."""
    algorithm = fedsl()
    state = State({"0.weight": torch.zeros(1, 2), "0.steps": torch.tensor(9), "1.top": torch.ones(1)}, {"step": 4})
    mean, told = Mean(), Assignment(seed=1, hyper=Hyper())
    for weight, values, steps in ((1.0, [2.0, 0.0], 5), (3.0, [4.0, 6.0], 6)):
        tree = {"0.weight": torch.tensor([values]), "0.steps": torch.tensor(steps)}
        coverage = {"0.weight": torch.tensor([values]) != 0}  # as a codec may say that leaves zeros out
        mean = algorithm.absorb(mean, "a", told, Result(tree, weight, 1, coverage=coverage))
    after = algorithm.aggregate(state, mean)
    assert after.tree["0.weight"].tolist() == [[3.0, 3.0]]
    assert (after.tree["0.steps"].item(), after.tree["0.steps"].dtype) == (6, torch.int64)
    assert after.tree["1.top"].tolist() == [1.0]
    assert after.facts == {"step": 4}


@pytest.mark.parametrize("with_coverage", [True, False])
def test_holders_and_weights_by_hand(with_coverage):
    """Over those who have not pruned it: [2, 6, 0] of [2, 0, 0] and [., 6, 0]; weighted 1 : 3, [., 3] is 2.5 / 3.5."""
    told = Assignment(seed=1, hyper=Hyper())

    def mean_of(algorithm, *contributions):
        mean = Mean()
        for weight, values in contributions:
            tree = {"0.weight": torch.tensor([values]), "0.bias": torch.tensor([values[0]])}
            coverage = {"0.weight": tree["0.weight"] != 0} if with_coverage else {}
            mean = algorithm.absorb(mean, "a", told, Result(tree, weight, 1, coverage=coverage))
        start = State({"0.weight": torch.ones(1, 3), "0.bias": torch.ones(1)})
        return algorithm.aggregate(start, mean).tree

    held = mean_of(fedsl(average="holders"), (1.0, [2.0, 0.0, 0.0]), (3.0, [0.0, 6.0, 0.0]))
    assert held["0.weight"].tolist() == [[2.0, 6.0, 0.0]]
    assert held["0.bias"].tolist() == [1.0]  # a bias is not pruned: a zero there is a value
    weighted = mean_of(fedsl(weighted=True), (1.0, [4.0, 0.0, 1.0]), (3.0, [2.0, 4.0, 1.0]))
    assert weighted["0.weight"].tolist() == [[2.5, 3.0, 1.0]]


def test_the_support_of_the_average_is_the_union():
    """Hence no sparser than the densest of the devices; denser than all of them where their data differ."""
    fleet = Fleet(fedsl(sparsity=0.6, period=4), "cnn", (8, 8, 8, 8), rounds=1)
    driven = fleet.play()
    supports = [result.tree["0.weight"] != 0 for result in driven.results.values()]
    union = torch.stack(supports).any(0)
    average = fleet.state.tree["0.weight"] != 0
    assert torch.equal(average, union)
    assert int(average.sum()) >= max(int(each.sum()) for each in supports)
    assert not torch.equal(supports[0], supports[1])


def test_only_the_client_part_goes_down_and_up():
    fleet = Fleet(fedsl(cut=2), "normed")
    below = set(fleet.skeleton.below(2).state_dict())
    assert set(fleet.algorithm.broadcast(fleet.state, "a", fleet.told(1)["a"])) == below
    driven = fleet.play()
    start = fleet.algorithm.broadcast(fleet.state, "a", fleet.told(1)["a"])
    for result in driven.results.values():
        assert list(result.tree) == list(start)
        assert all(result.tree[key].dtype == leaf.dtype for key, leaf in start.items())


def test_assignments_say_where_in_the_schedules_a_round_is():
    """Round 3 of 10, I = 4 rounds of 2 batches: steps 17 to 24 of 80, and an epoch a step so that none lacks."""
    algorithm = fedsl(period=4, steps_per_round=2)
    cohort = Cohort(("a", "b"), HYPER, seed=1, rounds=10)
    told = algorithm.assign(State(), cohort, {"b": {"share": 0.5}}, 3)
    assert [one.steps for one in told.values()] == [8, 8]
    assert told["a"].values == {"first_step": 16, "total_steps": 80}
    assert told["b"].values == {"first_step": 16, "total_steps": 80, "share": 0.5}
    assert told["a"].hyper == msgspec.structs.replace(HYPER, local_epochs=8)


def test_step_sizes():
    """Cosine: all at the first of T = 20 steps, half before the eleventh, and the last is not zero yet; or constant."""
    told = Assignment(seed=1, hyper=HYPER, values={"first_step": 0, "total_steps": 20})
    cosine = [settings_of(fedsl()).step_size(told, step) for step in range(1, 21)]
    assert cosine[0] == HYPER.learning_rate
    assert cosine[10] == pytest.approx(HYPER.learning_rate / 2)
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[-1] == pytest.approx(HYPER.learning_rate * (1 + math.cos(math.pi * 19 / 20)) / 2)
    assert cosine[-1] > 0
    constant = {settings_of(fedsl(schedule="constant")).step_size(told, step) for step in (1, 7, 20)}
    assert constant == {HYPER.learning_rate}


def test_both_halves_step_at_the_same_rate():
    """With a cosine over four rounds of two steps, one device is SGD with that schedule."""
    fleet = Fleet(splitfed(period=2), "mlp", (8,))
    layers = make("mlp")[0].layers
    for number in range(1, 5):
        fleet.play()
        data = batches(fleet.data["a"], batch_size=4, epochs=1, seed=fleet.told(number)["a"].seed)
        for step, (inputs, labels) in enumerate(data):
            rate = HYPER.learning_rate / 2 * (1 + math.cos(math.pi * (2 * (number - 1) + step) / 8))
            layers.zero_grad()
            functional.cross_entropy(layers(inputs), labels).backward()
            with torch.no_grad():
                for weight in layers.parameters():
                    weight.sub_(rate * weight.grad)
    torch.testing.assert_close(fleet.state.tree, dict(layers.state_dict()), **CLOSE)


def test_a_missed_round_does_not_delay_the_servers_schedule():
    """A server that served nothing in round 1 steps in round 2 at that round's place."""
    fleet = Fleet(splitfed(period=2), "mlp", (8,))
    told = fleet.told(2)
    assert drive(fleet.algorithm, fleet.skeleton, fleet.state, told, fleet.own(told)).state.facts["step"] == 4


def test_sessions_of_a_process_do_not_disturb_each_other():
    """Side by side or one after the other, whatever torch's global generator does: the same bits."""
    fleet = Fleet(fedsl(sparsity=0.5, drop=0.3), "cnn")
    told = fleet.told(1)
    both = drive(fleet.algorithm, fleet.skeleton, fleet.state, told, fleet.own(told))
    torch.rand(5)
    session = fleet.algorithm.local(
        fleet.skeleton, State(), fleet.algorithm.broadcast(fleet.state, "b", told["b"]), fleet.own(told)["b"], told["b"]
    )
    sent = next(session)
    for step, (ups, downs) in enumerate(zip(both.ups, both.downs, strict=True), 1):
        assert all(torch.equal(sent[key], ups["b"][key]) for key in sent)
        try:
            sent = session.send(downs["b"])
        except StopIteration as done:
            assert step == told["b"].steps
            alone = done.value[1].tree
    assert all(torch.equal(alone[key], leaf) for key, leaf in both.results["b"].tree.items())


def test_the_skeleton_stays_as_it_was():
    """No storage, and in the mode that it had: others score with it in between."""
    fleet = Fleet(fedsl(), "normed")
    for mode in (True, False):
        fleet.skeleton.layers.train(mode)
        fleet.play()
        assert all(layer.training is mode for layer in fleet.skeleton.layers.modules())
    assert all(leaf.is_meta for leaf in fleet.skeleton.layers.state_dict().values())


def test_batchnorm_of_devices_is_averaged_and_neither_pruned_nor_quantized():
    """With nine tenths pruned and one bit, running statistics are those of the unpruned network's forward passes."""
    rough, plain = (
        Fleet(partial(splitfed, period=1, **options)(), "normed", (8, 8), rounds=1)
        for options in ({"sparsity": 0.9, "bits": 1}, {})
    )
    driven = [fleet.play() for fleet in (rough, plain)]
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        for device in rough.names:
            assert torch.equal(driven[0].results[device].tree[key], driven[1].results[device].tree[key])
        values = [result.tree[key].double() for result in driven[0].results.values()]
        torch.testing.assert_close(rough.state.tree[key].double(), sum(values) / 2)
    assert rough.state.tree["1.num_batches_tracked"].item() == 1
    assert (rough.state.tree["1.weight"] != 0).all()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("splitfed", {"period": 1, "sparsity": 0.0, "bits": 32, "drop": 0.0}),
        ("splitfed2", {"period": 1, "sparsity": 0.0, "bits": 32, "drop": 0.0, "server": "turns"}),
        ("fedsl_pruning", {"period": 1, "bits": 32, "drop": 0.0}),
        ("fedsl_quantizer", {"period": 1, "sparsity": 0.0, "drop": 0.0}),
        ("fedsl_element", {"granularity": "element"}),
        ("fedsl_channel", {"granularity": "channel"}),
        ("fedsl_magnitude", {"importance": "magnitude"}),
        ("fedsl_holders", {"average": "holders"}),
    ],
)
def test_baselines_and_ablations_are_the_method_with_settings_replaced(name, changed):
    """Nothing else differs; a plan may still set what they leave open."""
    full = settings_of(fedsl(cut=2))
    got = settings_of(build(ALGORITHMS, Spec(name=name, options={"cut": 2}), "algorithm"))
    differing = {key: value for key, value in vars(got).items() if value != vars(full)[key]}
    assert differing == changed


def test_every_variant_is_tested_above():
    assert set(VARIANTS) == {
        *("splitfed", "splitfed2", "fedsl_pruning", "fedsl_quantizer", "fedsl_element", "fedsl_channel"),
        *("fedsl_magnitude", "fedsl_holders"),
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sparsity": 1.0}, ["sparsity", "[0, 1)"]),
        ({"drop": 1.0}, ["drop", "[0, 1)"]),
        ({"drop": float("nan")}, ["drop", "nan"]),
        ({"bits": 0}, ["bits", 1, 32]),
        ({"bits": 33}, ["bits", 1, 32]),
        ({"period": 0}, ["period", 1]),
        ({"granularity": "row"}, ["granularity", "'row'", "column, channel, element"]),
        ({"importance": "luck"}, ["importance", "'luck'"]),
        ({"schedule": "steep"}, ["schedule", "'steep'"]),
        ({"nonsense": 1}, ["'nonsense'", "cut, period"]),
    ],
)
def test_what_is_no_such_method_is_refused(options, named):
    with pytest.raises(ConfigError, match=naming("'fedsl'", *named)):
        build(ALGORITHMS, Spec(name="fedsl", options=options), "algorithm")


def test_a_cut_that_the_model_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=naming("cut", 7)):
        fedsl(cut=7).init(make("cnn")[0], 0)


def test_momentum_is_refused():
    """It would move what is pruned."""
    cohort = Cohort(("a",), Hyper(momentum=0.9), seed=1)
    with pytest.raises(ConfigError, match=naming("momentum", 0.9)):
        fedsl().assign(State(), cohort, {}, 1)


def test_training_is_a_function_of_its_seeds():
    """Twice the same run with all that is random in it, Dropout of the top included: the same bits."""
    ends = []
    for noise in (1, 2):
        with seed_torch(noise):
            fleet = Fleet(fedsl(cut=2, period=2), "normed", (8, 6), rounds=2)
            fleet.play()
            fleet.play()
            ends.append(fleet.state.tree)
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
