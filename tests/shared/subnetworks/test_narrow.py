"""A narrowed network is the whole one without the neurons that give zero."""

from __future__ import annotations

import pytest
import torch

from shared.subnetworks.narrow import build_narrow_network
from shared.subnetworks.neurons import coverage, extract, read_chain
from tests.shared.algorithms.dropouts import NETS, batch, net, some, tree_of

each = pytest.mark.parametrize("name", NETS)
keeps = pytest.mark.parametrize("keep", [0.2, 0.6, 1.0])


@each
@keeps
def test_it_has_the_names_and_shapes_of_the_part(name, keep):
    layers = net(name)
    active = some(layers, keep)
    part = extract(tree_of(layers), read_chain(layers).index(active))
    small = build_narrow_network(layers, active)
    counts = {key for key in layers.state_dict() if key.endswith("num_batches_tracked")}
    assert {key: leaf.shape for key, leaf in small.state_dict().items() if key not in counts} == {
        key: leaf.shape for key, leaf in part.items()
    }
    assert small.training


@each
@keeps
@pytest.mark.parametrize("training", [False, True])
def test_it_computes_what_the_whole_does_whose_other_neurons_give_zero(name, keep, training):
    layers = net(name).train(training)
    active, (inputs, _), tree = some(layers, keep), batch(name), tree_of(layers)
    index = read_chain(layers).index(active)
    small = build_narrow_network(net(name).to("meta"), active).train(training)
    small.load_state_dict(extract(tree, index), strict=False)
    shown = coverage(index, tree)
    for key, leaf in read_chain(layers).leaves.items():
        if leaf.columns:  # nobody reads an inactive neuron
            of_columns = shown[key].any(0, keepdim=True)
            tree[key] = torch.where(of_columns, tree[key], 0.0)
    layers.load_state_dict(tree)
    torch.testing.assert_close(small(inputs), layers(inputs), rtol=1e-5, atol=1e-5)
