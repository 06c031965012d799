"""FedSL's server half: one step over all devices' features, in one pass or several, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Cohort
from shared.algorithms.split import fedsl_server
from shared.algorithms.split.cut_shapes import MAX_CACHED_SHAPES
from shared.algorithms.split.fedsl import fedsl, splitfed
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Hyper
from shared.tensors.generators import seed_torch
from shared.tensors.tree import State
from tests.naming import naming
from tests.shared.algorithms.sessions import CLASSES, HYPER, Fleet

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
HELD = partial(splitfed, schedule="constant")


def copy(state: State) -> State:
    return State({key: leaf.clone() for key, leaf in state.tree.items()}, state.facts)


def served(fleet: Fleet, ups, **options):
    """Serve one step from a copy of the fleet's state; torch's generator is seeded, as whoever drives it does."""
    algorithm = HELD(**options) if options else fleet.algorithm
    with seed_torch(1):
        return algorithm.split.serve(fleet.skeleton, copy(fleet.state), fleet.told(1), ups)


def ups_of(fleet: Fleet) -> dict:
    """Return what the devices send at their first step."""
    told = fleet.told(1)
    start, own = fleet.algorithm.broadcast(fleet.state, "a", told["a"]), fleet.own(told)
    return {
        device: next(fleet.algorithm.local(fleet.skeleton, State(), start, own[device], told[device]))
        for device in fleet.names
    }


def separate(skeleton: Model) -> Model:
    """Return the same network with the first layer above the cut wrapped, so that devices are served one by one."""
    layers = [*skeleton.layers]
    layers[-1].__class__ = type("Known", (layers[-1].__class__,), {})
    return Model(nn.Sequential(*layers), skeleton.cuts, skeleton.example)


@pytest.mark.parametrize("counts", [(4, 4, 4), (4, 1, 3)], ids=["equal", "unequal"])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_one_pass_for_all_is_one_pass_each(counts, drop):
    """Without layers that couple examples: the same top, gradients and losses, whatever the sizes of the batches."""
    fleet = Fleet(HELD(drop=drop), "cnn", counts)
    ups = ups_of(fleet)
    together, down = served(fleet, ups)
    one_by_one = Fleet(HELD(drop=drop), "cnn", counts)
    one_by_one.skeleton = separate(one_by_one.skeleton)
    apart, down_apart = served(one_by_one, ups)
    torch.testing.assert_close(together.tree, apart.tree, **CLOSE)
    torch.testing.assert_close(down, down_apart, **CLOSE)
    assert list(down) == ["a", "b", "c"]


def test_passes_are_shared_where_they_may_be(monkeypatch):
    """Three devices are one pass of a plain top; more examples than a pass takes are several; BatchNorm, Dropout and
    what is unknown are one pass each."""
    sizes = []
    run = fedsl_server.ServerPart.run

    def counting(top, group):
        sizes.append(len(group))
        return run(top, group)

    monkeypatch.setattr(fedsl_server.ServerPart, "run", counting)
    fleet, normed = Fleet(HELD(), "cnn", (4, 4, 4)), Fleet(HELD(), "normed", (4, 4, 4))
    ups = ups_of(fleet)
    served(fleet, ups)
    monkeypatch.setattr(fedsl_server, "PASS_EXAMPLES", 8)
    served(fleet, ups)
    served(fleet, ups, server="turns")
    served(normed, ups_of(normed))
    fleet.skeleton = separate(fleet.skeleton)
    served(fleet, ups)
    assert sizes == [3, 2, 1, *[1] * 3, *[1] * 3, *[1] * 3]


@pytest.mark.parametrize("name", ["cnn", "normed"])
def test_the_gradient_is_the_mean_and_each_device_gets_its_own(name):
    """(6), (7) and dF_k/dA~ without 1/K, by autograd; BatchNorm's statistics go from device to device in order."""
    fleet = Fleet(HELD(), name, (4, 3, 2))
    ups = ups_of(fleet)
    after, down = served(fleet, ups)
    top = fleet.skeleton.above(1)
    leaves = {key: fleet.state.tree[key].clone() for key in top.state_dict()}
    weights = {key: leaves[key].requires_grad_() for key, _ in top.named_parameters()}
    with seed_torch(1):
        for device, up in ups.items():
            features = up["features"].clone().requires_grad_()
            loss = functional.cross_entropy(functional_call(top, leaves, (features,)), up["labels"].long())
            loss.backward()
            torch.testing.assert_close(down[device]["gradient"], features.grad, **CLOSE)
            torch.testing.assert_close(down[device]["loss"], loss.detach(), **CLOSE)
    for key, leaf in leaves.items():
        moved = leaf.detach() - HYPER.learning_rate * leaf.grad / 3 if key in weights else leaf
        torch.testing.assert_close(after.tree[key], moved, **CLOSE)
    below = fleet.skeleton.below(1).state_dict()
    assert all(torch.equal(after.tree[key], fleet.state.tree[key]) for key in below)


def test_in_turns_each_device_moves_the_server_part():
    """SplitFed v2: plain SGD on the batches of one device after the other; gradients are of the part as it is then."""
    fleet = Fleet(HELD(server="turns"), "cnn", (4, 3))
    ups = ups_of(fleet)
    after, down = served(fleet, ups)
    top = fleet.skeleton.above(1)
    weights = {key: fleet.state.tree[key].clone().requires_grad_() for key in top.state_dict()}
    for device, up in ups.items():
        features = up["features"].clone().requires_grad_()
        functional.cross_entropy(functional_call(top, weights, (features,)), up["labels"].long()).backward()
        torch.testing.assert_close(down[device]["gradient"], features.grad, **CLOSE)
        with torch.no_grad():
            for leaf in weights.values():
                leaf.sub_(HYPER.learning_rate * leaf.grad)
                leaf.grad = None
    torch.testing.assert_close({key: after.tree[key] for key in weights}, {k: w.detach() for k, w in weights.items()})


def test_who_is_absent_does_not_count():
    """A step of two of three devices is the mean over these two."""
    fleet = Fleet(HELD(), "cnn", (4, 4, 4))
    ups = ups_of(fleet)
    del ups["b"]
    two, _ = served(fleet, ups)
    pair = Fleet(HELD(), "cnn", (4, 4))
    expected, _ = served(pair, {"a": ups["a"], "b": ups["c"]})
    assert all(torch.equal(two.tree[key], expected.tree[key]) for key in two.tree)


def steep(fleet: Fleet) -> Fleet:
    """Return a fleet whose first layer above the cut makes infinities of large numbers."""
    fleet.state.tree["3.weight"].mul_(30)
    return fleet


@pytest.mark.parametrize("name", ["cnn", "normed"])
def test_a_device_whose_numbers_overflow_does_not_count(name):
    """Features that are finite and too large: answered with zeros and no loss; the top moves as without that device,
    its BatchNorm as well, and the others get what they would have got."""
    fleet = steep(Fleet(HELD(), name, (4, 4, 4)))
    ups = ups_of(fleet)
    ups["b"]["features"] = torch.full_like(ups["b"]["features"], 3e38)
    fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, fleet.told(1)["b"], ups["b"])
    after, down = served(fleet, ups)
    assert set(down["b"]) == {"gradient"}
    assert not down["b"]["gradient"].any()
    assert down["b"]["gradient"].shape == ups["b"]["features"].shape
    rest = {device: up for device, up in ups.items() if device != "b"}
    if name == "normed":
        assert all(leaf.isfinite().all() for leaf in after.tree.values())
        return  # a Dropout above the cut has drawn for device b, too
    expected, down_rest = served(fleet, rest)
    torch.testing.assert_close(after.tree, expected.tree, **CLOSE)
    torch.testing.assert_close({device: down[device] for device in rest}, down_rest, **CLOSE)


def test_a_step_of_which_nothing_counts_moves_nothing():
    fleet = steep(Fleet(HELD(), "cnn", (4,)))
    ups = ups_of(fleet)
    ups["a"]["features"] = torch.full_like(ups["a"]["features"], 3e38)
    after, _ = served(fleet, ups)
    assert all(torch.equal(after.tree[key], leaf) for key, leaf in fleet.state.tree.items())
    assert after.facts["step"] == 1


def test_a_whole_round_with_missing_devices():
    """Device b misses steps 2 and 3 of 5: it says so, both learn, and the round is a function of its seeds."""
    ends = []
    for _ in range(2):
        fleet = Fleet(fedsl(period=5), "cnn", (8, 8))
        driven = fleet.play(misses=lambda step, device: device == "b" and step in {2, 3})
        assert [sorted(ups) for ups in driven.ups] == [["a", "b"], ["a"], ["a"], ["a", "b"], ["a", "b"]]
        assert [result.metrics["missed_steps"] for result in driven.results.values()] == [0.0, 2.0]
        ends.append(fleet.state.tree)
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_frozen_layers_above_the_cut_stay():
    fleet = Fleet(HELD(), "cnn", (4,))
    fleet.skeleton.layers[7].requires_grad_(False)
    after, _ = served(fleet, ups_of(fleet))
    assert torch.equal(after.tree["7.weight"], fleet.state.tree["7.weight"])
    assert not torch.equal(after.tree["9.weight"], fleet.state.tree["9.weight"])


def test_features_are_not_changed():
    """They may be views of what came."""
    fleet = Fleet(fedsl(), "cnn", (4, 4))
    ups = ups_of(fleet)
    before = {device: {key: leaf.clone() for key, leaf in up.items()} for device, up in ups.items()}
    served(fleet, ups)
    assert all(torch.equal(leaf, before[device][key]) for device, up in ups.items() for key, leaf in up.items())


def test_weight_decay_pulls_once_a_step():
    """However many devices: w - eta (g + lambda w)."""
    plain, pulled = (
        Fleet(HELD(), "cnn", (4, 4), Hyper(batch_size=4, learning_rate=0.1, weight_decay=decay)) for decay in (0.0, 0.5)
    )
    ups = ups_of(plain)
    for key, leaf in served(pulled, ups)[0].tree.items():
        above = int(key.split(".")[0]) >= 3
        expected = served(plain, ups)[0].tree[key] - (0.1 * 0.5 * plain.state.tree[key] if above else 0)
        torch.testing.assert_close(leaf, expected, **CLOSE)


def changed(up: dict, **leaves) -> dict:
    """Return what was sent with some leaves replaced, or taken away where the new one is None."""
    return {key: leaf for key, leaf in (up | leaves).items() if leaf is not None}


SPOILED = {
    "no labels": lambda up: changed(up, labels=None),
    "something else": lambda up: changed(up, extra=torch.zeros(1)),
    "no bitmap": lambda up: changed(up, keep=None),
    "labels of floats": lambda up: changed(up, labels=up["labels"].float()),
    "features of doubles": lambda up: changed(up, features=up["features"].double()),
    "features of integers": lambda up: changed(up, features=up["features"].long()),
    "a label too large": lambda up: changed(up, labels=torch.full_like(up["labels"], CLASSES)),
    "a label below zero": lambda up: changed(up, labels=up["labels"].long() - 3),
    "more labels than features": lambda up: changed(up, labels=torch.cat([up["labels"], up["labels"]])[:5]),
    "a label that is a table": lambda up: changed(up, labels=up["labels"][:, None]),
    "no examples": lambda up: changed(up, labels=up["labels"][:0], features=up["features"][:0]),
    "too many examples": lambda up: {
        key: torch.cat([leaf, leaf]) if key in {"labels", "features"} else leaf for key, leaf in up.items()
    },
    "NaN": lambda up: changed(up, features=up["features"] * float("nan")),
    "infinity": lambda up: changed(up, features=up["features"] + float("inf")),
    "fewer columns than kept": lambda up: changed(up, features=up["features"][:, 1:]),
    "a bitmap too long": lambda up: changed(up, keep=torch.cat([up["keep"], up["keep"]])),
    "a bitmap of floats": lambda up: changed(up, keep=up["keep"].float()),
    "another shape": lambda up: changed(up, shape=torch.tensor([2, 1, 4], dtype=torch.int32)),
    "a shape below zero": lambda up: changed(up, shape=torch.tensor([-2, -2, 2], dtype=torch.int32)),
    "a shape without axes": lambda up: changed(up, shape=up["shape"][:0]),
    "a huge shape": lambda up: changed(up, shape=torch.tensor([1 << 30] * 3, dtype=torch.int32)),
    "a shape of a table": lambda up: changed(up, shape=up["shape"][None]),
    "a shape of floats": lambda up: changed(up, shape=up["shape"].float()),
}


@pytest.mark.parametrize("granularity", ["column", "channel"])
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_no_server_part_takes_is_refused(spoil, granularity):
    """As it came it is admitted; with one thing wrong it is not, and says so as what came over a wire."""
    fleet = Fleet(fedsl(drop=0.4, granularity=granularity), "cnn", (4,))
    up, told = ups_of(fleet)["a"], fleet.told(1)["a"]
    fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, told, up)
    with pytest.raises(WireError):
        fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, told, spoil(up))


def test_a_batch_is_bounded_before_room_is_made_for_it():
    """Two channels, both dropped, of a million rows and columns each: a few bytes that would be terabytes."""
    fleet = Fleet(fedsl(drop=0.4, granularity="channel"), "cnn", (4,))
    up = ups_of(fleet)["a"] | {
        "features": torch.zeros(4, 0),
        "keep": torch.zeros(1, dtype=torch.uint8),
        "shape": torch.tensor([2, 1 << 20, 1 << 20], dtype=torch.int32),
    }
    with pytest.raises(WireError, match=naming((4, 2, 1 << 20, 1 << 20))):
        fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, fleet.told(1)["a"], up)


@pytest.mark.parametrize("shape", [(4, 8), (4, 3, 2, 2), (4, 2, 9, 9), (4,)])
def test_features_of_another_network_are_refused(shape):
    """Without dropout their own shape counts."""
    fleet = Fleet(HELD(), "cnn", (4,))
    up = changed(ups_of(fleet)["a"], features=torch.zeros(shape))
    with pytest.raises(WireError):
        fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, fleet.told(1)["a"], up)


def test_pictures_of_another_size_than_the_servers_own_are_refused():
    """A part of convolutions would take them: a few bytes, all dropped, that are a hundred times an honest batch."""
    layers = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, CLASSES)
    )
    model, algorithm = Model(layers, {1: 1}), fedsl(drop=0.4, granularity="channel")
    state = algorithm.init(model, 0)
    told = algorithm.assign(state, Cohort(("a",), HYPER, 0, 1), {}, 1)["a"]
    up = {
        "features": torch.zeros(4, 0),
        "labels": torch.zeros(4, dtype=torch.uint8),
        "keep": torch.zeros(1, dtype=torch.uint8),
        "shape": torch.tensor([2, 80, 80], dtype=torch.int32),
    }
    algorithm.split.check_features(model, state, told, up)
    own = replace(model, example=(1, 8, 8))
    with pytest.raises(WireError, match=naming((2, 80, 80), (1, 8, 8), (2, 8, 8))):
        algorithm.split.check_features(own, state, told, up)
    algorithm.split.check_features(own, state, told, up | {"shape": torch.tensor([2, 8, 8], dtype=torch.int32)})


def test_smaller_batches_are_admitted():
    """The last of an epoch, down to a single example."""
    fleet = Fleet(HELD(), "cnn", (4,))
    up = ups_of(fleet)["a"]
    one = {key: leaf[:1] for key, leaf in up.items()}
    told = msgspec.structs.replace(fleet.told(1)["a"], hyper=HYPER)
    fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, told, one)
    assert served(fleet, {"a": one})[1]["a"]["gradient"].shape == one["features"].shape


def test_one_example_is_refused_where_batchnorm_cannot_train_on_it():
    """It has no variance to norm by: the step would fail for all. The statistics stay as they are."""
    fleet = Fleet(HELD(), "normed", (4,))
    up, told = ups_of(fleet)["a"], fleet.told(1)["a"]
    before = copy(fleet.state)
    fleet.algorithm.split.check_features(fleet.skeleton, fleet.state, told, {key: leaf[:2] for key, leaf in up.items()})
    with pytest.raises(WireError, match="more than 1 value per channel"):
        fleet.algorithm.split.check_features(
            fleet.skeleton, fleet.state, told, {key: leaf[:1] for key, leaf in up.items()}
        )
    assert all(torch.equal(before.tree[key], leaf) for key, leaf in fleet.state.tree.items())


def test_the_server_part_is_tried_once_for_features_of_a_shape():
    """To try costs what an example costs; a batch of one is another matter, and what is refused is tried again."""
    fleet, tries = Fleet(HELD(), "cnn", (4,)), list[int]()
    up, told = ups_of(fleet)["a"], fleet.told(1)["a"]
    fleet.skeleton.layers[-1].register_forward_hook(lambda *_: tries.append(1))
    for rows in (4, 3, 4, 1, 1):
        fleet.algorithm.split.check_features(
            fleet.skeleton, fleet.state, told, {key: leaf[:rows] for key, leaf in up.items()}
        )
    assert len(tries) == 2
    for _ in range(2):
        with pytest.raises(WireError):
            fleet.algorithm.split.check_features(
                fleet.skeleton, fleet.state, told, changed(up, features=torch.zeros(4, 2, 9, 9))
            )


def test_a_device_that_names_ever_other_shapes_takes_no_more_memory():
    """What was tried is remembered of so many shapes; one more, and the first is tried anew."""
    layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, CLASSES))
    model, tries, algorithm = Model(layers, {1: 1}), list[int](), HELD()
    layers[-1].register_forward_hook(lambda *_: tries.append(1))
    state = algorithm.init(model, 0)
    told = algorithm.assign(state, Cohort(("a",), HYPER, 0, 1), {}, 1)["a"]
    for side in (*range(1, MAX_CACHED_SHAPES + 2), 1):
        up = {"features": torch.zeros(4, 2, side, 1), "labels": torch.zeros(4, dtype=torch.uint8)}
        algorithm.split.check_features(model, state, told, up)
    assert len(tries) == MAX_CACHED_SHAPES + 2


def test_seeds_of_a_cohort_differ():
    told = fedsl().assign(State(), Cohort(("a", "b"), HYPER, 3, 5), {}, 1)
    assert told["a"].seed != told["b"].seed
