"""Choices of neurons: how many, how likely, which parameters belong to them, there and back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from shared.errors import ConfigError, WireError
from shared.models.build import build_blank
from shared.protocol.messages import Spec
from shared.subnetworks import neurons as actives
from shared.subnetworks.frozen_network import freeze
from shared.subnetworks.narrow import build_narrow_network
from shared.subnetworks.neurons import (
    Chain,
    all_neurons,
    count_active,
    draw_neurons,
    extract,
    first_neurons,
    merge,
    pack,
    read_chain,
    spread,
    unpack,
)
from shared.tensors.tree import tensor_bytes
from tests.naming import naming
from tests.shared.algorithms.sessions import normed

HIDDEN = {"0": 10, "3": 7}


def bits(leaf: torch.Tensor) -> bytes:
    return bytes(tensor_bytes(leaf))


def test_a_share_of_neurons_is_rounded_down_and_never_none():
    """The paper's networks: 0.2 of 6 filters is one; of decimals that binary lacks, 0.29 of 100 are 29."""
    assert [count_active(6, keep) for keep in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)] == [1, 1, 2, 3, 4, 6]
    assert (count_active(100, 0.29), count_active(10, 0.7), count_active(1, 0.01)) == (29, 7, 1)


def test_every_neuron_is_drawn_as_often_as_another_and_layers_are_independent():
    """4,000 draws of 4 of 10: 0.4 each within four standard errors; of pairs over two layers 0.4 * 2 / 7."""
    ones = torch.zeros(10)
    pairs = torch.zeros(10, 7)
    for seed in range(4000):
        drawn = draw_neurons(HIDDEN, 0.4, seed)
        assert [len(one) for one in drawn.values()] == [4, 2]
        assert all(bool((one.diff() > 0).all()) for one in drawn.values())
        ones[drawn["0"]] += 1
        pairs[drawn["0"][:, None], drawn["3"]] += 1
    for counts, likely in ((ones, 0.4), (pairs, 0.4 * 2 / 7)):
        assert float((counts / 4000 - likely).abs().max()) < 4.5 * (likely * (1 - likely) / 4000) ** 0.5


def test_the_same_seed_draws_the_same_and_a_whole_share_is_everything():
    assert all(
        torch.equal(one, draw_neurons(HIDDEN, 0.5, 3)[name]) for name, one in draw_neurons(HIDDEN, 0.5, 3).items()
    )
    assert any(
        not torch.equal(one, draw_neurons(HIDDEN, 0.5, 4)[name]) for name, one in draw_neurons(HIDDEN, 0.5, 3).items()
    )
    for whole in (draw_neurons(HIDDEN, 1.0, 9), all_neurons(HIDDEN)):
        assert {name: one.tolist() for name, one in whole.items()} == {"0": [*range(10)], "3": [*range(7)]}
    assert {name: one.tolist() for name, one in first_neurons(HIDDEN, 0.3).items()} == {"0": [0, 1, 2], "3": [0, 1]}


def test_the_share_of_active_parameters_is_p_or_p_squared():
    """p² between two hidden layers alone; p in the first layer, in biases, in BatchNorm and in the classifier."""
    layers = nn.Sequential(
        *(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(4 * 9, 20, bias=False), nn.ReLU(), nn.Linear(20, 5)),
    )
    layout, tree = read_chain(layers), dict(layers.state_dict())
    index = layout.index(draw_neurons(layout.hidden, 0.25, 1))
    masks = actives.coverage(index, tree)
    assert {key: float(mask.float().mean()) for key, mask in masks.items()} == {
        **dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"), 0.25),
        **dict.fromkeys(("3.bias", "8.weight"), 0.25),
        **dict.fromkeys(("3.weight", "6.weight"), 0.25**2),
    }, "the output's bias is whole and has no mask; counts of batches belong to nobody"
    assert index["8.bias"] == (None, None)
    assert "1.num_batches_tracked" not in index


def test_a_channel_owns_its_block_of_columns_behind_a_flatten():
    """By what Flatten does with a picture of which one channel is not zero."""
    layers = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 6, 3))
    layout = read_chain(layers)
    for channel in range(5):
        picture = torch.zeros(1, 5, 2, 3)
        picture[0, channel] = 1
        columns = layout.index({"0": torch.tensor([channel])})["3.weight"][1]
        assert columns.tolist() == nn.Flatten()(picture)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("keep", [0.2, 0.5, 1.0])
def test_what_is_merged_is_what_is_taken_out_again_and_nothing_else_changes_a_bit(keep):
    layers = normed().layers
    layout, ours = read_chain(layers), dict(layers.state_dict())
    ours["0.weight"][0, 0, 0, 0] = -0.0
    ours["7.weight"][0, 0] = float("nan")
    kept = {key: bits(leaf) for key, leaf in ours.items()}
    theirs = {key: torch.randn_like(leaf, dtype=torch.float32) for key, leaf in ours.items()}
    index = layout.index(draw_neurons(layout.hidden, keep, 2))
    part = extract(theirs, index)
    merged = merge(ours, part, index)
    assert {key: bits(leaf) for key, leaf in ours.items()} == kept, "merging makes new leaves"
    assert {key: bits(leaf) for key, leaf in extract(merged, index).items()} == {k: bits(v) for k, v in part.items()}
    masks = actives.coverage(index, ours)
    for key, leaf in merged.items():
        if key not in index:
            assert leaf is ours[key]
            continue
        mask = masks.get(key, torch.ones(leaf.shape, dtype=torch.bool))
        assert bits(leaf[~mask]) == bits(ours[key][~mask])
        assert bits(leaf[mask]) == bits(theirs[key][mask])
        assert bits(spread(part, index, ours)[key]) == bits(torch.where(mask, theirs[key], 0.0))
    assert actives.count_parameters(index, ours) == sum(leaf.numel() for leaf in part.values())


def test_a_chain_survives_being_a_fact_of_a_state():
    layout = read_chain(build_blank(Spec(name="cnn")).layers)
    assert Chain.parse(layout.text()) == layout


def test_a_network_whose_neurons_cannot_be_told_apart_is_refused():
    with pytest.raises(ConfigError, match=naming("layer 1", "Bilinear")):
        read_chain(nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2)))
    with pytest.raises(ConfigError, match="weights"):
        read_chain(nn.Sequential(nn.ReLU()))


class Doubled(nn.Sequential):
    """Not what its layers alone would give."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


TWICE = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (Doubled(nn.Linear(4, 4), nn.Linear(4, 2)), "forward"),
        (nn.Sequential(TWICE, nn.ReLU(), TWICE, nn.Linear(4, 2)), "layer 2"),
        (nn.Sequential(nn.Conv1d(2, 4, 1), nn.Linear(8, 5), nn.Flatten(), nn.Linear(20, 2)), "layer 1"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(2), nn.Linear(36, 2)), r"layer 1 .*\b4 neurons"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 2)), "layer 2"),
        (nn.Sequential(nn.Linear(4, 8), nn.MaxPool1d(2), nn.Linear(4, 2)), "layer 1"),
        (nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(20, 2)), "layer 2"),
        (nn.Sequential(nn.Linear(4, 6), nn.Conv1d(6, 2, 1)), "layer 1"),
    ],
)
def test_what_is_no_plain_chain_is_refused(layers, says):
    """A user's own network may be any of these; neurons left out of one would be others than those that are meant."""
    with pytest.raises(ConfigError, match=says):
        read_chain(layers)


def test_a_layer_without_parameters_may_stand_in_several_places():
    """As people write them: one ReLU and one pool for all. `named_children` tells of each but once."""
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    layers = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), relu, pool, nn.Conv2d(4, 6, 3, padding=1), relu, pool),
        *(nn.Flatten(), nn.Linear(24, 8), relu, nn.Linear(8, 3)),
    )
    tree, inputs = dict(layers.state_dict()), torch.rand(2, 1, 8, 8)
    active = all_neurons(read_chain(layers).hidden)
    smaller = build_narrow_network(layers, active)
    smaller.load_state_dict(tree)
    wanted = layers(inputs)
    torch.testing.assert_close(smaller(inputs), wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(freeze(layers, tree, active)(inputs), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20])
def test_a_bitmap_has_a_bit_a_neuron_from_the_lowest_on(count):
    hidden = {"0": count}
    for chosen in ([0], [count - 1], [*range(count)], [*range(0, count, 2)]):
        packed = pack({"0": torch.tensor(chosen)}, hidden)
        assert packed["active/0"].nbytes == -(-count // 8)
        number = int.from_bytes(bytes(tensor_bytes(packed["active/0"])), "little")
        assert [place for place in range(count) if number >> place & 1] == chosen
        assert unpack(packed, hidden)["0"].tolist() == chosen


@pytest.mark.parametrize(
    "bad", [{}, {"active/0": torch.zeros(2, dtype=torch.uint8)}, {"active/0": torch.ones(1, dtype=torch.uint8)},
            {"active/0": torch.tensor([1, 4], dtype=torch.uint8)}, {"active/0": torch.ones(2)}]
)  # fmt: skip
def test_a_bitmap_that_is_none_is_refused(bad):
    with pytest.raises(WireError):
        unpack(bad, {"0": 10})


def test_shares_that_grow_hold_one_another_in_order():
    """What nested sub-networks rely on."""
    for smaller, larger in pairwise(first_neurons(HIDDEN, keep) for keep in (0.2, 0.4, 0.6, 1.0)):
        assert all(set(smaller[name].tolist()) <= set(larger[name].tolist()) for name in HIDDEN)
