"""Pruned personalization: what it comes down to, its mean over holders, whose parts are whose."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.algorithms.fedavg import fedavg
from shared.algorithms.personal.network_parts import PersonalizationSettings
from shared.algorithms.personal.pruned_personalization import fedalt, pruned_personalization
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial
from shared.protocol.messages import Spec, count_steps
from shared.registry import build
from shared.tensors.tree import Mean, State
from tests.naming import naming
from tests.shared.algorithms.sessions import CNN, FLEET, HYPER, NORMED, SEED, Own, copied, pictures, play

PAPER = Spec(name="cnn", options={"width": 32, "hidden": 128})
PARTS = {"fc_global": (402_688, 18_816), "conv_global": (18_720, 402_826), "all_global": (421_408, 0)}
"""Of the paper's network: weights that can be pruned, and parameters of the personal part (table of spec (d))."""


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(leaf, other[key]) for key, leaf in one.items())


@pytest.mark.parametrize("split", PARTS)
def test_parts_of_the_papers_network(split):
    """421,642 parameters; biases are of their part and never pruned."""
    facts = pruned_personalization(split=split).init(build_blank(PAPER), 1).facts
    assert (facts["global_weights"], facts["personal_weights"]) == PARTS[split]


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_without_pruning_and_without_a_personal_part_it_is_fedavg(weighting):
    """As many steps a round on whole batches, three rounds with momentum; weighted alike where devices are alike."""
    fleet = {name: pictures(8, seed) for seed, name in enumerate("abc")}
    hyper = msgspec.structs.replace(HYPER, momentum=0.5)
    average = play(fedavg(), 3, fleet=fleet, hyper=hyper).state
    plain = pruned_personalization(split="all_global", prune=0.0, warmup_steps=0, global_steps=2, weighting=weighting)
    ours = play(plain, 3, fleet=fleet, hyper=hyper).state
    torch.testing.assert_close(dict(ours.tree), dict(average.tree), rtol=1e-5, atol=1e-6)


def fed_alt(rounds, together):
    """FedAlt and FedSim as Pillutla et al. print them, uniform over devices: autograd and torch's own SGD, no more."""
    start = copied(build_initial(CNN, SEED).tree())
    ours = {key: leaf for key, leaf in start.items() if key[0] in "79"}
    own = {device: {key: leaf for key, leaf in start.items() if key not in ours} for device in FLEET}
    cohort = Cohort(tuple(FLEET), HYPER, SEED, rounds)
    for number in range(1, rounds + 1):
        told = fedalt(**together).assign(State({}, {"global_weights": 315, "personal_weights": 58}), cohort, {}, number)
        after = []
        for device in FLEET:
            layers = build_initial(CNN, 3).layers
            layers.load_state_dict({**ours, **own[device]})
            named = dict(layers.named_parameters())
            first = torch.optim.SGD([leaf for key, leaf in named.items() if key not in ours], HYPER.learning_rate)
            second = torch.optim.SGD([named[key] for key in ours], HYPER.learning_rate)
            movers = 5 * [[first, second]] if together else 5 * [[first]] + 5 * [[second]]
            for (inputs, labels), moving in zip(Own(FLEET[device], told[device]), movers, strict=False):
                layers.zero_grad()
                functional.cross_entropy(layers(inputs), labels).backward()
                for sgd in moving:
                    sgd.step()
            leaves = copied(layers.state_dict())
            own[device] = {key: leaves[key] for key in own[device]}
            after.append({key: leaves[key] for key in ours})
        ours = {key: torch.stack([one[key] for one in after]).mean(0) for key in ours}
    return ours, own


@pytest.mark.parametrize("together", [{}, {"updating": "simultaneous"}])
def test_without_pruning_it_is_fedalt_and_fedsim(together):
    """Three rounds: the shared part and every device's own."""
    played = play(fedalt(**together), 3)
    ours, own = fed_alt(3, together)
    torch.testing.assert_close(dict(played.state.tree), ours)
    for device, kept in played.devices.items():
        torch.testing.assert_close(
            {key.removeprefix("personal/"): leaf for key, leaf in kept.tree.items()}, own[device]
        )


def test_a_share_of_zero_is_the_same_as_no_warm_up():
    """Warm-up is left out where it would change nothing, and what is allocated goes before the option."""
    plain = play(fedalt(), 2)
    zero = play(pruned_personalization(prune=0.7), 2, values={device: {"prune": 0.0} for device in FLEET})
    assert same(plain.state.tree, zero.state.tree)
    allocated = play(fedalt(), 2, values={device: {"prune": 0.9} for device in FLEET})
    assert same(plain.state.tree, allocated.state.tree)


def places_of(tree, count):
    """Return which weights came."""
    if "mask" in tree:
        return np.flatnonzero(np.unpackbits(tree["mask"].numpy(), bitorder="little"))
    return tree["index"].tolist() if "index" in tree else range(count)


def brute(state, played, settings):
    """Equation (26), number by number."""
    weights = {key: leaf.clone().flatten() for key, leaf in state.tree.items()}
    keys = [key for key, leaf in state.tree.items() if leaf.ndim > 1]
    places = [(key, place) for key in keys for place in range(state.tree[key].numel())]
    held = {}
    for device, result in played.results.items():
        if not result.tree:
            continue
        which = places_of(result.tree, len(places))
        count = len(FLEET[device]) if settings.weighting == "examples" else 1
        for value, place in zip(result.tree["values"].tolist(), which, strict=True):
            held.setdefault(places[place], []).append((value, count))
        for key in state.tree.keys() - set(keys):
            for place, value in enumerate(result.tree[key].tolist()):
                held.setdefault((key, place), []).append((value, count))
    for (key, place), values in held.items():
        weights[key][place] = sum(value * count for value, count in values) / sum(count for _, count in values)
    return {key: leaf.view(state.tree[key].shape) for key, leaf in weights.items()}


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (0.0, 0.4, 0.99), (1.0, 0.9, 0.97), (1.0, 1.0, 1.0)])
def test_every_weight_is_the_mean_over_its_holders(shares, weighting):
    """By brute force, old values where nobody holds one; in whatever order the updates are added."""
    settings = PersonalizationSettings(weighting=weighting)
    algorithm = pruned_personalization(weighting=weighting)
    values = {device: {"prune": share} for device, share in zip(FLEET, shares, strict=True)}
    before = play(algorithm, 1)
    played = play(algorithm, 1, values=values)
    begun = algorithm.init(build_initial(CNN, SEED), SEED)
    torch.testing.assert_close(dict(played.state.tree), brute(begun, played, settings))
    torch.testing.assert_close(dict(played.state.tree), dict(play(algorithm, 1, values=values, order="cba").state.tree))
    assert not same(before.state.tree, begun.tree)
    if shares == (1.0, 1.0, 1.0):
        assert same(played.state.tree, begun.tree)


def test_personal_parts_begin_alike_and_end_apart():
    """All devices begin with the run's own initial model, whatever the network held before; none ends as another."""
    algorithm = pruned_personalization(personal_steps=0)
    begun = build_initial(CNN, SEED).tree()
    for kept in play(algorithm).devices.values():
        assert all(torch.equal(leaf, begun[key.removeprefix("personal/")]) for key, leaf in kept.tree.items())
    devices = play(pruned_personalization()).devices
    assert not torch.equal(devices["a"].tree["personal/0.weight"], devices["b"].tree["personal/0.weight"])


def test_a_device_uses_its_own_part_with_what_came():
    """The personal model; of a device that never trained, with the part that all begin with."""
    algorithm = pruned_personalization()
    played = play(algorithm, 2)
    model, told = build_initial(CNN, 3), played.told["a"]
    served = algorithm.personal.parameters(model, played.devices["a"], played.state.tree, told)
    assert served.keys() == model.tree().keys()
    assert torch.equal(served["0.weight"], played.devices["a"].tree["personal/0.weight"])
    assert torch.equal(served["7.weight"], played.state.tree["7.weight"])
    fresh = algorithm.personal.parameters(model, State(), played.state.tree, told)
    assert torch.equal(fresh["0.weight"], build_initial(CNN, SEED).tree()["0.weight"])


@pytest.mark.parametrize("prune", [0.0, 0.5])
def test_it_learns(prune):
    """Twenty rounds more than halve the mean of the devices' own losses."""
    algorithm = pruned_personalization(prune=prune)
    wide = Spec(name="cnn", options={"side": 8, "width": 8, "hidden": 16, "classes": 3})

    def loss(played):
        losses = []
        for device, data in FLEET.items():
            tree = algorithm.personal.parameters(
                build_initial(wide, 1), played.devices[device], played.state.tree, played.told[device]
            )
            outputs = functional_call(build_blank(wide).layers, tree, (data.inputs,))
            losses.append(functional.cross_entropy(outputs, data.labels))
        return sum(losses).item()

    begun = play(fedalt(), 1, spec=wide, hyper=msgspec.structs.replace(HYPER, learning_rate=1e-12))
    assert loss(play(algorithm, 20, spec=wide)) < loss(begun) / 2


def test_what_a_task_says_of_its_steps():
    """Replay and record count steps by it: warm-up's too, none of what is left out."""
    cohort = Cohort(("a",), HYPER, SEED)

    def steps(algorithm, **values):
        state = algorithm.init(build_blank(CNN), 1)
        return count_steps(algorithm.assign(state, cohort, {"a": values}, 1)["a"], 100)

    whole = pruned_personalization(personal_steps=4, global_steps=3, warmup_steps=2)
    assert (steps(whole), steps(whole, prune=0.0), steps(whole, prune=1.0)) == (9, 7, 4)
    assert steps(pruned_personalization(split="all_global", global_steps=3, warmup_steps=1)) == 4
    assert steps(pruned_personalization(updating="simultaneous", personal_steps=4, global_steps=3)) == 5
    assert steps(pruned_personalization(importance="magnitude", personal_steps=4, global_steps=3)) == 7
    assert steps(fedavg()) == HYPER.local_epochs * 25


@pytest.mark.parametrize("split", PARTS)
def test_normalisation_belongs_to_the_personal_part_and_stays_whole_where_all_is_shared(split):
    """Running statistics are of what is trained with them; shared, they are averaged like a bias, counters rounded."""
    fleet = {name: pictures(6, seed, (3, 32, 32)) for seed, name in enumerate("abc")}
    algorithm = pruned_personalization(split=split, personal_steps=1, global_steps=1)
    played = play(algorithm, 2, spec=NORMED, fleet=fleet)
    statistics = [key for key in build_initial(NORMED, 1).tree() if "running" in key or "num_batches" in key]
    assert statistics
    assert all((key in played.state.tree) == (split == "all_global") for key in statistics)
    assert all((f"personal/{key}" in played.devices["a"].tree) == (split != "all_global") for key in statistics)


def test_a_round_without_anybody_changes_nothing():
    algorithm = pruned_personalization()
    state = algorithm.init(build_initial(CNN, SEED), SEED)
    assert algorithm.aggregate(state, Mean()) is state


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prune": 1.5}, ["prune"]),
        ({"warmup_steps": 0}, ["warmup_steps", "prune", "importance"]),
        ({"split": "half"}, ["split", "'half'"]),
        ({"updating": "never"}, ["updating", "'never'"]),
        ({"global_steps": 0}, ["global_steps"]),
        ({"weighting": "luck"}, ["weighting", "'luck'"]),
        ({"importance": "none"}, ["importance", "'none'"]),
    ],
)
def test_options_that_no_round_can_use_are_refused(options, named):
    with pytest.raises(ConfigError, match=naming("'pruned_personalization'", *named)):
        build(ALGORITHMS, Spec(name="pruned_personalization", options=options), "algorithm")


def test_a_model_without_the_shared_layers_is_refused():
    with pytest.raises(ConfigError, match=naming("split", "'conv_global'")):
        pruned_personalization(split="conv_global").init(build_blank(Spec(name="mlp")), 1)


def test_momentum_is_kept_for_the_personal_part_alone():
    """From round to round; the shared part's begins anew, since others have moved it meanwhile."""
    hyper = msgspec.structs.replace(HYPER, momentum=0.9)
    kept = play(pruned_personalization(), 2, hyper=hyper).devices["a"].tree
    assert {key for key in kept if key.startswith("momentum/")} == {
        f"momentum/{key}" for key in ("0.weight", "0.bias", "3.weight", "3.bias")
    }
