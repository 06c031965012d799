"""Choice of frozen layers by shape: used only where they save time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.models.cnn import cnn
from shared.models.spu import spu_emnist
from shared.subnetworks.frozen_payoff import is_worth_freezing
from shared.subnetworks.neurons import first_neurons, read_chain
from tests.shared.algorithms.dropouts import NETS, batch, net


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    )


def _pays(layers: nn.Sequential, keep: float, size: tuple[int, ...]) -> bool:
    layout = read_chain(layers)
    return is_worth_freezing(layers.to("meta"), layout.index(first_neurons(layout.hidden, keep)), size)


@pytest.mark.parametrize("keep", [0.2, 0.4, 0.6, 0.8])
def test_large_networks_use_own_layers_and_small_ones_do_not(keep):
    assert _pays(_mlp(1024), keep, (64, 1, 28, 28))
    assert not _pays(_mlp(64), keep, (32, 1, 28, 28))
    assert not _pays(cnn(width=8, hidden=64).layers, keep, (32, 1, 28, 28))
    assert _pays(spu_emnist().layers, keep, (128, 1, 28, 28))


def test_the_sum_by_hand():
    """784-8-6-10 in a batch of N, half active: weight gradients, and the error signal of the first layer's outputs."""
    layers = nn.Sequential(nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10))
    spared = 2 * (784 * 8 * 0.5 + 8 * 6 * (1 - 0.25) + 8 * 6 * 0.5 + 6 * 10 * 0.5) + 100 * 0.5 * 8
    least = int(5e6 // spared) + 1
    assert _pays(layers, 0.5, (least, 784))
    assert not _pays(layers, 0.5, (least - 1, 784))


def test_channels_of_convolutions_count_in_blocks():
    layers = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 4))
    few, many = _pays(layers, 1 / 16, (10, 1, 5, 5)), _pays(layers, 1.0, (1 << 20, 1, 5, 5))
    assert not few  # of a block of 16, one costs what 16 do
    assert not many  # nothing is spared


@pytest.mark.parametrize("name", NETS)
def test_every_kind_of_network_is_counted_as_it_is(name):
    inputs, flowing = batch(name)[0], batch(name)[0]
    layers = net(name)
    assert _pays(net(name), 0.5, (1 << 24, *inputs.shape[1:]))
    with torch.no_grad():
        assert layers(flowing).shape[0] == len(inputs)
