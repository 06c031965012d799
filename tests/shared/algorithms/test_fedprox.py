"""FedProx: FedAvg at mu = 0, and above it the gradient of the proximal term."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.nn import functional

from shared.algorithms.fedavg import fedavg
from shared.algorithms.fedprox import fedprox
from shared.data.examples import batches
from shared.errors import ConfigError
from shared.protocol.messages import Assignment, Spec
from shared.registry import build
from shared.tensors.tree import State
from tests.naming import naming


def test_mu_zero_is_fedavg_bit_for_bit(play, fleet, hyper):
    """Three rounds with momentum: every bit of every parameter."""
    hyper = msgspec.structs.replace(hyper, momentum=0.9, weight_decay=0.01)
    average, proximal = play(fedavg(), fleet, 3, hyper).tree, play(fedprox(mu=0.0), fleet, 3, hyper).tree
    assert average.keys() == proximal.keys()
    assert all(torch.equal(average[key], proximal[key]) for key in average)


@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_is_sgd_on_the_papers_local_objective(fleet, model, hyper, own, mu):
    """Autograd on loss + mu/2 |w - w_start|^2 (the paper's h_k) gives the same steps as the corrected gradient."""
    told = Assignment(seed=1, hyper=hyper)
    start = model().tree()
    moved = fedprox(mu=mu).local(model(), State(), start, own(fleet["c"], hyper, 1), told)[1].tree
    layers = model().layers
    sgd = torch.optim.SGD(layers.parameters(), hyper.learning_rate)
    for inputs, labels in batches(fleet["c"], batch_size=hyper.batch_size, epochs=hyper.local_epochs, seed=1):
        sgd.zero_grad()
        distance = sum((weight - start[name]).square().sum() for name, weight in layers.named_parameters())
        (functional.cross_entropy(layers(inputs), labels) + mu / 2 * distance).backward()
        sgd.step()
    expected = {key: leaf - start[key] for key, leaf in layers.state_dict().items()}
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_a_larger_mu_keeps_devices_closer_to_where_they_started(fleet, model, hyper, own):
    """What the method is for. The loss reported is the data's own, without the proximal term."""
    hyper = msgspec.structs.replace(hyper, local_epochs=10)
    told = Assignment(seed=1, hyper=hyper)
    distances, losses = [], []
    for mu in (0.0, 0.3, 3.0):
        result = fedprox(mu=mu).local(model(), State(), model().tree(), own(fleet["c"], hyper, 1), told)[1]
        distances.append(sum(leaf.square().sum().item() for leaf in result.tree.values()))
        losses.append(result.loss)
    assert distances[0] > distances[1] > distances[2] > 0
    assert (
        losses[0] < losses[1] < losses[2] < 1.2 * functional.cross_entropy(torch.zeros(1, 3), torch.tensor([0])).item()
    )


def test_frozen_parameters_are_left_alone(fleet, model, hyper, own):
    """A parameter without gradient is not pulled either; it must not be an error."""
    network = model()
    network.layers[1].weight.requires_grad_(False)
    told = Assignment(seed=1, hyper=hyper)
    moved = fedprox(mu=1.0).local(network, State(), model().tree(), own(fleet["c"], hyper, 1), told)[1].tree
    assert not moved["1.weight"].any()
    assert moved["3.weight"].any()


@pytest.mark.parametrize("mu", [-0.01, float("nan"), float("inf")])
def test_a_mu_that_pulls_nowhere_is_refused(mu):
    with pytest.raises(ConfigError, match=naming("'fedprox'", "mu", mu)):
        build({"fedprox": fedprox}, Spec(name="fedprox", options={"mu": mu}), "algorithm")
