"""Frozen training: exactly the active part moves, as it would if everything trained, and is all that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shared.errors import ConfigError
from shared.protocol.messages import Hyper
from shared.subnetworks.frozen_network import FrozenNetwork, freeze
from shared.subnetworks.neurons import all_neurons, extract, read_chain
from shared.tensors.training_step import descend
from shared.tensors.tree import Tree
from tests.naming import naming
from tests.shared.algorithms.dropouts import NETS, batch, masks, net, some, textbook, tree_of

HARD = Hyper(learning_rate=0.1, momentum=0.9, weight_decay=0.1)
each = pytest.mark.parametrize("name", NETS)
keeps = pytest.mark.parametrize("keep", [0.2, 0.6, 1.0])
ways = pytest.mark.parametrize("plain", [False, True])


def _size(name: str, *, plain: bool) -> tuple[int, ...]:
    """Return what is told of a step's inputs: of networks this small, it decides for torch's own backward."""
    return batch(name)[0].shape if plain else ()


def _train(trainable: FrozenNetwork, name: str, steps: int = 3, hyper: Hyper = HARD) -> Tree:
    momenta = Tree()
    for seed in range(steps):
        inputs, labels = batch(name, seed)
        functional.cross_entropy(trainable(inputs), labels).backward()
        descend(trainable.weights.items(), momenta, hyper)
    return trainable.tree()


@each
@keeps
@pytest.mark.parametrize(("detached", "plain"), [(False, False), (True, False), (False, True)])
def test_exactly_the_active_part_changes_and_all_else_keeps_its_bits(name, keep, detached, plain):
    layers = net(name)
    tree, active = tree_of(layers), some(layers, keep)
    trainable = freeze(layers, tree, active, _size(name, plain=plain), detached=detached)
    assert (trainable.plain is not None) == plain
    got = _train(trainable, name)
    shown = masks(layers, active)
    assert list(got) == list(tree)
    for key, leaf in tree.items():
        if key not in shown:  # BatchNorm's count of batches
            assert torch.equal(got[key], leaf)
            continue
        assert torch.equal(got[key][~shown[key]], leaf[~shown[key]]), key
        moved = (got[key] != leaf)[shown[key]]
        assert moved.float().mean() > 0.5, key  # a neuron that never fires moves by its decay at least
        if HARD.weight_decay and key.endswith("weight"):
            assert moved.all(), key


@each
@keeps
@ways
def test_three_steps_are_those_of_the_textbook(name, keep, plain):
    layers = net(name)
    tree, active = tree_of(layers), some(layers, keep)
    got = _train(freeze(layers, tree, active, _size(name, plain=plain)), name)
    expected = textbook(layers, active, [batch(name, seed) for seed in range(3)], HARD)
    for key, leaf in expected.items():
        torch.testing.assert_close(got[key], leaf, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@each
@keeps
@ways
def test_gradients_are_those_of_training_everything(name, keep, plain):
    """In 64 bits, where what rounding leaves of a gradient that is zero cannot be taken for an error."""
    layers = net(name).double()
    active, (inputs, labels) = some(layers, keep), batch(name)
    inputs = inputs.double()
    trainable = freeze(layers, tree_of(layers), active, _size(name, plain=plain))
    loss = functional.cross_entropy(trainable(inputs), labels)
    loss.backward()
    layers.train()
    dense = functional.cross_entropy(layers(inputs), labels)
    dense.backward()
    torch.testing.assert_close(loss, dense, rtol=0, atol=1e-12)
    whole = {key: leaf.grad for key, leaf in layers.named_parameters()}
    part = extract(whole, {key: pair for key, pair in trainable.index.items() if key in whole})
    product = square = 0.0
    shown = masks(layers, active)
    for key, leaf in trainable.weights.items():
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        torch.testing.assert_close(leaf.grad, part[key], rtol=0, atol=1e-12)
        product += float((whole[key] * (whole[key] * shown[key])).sum())
        square += float(leaf.grad.square().sum())
    assert product == pytest.approx(square, rel=1e-5)  # <grad F, masked grad F> = |masked grad F|^2


@each
def test_of_everything_a_step_is_the_dense_one(name):
    layers = net(name)
    active, tree = all_neurons(read_chain(layers).hidden), tree_of(layers)
    got = _train(freeze(layers, tree, active), name, steps=1)
    momenta, (inputs, labels) = Tree(), batch(name, 0)
    layers.train()
    functional.cross_entropy(layers(inputs), labels).backward()
    descend(layers.named_parameters(), momenta, HARD)
    for key, leaf in layers.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(got[key], leaf, rtol=0, atol=1e-6)


@each
def test_a_frozen_neuron_takes_part_in_what_comes_out(name):
    layers = net(name)
    active, (inputs, _), tree = some(layers, 0.5), batch(name), tree_of(layers)
    before = freeze(layers, tree, active)(inputs)
    last = list(read_chain(layers).leaves.values())[-1]
    hidden = [key for key in read_chain(layers).hidden if key != last.rows][-1]
    still = next(row for row in range(len(tree[f"{hidden}.weight"])) if row not in active[hidden])
    changed = {key: leaf.clone() for key, leaf in tree.items()}
    changed[f"{hidden}.weight"][still] += 1
    assert not torch.allclose(freeze(layers, changed, active)(inputs), before)


@each
def test_detached_gradients_are_those_of_neurons_that_are_constants(name):
    """Each layer's frozen outputs pass through `detach` in the textbook, which is what the option says."""
    layers = net(name)
    active, (inputs, labels) = some(layers, 0.5), batch(name)
    trainable = freeze(layers, tree_of(layers), active, detached=True)
    functional.cross_entropy(trainable(inputs), labels).backward()
    layers.train()
    flowing = inputs
    for key, layer in layers.named_children():
        flowing = layer(flowing.clone())
        if key in active:
            shown = torch.zeros(flowing.shape[1], dtype=torch.bool)
            shown[active[key]] = True
            shown = shown.view(1, -1, *[1] * (flowing.ndim - 2))
            flowing = torch.where(shown, flowing, flowing.detach())
    functional.cross_entropy(flowing, labels).backward()
    whole = {key: leaf.grad for key, leaf in layers.named_parameters()}
    part = extract(whole, {key: pair for key, pair in trainable.index.items() if key in whole})
    for key, leaf in trainable.weights.items():
        torch.testing.assert_close(leaf.grad, part[key], rtol=0, atol=1e-6)


@ways
def test_running_statistics_of_frozen_neurons_follow_if_they_are_told_to(plain):
    layers = net("norms")
    tree, active = tree_of(layers), some(layers, 0.5)
    size = _size("norms", plain=plain)
    got = _train(freeze(layers, tree, active, size, drifting=True), "norms", steps=1)
    layers.train()(batch("norms", 0)[0])
    for key, leaf in layers.state_dict().items():
        if "running" in key:
            torch.testing.assert_close(got[key], leaf)


@each
@ways
def test_what_is_sent_is_the_active_part_of_the_tree(name, plain):
    layers = net(name)
    trainable = freeze(layers, tree_of(layers), some(layers, 0.5), _size(name, plain=plain))
    tree = _train(trainable, name)
    part = trainable.part()
    for key, leaf in extract(tree, trainable.index).items():
        assert torch.equal(part.pop(key), leaf)
    assert not part


@ways
def test_neither_the_tree_nor_the_batch_is_written_to_and_the_network_needs_no_storage(plain):
    for name in NETS:
        layers, (inputs, labels) = net(name), batch(name)
        tree, copy = tree_of(layers), inputs.clone()
        before = {key: leaf.clone() for key, leaf in tree.items()}
        trainable = freeze(net(name).to("meta"), tree, some(layers, 0.5), _size(name, plain=plain))
        functional.cross_entropy(trainable(inputs), labels).backward()
        descend(trainable.weights.items(), Tree(), HARD)
        assert torch.equal(inputs, copy)
        assert all(torch.equal(tree[key], before[key]) for key in tree)


def test_a_step_keeps_active_input_channels_a_bit_a_relu_and_a_byte_a_window():
    layers = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 16, 4)),
    )
    inputs = torch.randn(2, 1, 8, 8)
    active = {"0": torch.tensor([1, 5]), "3": torch.tensor([0, 2, 9])}
    kept = dict[int, int]()

    def note(leaf):
        kept[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        return leaf

    with torch.autograd.graph.saved_tensors_hooks(note, lambda leaf: leaf):
        freeze(layers, tree_of(layers), active)(inputs)
    pooled, second, flat = 2 * 2 * 16, 2 * 16 * 16, 2 * 3 * 16  # the first of active neurons alone
    del kept[inputs.untyped_storage().data_ptr()]
    assert sum(kept.values()) == pooled + pooled // 8 + 4 * 2 * 2 * 16 + second // 8 + 4 * flat


def test_what_cannot_be_frozen_is_refused():
    for layers in (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(8, 2)),
        nn.Sequential(nn.Conv2d(1, 2, 2, padding="same"), nn.Flatten(), nn.Linear(8, 2)),
    ):
        with pytest.raises(ConfigError):
            freeze(layers, tree_of(layers), some(layers, 1.0))


def test_a_batch_of_one_value_a_channel_is_refused_as_torch_does():
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=naming("layer 1", "BatchNorm")):
        freeze(layers, tree_of(layers), some(layers, 1.0))(torch.zeros(1, 3))
