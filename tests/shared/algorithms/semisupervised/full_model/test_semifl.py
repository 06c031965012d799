"""SemiFL's server half: epochs on labels, static statistics, and a step along the mean change with momentum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from shared.algorithms.base import Cohort, Result, evaluated_parameters
from shared.algorithms.semisupervised.full_model.semifl import STATISTICS_BATCH, semifl
from shared.codecs.dense import dense
from shared.data.views.pair import make_views
from shared.errors import ConfigError
from shared.protocol.messages import Assignment, Hyper, derive_seed
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State
from tests.naming import naming
from tests.shared.algorithms.semisupervised.full_model.test_semifl_device import pictures
from tests.shared.algorithms.sessions import make

HYPER = Hyper(batch_size=4, learning_rate=0.1, momentum=0.9, weight_decay=0.01)
COHORT = Cohort(("a", "b", "c"), HYPER, seed=11, rounds=10)
TOLD = Assignment(seed=1, hyper=HYPER)


def begin(algorithm, state=None, count: int = 12, number: int = 1, name: str = "normed"):
    """Return the state that a round begins with, and the one before."""
    whole, skeleton = make(name)
    before = state or algorithm.init(whole, 5)
    data = pictures(count)
    with seed_torch(number):
        return algorithm.server.train(skeleton, before, (data.inputs, data.labels), COHORT, number), before


def fold(algorithm, state, results):
    mean = algorithm.empty(state)
    for device, result in results.items():
        mean = algorithm.absorb(mean, device, TOLD, result)
    return algorithm.aggregate(state, mean)


def changes(state, seed: int):
    """Return how far a device moved its weights."""
    generator = torch.Generator().manual_seed(seed)
    names = [name.removeprefix("momentum/") for name in state.tree if name.startswith("momentum/")]
    return {name: torch.randn(state.tree[name].shape, generator=generator) for name in names}


def test_the_servers_epochs_are_a_plain_loops():
    """Weak views, clipped gradients, torch's own optimizer; twelve examples in three batches of four."""
    algorithm = semifl(server_epochs=2, mirrors=False)
    after, before = begin(algorithm)
    layers = make("normed")[0].layers.train()
    data, seed = pictures(12), derive_seed(11, 1, "supervised")
    optimizer = torch.optim.SGD(layers.parameters(), 0.1, 0.9, weight_decay=0.01, nesterov=True)
    generator, step = torch.Generator().manual_seed(seed), 0
    with seed_torch(1):
        for _ in range(2):
            for index in torch.randperm(12, generator=generator).split(4):
                step += 1
                view = make_views(data.inputs[index], ("weak",), derive_seed(seed, step, "views"), mirrors=False)[0]
                optimizer.zero_grad()
                functional.cross_entropy(layers(view), data.labels[index]).backward()
                torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
                optimizer.step()
    for name, leaf in layers.named_parameters():
        torch.testing.assert_close(after.tree[name], leaf.detach(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(after.tree[name], before.tree[name])


@pytest.mark.parametrize("count", [12, STATISTICS_BATCH + 51])
def test_statistics_are_those_of_a_plain_loop_over_the_labelled_examples(count):
    """torch's own cumulative average, over examples as they are, in their order; of 301 in two about equal batches."""
    after, _ = begin(semifl(server_epochs=1), count=count)
    layers = make("normed")[0].layers
    layers.load_state_dict(evaluated_parameters(semifl(), make("normed")[1], after), strict=False)
    layers.eval()
    for layer in layers:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
    with torch.no_grad():
        for part in pictures(count).inputs.tensor_split(math.ceil(count / STATISTICS_BATCH)):
            layers(part)
    found = {name: leaf for name, leaf in layers.state_dict().items() if "running" in name}
    assert len(found) == 6
    for name, leaf in found.items():
        torch.testing.assert_close(after.tree[name], leaf)


def test_what_is_sent_is_what_is_tested_and_every_bit_of_a_model():
    """What the server's epochs left goes down whole; what devices make of it is not tested before the next epochs."""
    algorithm = semifl()
    begun, before = begin(algorithm)
    down, model = algorithm.broadcast(begun, "a", TOLD), make("normed")[0].tree()
    assert down.keys() == model.keys() == evaluated_parameters(algorithm, make("normed")[1], begun).keys()
    assert all(
        torch.equal(leaf, evaluated_parameters(algorithm, make("normed")[1], begun)[name])
        for name, leaf in down.items()
    )
    size = sum(leaf.numel() * leaf.element_size() for leaf in model.values())
    assert dense().encode(down, None)[0].num_bytes == size
    assert all(
        torch.equal(leaf, evaluated_parameters(algorithm, make("normed")[1], before)[name])
        for name, leaf in model.items()
    )
    after = fold(algorithm, begun, {"a": Result(changes(begun, 1), 1.0, 5)})
    assert all(
        torch.equal(leaf, evaluated_parameters(algorithm, make("normed")[1], after)[name])
        for name, leaf in down.items()
    )
    assert not torch.equal(algorithm.broadcast(after, "a", TOLD)["0.weight"], down["0.weight"])


@given(seeds=st.lists(st.lists(st.integers(0, 2**32), min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_servers_step_is_torchs_along_the_pseudo_gradient(seeds):
    """w - mean w_i as the gradient of SGD with step 1 and momentum 0.5; examples and claimed weights do not count."""
    algorithm = semifl()
    state = algorithm.init(make("normed")[0], 5)
    weights = {name: state.tree[name].clone() for name in changes(state, 0)}
    optimizer = torch.optim.SGD(weights.values(), 1.0, 0.5)
    for drawn in seeds:
        moved = [changes(state, seed) for seed in drawn]
        results = {f"d{at}": Result(one, at + 1.0, at + 1) for at, one in enumerate(moved)}
        state = fold(algorithm, state, results)
        for name, leaf in weights.items():
            leaf.grad = -torch.stack([one[name] for one in moved]).mean(0)
        optimizer.step()
    for name, leaf in weights.items():
        torch.testing.assert_close(state.tree[name], leaf, rtol=1e-4, atol=1e-5)


def test_devices_that_skipped_do_not_count_and_where_all_did_nothing_changes():
    algorithm = semifl()
    state = fold(algorithm, begin(algorithm)[0], {"a": Result(changes(begin(algorithm)[0], 1), 1.0, 5)})
    trained, skipped = Result(changes(state, 2), 1.0, 5), Result({}, 1.0, 0)
    alone = fold(algorithm, state, {"a": trained})
    beside = fold(algorithm, state, {"a": trained, "b": skipped, "c": skipped})
    copied = Result({name: leaf.clone() for name, leaf in trained.tree.items()}, 1.0, 5)
    assert all(torch.equal(leaf, beside.tree[name]) for name, leaf in alone.tree.items())
    nobody = fold(algorithm, state, {"a": skipped, "b": skipped})
    assert all(torch.equal(leaf, nobody.tree[name]) for name, leaf in state.tree.items())
    assert not torch.equal(fold(algorithm, nobody, {"a": copied}).tree["0.weight"], nobody.tree["0.weight"])


def test_running_statistics_that_a_device_sends_are_not_taken():
    algorithm = semifl()
    begun = begin(algorithm)[0]
    spoilt = changes(begun, 1) | {"1.running_var": torch.full((4,), -9.0)}
    after = fold(algorithm, begun, {"a": Result(spoilt, 1.0, 5)})
    assert torch.equal(after.tree["1.running_var"], begun.tree["1.running_var"])


def test_the_servers_training_changes_no_state_but_its_own_and_is_done_again_to_the_bit():
    algorithm = semifl()
    first, before = begin(algorithm)
    kept = {name: leaf.clone() for name, leaf in before.tree.items()}
    again, _ = begin(algorithm, before)
    assert all(torch.equal(leaf, before.tree[name]) for name, leaf in kept.items())
    assert again.facts == first.facts
    assert all(torch.equal(leaf, again.tree[name]) for name, leaf in first.tree.items())


def test_a_state_that_was_read_back_in_another_order_trains_to_the_same_bits():
    """The norm that gradients are clipped to is a sum; its order is the network's, not that of the state."""
    algorithm = semifl(clip=1e-3)
    first, before = begin(algorithm)
    turned = State(dict(sorted(before.tree.items(), reverse=True)), before.facts)
    again, _ = begin(algorithm, turned)
    assert all(torch.equal(leaf, again.tree[name]) for name, leaf in first.tree.items())


def test_the_first_round_may_have_more_epochs():
    """As many as a round of that many epochs has; later ones have the usual number."""
    longer, usual = semifl(server_epochs=2, warmup_epochs=3), semifl(server_epochs=5)
    first, whole = begin(longer)[0], begin(usual)[0]
    assert all(torch.equal(leaf, whole.tree[name]) for name, leaf in first.tree.items())
    second, other = begin(longer, first, number=2)[0], begin(semifl(server_epochs=2), first, number=2)[0]
    assert all(torch.equal(leaf, other.tree[name]) for name, leaf in second.tree.items())


def test_devices_are_told_their_epochs_and_the_rounds_step_size():
    algorithm = semifl(epochs=3, least_rate=0.02)
    told = algorithm.assign(algorithm.init(make("mlp")[0], 5), COHORT, {}, 6)
    assert {one.hyper.local_epochs for one in told.values()} == {3}
    assert [one.hyper.learning_rate for one in told.values()] == pytest.approx(3 * [0.06])
    assert not algorithm.reads_labels


def test_labels_are_of_every_class_and_a_training_that_diverges_says_so():
    algorithm, (whole, skeleton), data = semifl(), make("normed"), pictures(12)
    state = algorithm.init(whole, 5)
    with pytest.raises(ConfigError, match=naming("server_data", "class 1")):
        algorithm.server.train(skeleton, state, (data.inputs[::3], data.labels[::3]), COHORT, 1)
    state.tree["8.bias"].fill_(100)
    state.tree["10.weight"].fill_(3e38)
    with pytest.raises(ConfigError, match=naming("server_data", "learning_rate")):
        algorithm.server.train(skeleton, state, (data.inputs, data.labels), COHORT, 1)


def test_nothing_to_add_up_is_no_step():
    algorithm = semifl()
    begun = begin(algorithm)[0]
    assert algorithm.aggregate(begun, Mean()).tree.keys() == begun.tree.keys()
