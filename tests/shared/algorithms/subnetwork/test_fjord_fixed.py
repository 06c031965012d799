"""FjORD at one width: the first neurons of every layer, and all else as random dropout."""

from __future__ import annotations

import pytest
import torch

from shared.algorithms.subnetwork.fjord_fixed import fjord_fixed
from shared.algorithms.subnetwork.random_dropout import random_dropout
from shared.codecs.dense import dense
from shared.subnetworks.neurons import count_parameters, extract, first_neurons
from shared.tensors.tree import State
from tests.shared.algorithms.dropouts import Site, bare, network, require_mean, same

SHARES = {"a": 0.5, "b": 0.25, "c": 1.0}


def test_a_device_is_given_the_first_neurons_of_every_layer_and_keeps_nothing():
    """The same in every round; it uses what it was given last."""
    site = Site(fjord_fixed(), SHARES)
    for _ in range(2):
        before = site.state.tree
        site.round("abc")
        for device, share in SHARES.items():
            index = site.layout.index(first_neurons(site.layout.hidden, share))
            assert same(bare(site.down[device]), extract(before, index))
            assert site.devices[device] == State()
            served = site.algorithm.personal.parameters(network(), State(), site.down[device], site.told[device])
            assert same(served, extract(before, index))


def test_means_are_over_those_who_hold_a_coordinate():
    site = Site(fjord_fixed(), SHARES)
    before = {key: leaf.clone() for key, leaf in site.state.tree.items()}
    results = site.round("abc")
    require_mean(site, before, results, {d: first_neurons(site.layout.hidden, share) for d, share in SHARES.items()})
    before = {key: leaf.clone() for key, leaf in site.state.tree.items()}
    results = site.round("ab")
    require_mean(site, before, results, {d: first_neurons(site.layout.hidden, SHARES[d]) for d in "ab"})
    assert torch.equal(site.state.tree["0.weight"][3], before["0.weight"][3])


@pytest.mark.parametrize("keep", [0.2, 0.6, 1.0])
def test_bytes_are_those_of_dropout(keep):
    carried = set()
    for build in (fjord_fixed, random_dropout):
        site = Site(build(), {"a": keep})
        site.round("a")
        carried.add(tuple(dense().encode(t, None)[0].num_bytes for t in (site.down["a"], site.results["a"].tree)))
    count = count_parameters(site.layout.index(first_neurons(site.layout.hidden, keep)), network().tree())
    assert carried == {(sum(-(-one // 8) for one in site.layout.hidden.values()) + 4 * count, 4 * count)}
