"""What all server optimizers share: buffers and frozen parameters are averaged, options are checked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Result
from shared.algorithms.fedavg import fedavg
from shared.errors import ConfigError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Spec
from shared.registry import build
from shared.tensors.tree import Mean, State
from tests.naming import naming

NAMES = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
TOLD = Assignment(seed=1, hyper=Hyper())


def fold(algorithm, state: State, changes: list[dict[str, torch.Tensor]]) -> State:
    """Return the state after a round of these changes, of equal weights."""
    mean = Mean()
    for change in changes:
        mean = algorithm.absorb(mean, "a", TOLD, Result({name: leaf.clone() for name, leaf in change.items()}, 1.0, 1))
    return algorithm.aggregate(state, mean)


@pytest.mark.parametrize("name", NAMES)
def test_buffers_and_frozen_parameters_are_averaged_as_in_fedavg(name):
    """BatchNorm's statistics and counter, in two rounds; the parameters beside them go elsewhere than FedAvg's."""
    model = Model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    model.layers[1].bias.requires_grad_(False)
    algorithm, plain = ALGORITHMS[name](), fedavg()
    state, averaged = algorithm.init(model, 0), plain.init(model, 0)
    changes = [
        {key: torch.full_like(leaf, by if leaf.is_floating_point() else 4 * by) for key, leaf in model.tree().items()}
        for by in (1, 2)
    ]
    for _ in range(2):
        state, averaged = fold(algorithm, state, changes), fold(plain, averaged, changes)
    moved = {key for key, leaf in averaged.tree.items() if not torch.equal(state.tree[key], leaf)}
    assert moved == {"0.weight", "0.bias", "1.weight"}
    assert state.tree["0.num_batches_tracked"].item() == 12


@pytest.mark.parametrize("name", NAMES)
def test_the_state_before_a_round_is_as_it_was(name, model):
    """A round is aggregated again, from the same state, where a device's update is left out."""
    algorithm, change = ALGORITHMS[name](), {key: torch.ones_like(leaf) for key, leaf in model().tree().items()}
    begun = fold(algorithm, algorithm.init(model(), 0), [change])
    kept = {key: leaf.clone() for key, leaf in begun.tree.items()}
    first, second = fold(algorithm, begun, [change]), fold(algorithm, begun, [change])
    assert all(torch.equal(begun.tree[key], leaf) for key, leaf in kept.items())
    assert all(torch.equal(first.tree[key], leaf) for key, leaf in second.tree.items())


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, option, value) for name in NAMES for option, value in (("server_learning_rate", 0.0), ("mu", -1.0))),
        *((name, option, value) for name in NAMES[1:] for option, value in (("beta1", 1.0), ("tau", 0.0))),
        ("fedavgm", "server_momentum", -0.1),
        ("fedyogi", "beta2", float("nan")),
    ],
)
def test_an_option_out_of_range_is_refused(name, option, value):
    with pytest.raises(ConfigError, match=naming(name, option, value)):
        build(ALGORITHMS, Spec(name=name, options={option: value}), "algorithm")
