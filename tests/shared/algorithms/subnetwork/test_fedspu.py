"""FedSPU: what a device keeps, what it sends, and what the server's mean is over."""

from __future__ import annotations

from itertools import permutations

import msgspec
import pytest
import torch
from torch import nn

from shared.algorithms.base import Cohort, Result
from shared.algorithms.fedavg import fedavg
from shared.algorithms.subnetwork.fedspu import fedspu
from shared.algorithms.subnetwork.random_dropout import random_dropout
from shared.codecs.dense import dense
from shared.errors import ConfigError, TaskFailed, WireError
from shared.models.base import Model
from shared.models.build import build_initial
from shared.protocol.messages import Hyper, Spec
from shared.subnetworks.neurons import PREFIX, count_parameters, coverage, draw_neurons, extract, read_chain
from shared.tensors.generators import seed_torch
from shared.tensors.tree import State, Tree
from tests.shared.algorithms.sessions import Own, examples, normed

HYPER = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=0.01)
SPEC = Spec(name="cnn", options={"side": 8, "width": 6, "hidden": 20, "classes": 3})


def same(one: Tree, two: Tree) -> bool:
    return one.keys() == two.keys() and all(torch.equal(leaf, two[key]) for key, leaf in one.items())


def fresh(model: Model, seed: int) -> Tree:
    """Return parameters and running statistics that are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: leaf.clone() if leaf.ndim == 0 else torch.rand(leaf.shape, generator=generator) + 0.1
        for key, leaf in model.tree().items()
    }


@pytest.fixture
def network() -> Model:
    with seed_torch(5):
        return normed()


def begun(algorithm, network, shares: dict[str, float], number: int = 1):
    """Return the server's state, and what devices with these shares are told."""
    state = algorithm.init(network, 5)
    cohort = Cohort(tuple(shares), HYPER, seed=11)
    allocation = {device: {"keep": share} for device, share in shares.items()}
    return state, algorithm.assign(state, cohort, allocation, number)


def test_a_device_changes_what_is_active_and_keeps_all_else_to_the_bit(network):
    """With momentum and weight decay; what it sends is the active part of what it keeps."""
    algorithm = fedspu()
    state, told = begun(algorithm, network, {"a": 0.5})
    own = State(fresh(network, 1), {"old": 1})
    down = algorithm.broadcast(state, "a", told["a"])
    after, result = algorithm.local(network, own, down, Own(examples((1, 6, 6), 10), told["a"]), told["a"])
    layout = read_chain(network.layers)
    index = layout.index(draw_neurons(layout.hidden, 0.5, told["a"].seed))
    masks = coverage(index, own.tree)
    assert after.facts == {"old": 1}
    assert same(result.tree, extract(after.tree, index))
    assert (result.weight, result.num_examples) == (10.0, 10)
    for key, leaf in own.tree.items():
        mask = masks.get(key, torch.full(leaf.shape, key in index))
        assert torch.equal(after.tree[key][~mask], leaf[~mask]), key
        assert not torch.equal(after.tree[key][mask], leaf[mask]) or key not in index, key
        assert not torch.equal(after.tree[key][mask], state.tree[key][mask]) or key not in index, key


def test_what_came_is_merged_before_anything_is_trained(network):
    """Without an epoch, what is kept is what came and, where nothing came, what was there."""
    algorithm = fedspu()
    state, told = begun(algorithm, network, {"a": 0.5})
    one = msgspec.structs.replace(told["a"], hyper=msgspec.structs.replace(HYPER, local_epochs=0))
    own = State(fresh(network, 1))
    down = algorithm.broadcast(state, "a", one)
    after, result = algorithm.local(network, own, down, Own(examples((1, 6, 6), 10), one), one)
    layout = read_chain(network.layers)
    masks = coverage(layout.index(draw_neurons(layout.hidden, 0.5, one.seed)), own.tree)
    for key, leaf in after.tree.items():
        expected = torch.where(masks[key], state.tree[key], own.tree[key]) if key in masks else leaf
        assert torch.equal(leaf, expected), key
    assert same(result.tree, {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)})
    assert result.loss is None


def test_a_first_participation_begins_with_what_the_run_began_with():
    """Derived from the model's builder and the run's seed; the frozen part of it is bit for bit that."""
    algorithm, model = fedspu(keep=0.5), build_initial(SPEC, 7)
    state = algorithm.init(build_initial(SPEC, 5), 5)
    moved = State({key: leaf + 1 for key, leaf in state.tree.items()}, state.facts)
    told = algorithm.assign(state, Cohort(("a",), HYPER, seed=11), {}, 4)["a"]
    down = algorithm.broadcast(moved, "a", told)
    assert same(algorithm.personal.parameters(model, State(), down, told), build_initial(SPEC, 5).tree())
    after, _ = algorithm.local(model, State(), down, Own(examples((1, 8, 8), 9), told), told)
    layout = read_chain(model.layers)
    for key, mask in coverage(layout.index(draw_neurons(layout.hidden, 0.5, told.seed)), state.tree).items():
        assert torch.equal(after.tree[key][~mask], state.tree[key][~mask])
    assert same(algorithm.personal.parameters(model, after, down, told), after.tree)


def test_a_personal_model_that_cannot_be_had_fails_the_task(network):
    algorithm = fedspu()
    _, told = begun(algorithm, network, {"a": 0.5})
    with pytest.raises(TaskFailed, match="seed"):
        algorithm.personal.parameters(network, State(), {}, told["a"])
    with pytest.raises(TaskFailed, match="network"):
        algorithm.personal.parameters(network, State({"0.weight": torch.zeros(1)}), {}, told["a"])


SHARES = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 1.0, "e": 0.25}
"""Full models and parts of them in one mean: what the authors' code does not average."""


def folded(algorithm, network, state, told, order):
    mean = algorithm.empty(state)
    for place in order:
        index = draw_index(network, told[place])
        part = extract(fresh(network, ord(place)), index)
        mean = algorithm.absorb(mean, place, told[place], Result(part, float(ord(place) - 90), 1))
    return algorithm.aggregate(state, mean)


def draw_index(network, told):
    layout = read_chain(network.layers)
    return layout.index(draw_neurons(layout.hidden, told.values["keep"], told.seed))


@pytest.mark.parametrize("devices", ["abcde", "bce", "c", "ad"])
def test_the_mean_is_over_those_who_hold_a_number_one_number_at_a_time(network, devices):
    """By loops over all coordinates, running statistics among them; where nobody holds one it keeps its bits."""
    algorithm = fedspu()
    state, told = begun(algorithm, network, SHARES)
    got = folded(algorithm, network, state, told, devices).tree
    masks = {device: coverage(draw_index(network, told[device]), state.tree) for device in devices}
    values = {device: fresh(network, ord(device)) for device in devices}
    alone = 0
    for key, before in state.tree.items():
        if key.endswith("num_batches_tracked"):
            assert torch.equal(got[key], before)
            continue
        for place, old in enumerate(before.flatten().tolist()):
            holders = [device for device in devices if key not in masks[device] or masks[device][key].flatten()[place]]
            if not holders:
                assert got[key].flatten()[place].item() == old
                alone += 1
                continue
            total = sum(ord(device) - 90 for device in holders)
            expected = sum((ord(one) - 90) * values[one][key].flatten()[place].item() for one in holders) / total
            assert got[key].flatten()[place].item() == pytest.approx(expected, rel=1e-5)
    assert bool(alone) == (not {"a", "d"} & set(devices))


def test_the_order_of_absorbing_matters_only_in_the_last_bits(network):
    algorithm = fedspu()
    state, told = begun(algorithm, network, SHARES)
    first = folded(algorithm, network, state, told, "abcde").tree
    for order in list(permutations("abcde"))[::17]:
        torch.testing.assert_close(folded(algorithm, network, state, told, order).tree, first, rtol=1e-5, atol=1e-6)


def test_a_codec_that_sends_single_values_covers_them_alone(network):
    """A mask of the smaller leaf lands where the leaf does."""
    algorithm = fedspu()
    state, told = begun(algorithm, network, {"b": 0.5})
    part = extract(fresh(network, 3), draw_index(network, told["b"]))
    sent = {key: torch.rand(leaf.shape) < 0.5 for key, leaf in part.items() if leaf.ndim > 1}
    after = algorithm.aggregate(
        state, algorithm.absorb(algorithm.empty(state), "b", told["b"], Result(part, 2.0, 1, coverage=sent))
    )
    for key, leaf in extract(after.tree, draw_index(network, told["b"])).items():
        before = extract(state.tree, draw_index(network, told["b"]))[key]
        torch.testing.assert_close(
            leaf, torch.where(sent.get(key, torch.tensor(1, dtype=torch.bool)), part[key], before)
        )


@pytest.mark.parametrize("build", [fedspu, random_dropout])
def test_with_whole_models_it_is_fedavg(build, play, fleet):
    """The same values to the tolerance of floats, over rounds."""
    got, expected = play(build(), fleet, 3).tree, play(fedavg(), fleet, 3).tree
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [0.2, 0.4, 1.0])
def test_bytes_are_the_formula_and_those_of_dropout(network, keep):
    """One bit a neuron, a byte begun counts whole, and four bytes a value down; four bytes a value up."""
    sizes = set()
    for build in (fedspu, random_dropout):
        algorithm = build(keep=keep)
        state = algorithm.init(network, 5)
        told = algorithm.assign(state, Cohort(("a",), HYPER, seed=11), {}, 1)["a"]
        down = algorithm.broadcast(state, "a", told)
        own = State(fresh(network, 1))
        _, result = algorithm.local(network, own, down, Own(examples((1, 6, 6), 10), told), told)
        sizes.add(tuple(dense().encode(tree, None)[0].num_bytes for tree in (down, result.tree)))
        algorithm.check_update(told, down, {key: leaf.to("meta") for key, leaf in result.tree.items()})
    layout = read_chain(network.layers)
    active = count_parameters(layout.index(draw_neurons(layout.hidden, keep, told.seed)), state.tree)
    bitmaps = sum(-(-count // 8) for count in layout.hidden.values())
    assert sizes == {(bitmaps + 4 * active, 4 * active)}


def test_devices_with_whole_models_are_given_the_very_same_leaves(network):
    """So that they share one transmission; a broadcast of a part is a device's own."""
    algorithm = fedspu()
    state, told = begun(algorithm, network, SHARES)
    down = {device: algorithm.broadcast(state, device, one) for device, one in told.items()}
    assert all(leaf is down["d"][key] for key, leaf in down["a"].items())
    assert not any(leaf is down["e"][key] for key, leaf in down["c"].items() if key != "10.bias")


def test_what_is_no_part_of_what_went_down_is_refused(network):
    """On either side: a bitmap up, a full leaf, a missing bitmap, leaves of another share."""
    algorithm = fedspu()
    state, told = begun(algorithm, network, {"a": 0.5, "b": 0.25})
    down, other = (algorithm.broadcast(state, device, told[device]) for device in "ab")
    for up in (down, state.tree, {key: leaf for key, leaf in other.items() if not key.startswith(PREFIX)}):
        with pytest.raises(WireError):
            algorithm.check_update(told["a"], down, up)
    bare = {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)}
    mixed = bare | {key: leaf for key, leaf in other.items() if key.startswith(PREFIX)}
    for came in (bare, mixed, down | {"0.weight": state.tree["0.weight"]}, down | {"x": torch.zeros(1)}):
        with pytest.raises(WireError):
            algorithm.local(network, State(fresh(network, 1)), came, Own(examples((1, 6, 6), 4), told["a"]), told["a"])


def test_devices_are_told_their_share_their_name_and_where_all_began(network):
    state, told = begun(fedspu(keep=0.5), network, {"a": 0.25})
    assert told["a"].values == {"keep": 0.25, "model_seed": 5}
    cohort = Cohort(("a", "b"), HYPER, seed=11)
    assert fedspu(keep=0.5).assign(state, cohort, {}, 1)["b"].values["keep"] == 0.5


@pytest.mark.parametrize(
    "bad", [{"keep": 0.0}, {"keep": 1.5}, {"share": 2.0}, {"early_stopping": True, "min_alive": 0}]
)
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"keep|share|min_alive"):
        fedspu(**bad)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), "circular"),
        (nn.BatchNorm2d(3, momentum=None), "momentum"),
    ],
)
def test_what_no_device_can_train_in_part_is_refused_before_the_run(layer, why):
    layers = nn.Sequential(nn.Conv2d(1, 3, 3), layer, nn.Flatten(), nn.Linear(48, 2))
    with pytest.raises(ConfigError, match=why):
        fedspu().init(Model(layers), 0)
