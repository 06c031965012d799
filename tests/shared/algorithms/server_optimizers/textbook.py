"""Textbook rounds with server optimizers: torch SGD, numpy in 64 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shared.data.examples import Examples, batches
from shared.protocol.messages import Hyper, derive_seed

SEED = 11
Parameters = dict[str, np.ndarray]


def train(layers: nn.Module, data: Examples, hyper: Hyper, seed: int, mu: float = 0.0) -> None:
    """Train by SGD, with FedProx's term in the loss if `mu` is above zero."""
    begun = [weight.detach().clone() for weight in layers.parameters()]
    sgd = torch.optim.SGD(layers.parameters(), hyper.learning_rate, hyper.momentum, weight_decay=hyper.weight_decay)
    for inputs, labels in batches(data, batch_size=hyper.batch_size, epochs=hyper.local_epochs, seed=seed):
        sgd.zero_grad()
        loss = functional.cross_entropy(layers(inputs), labels)
        if mu:
            pairs = zip(layers.parameters(), begun, strict=True)
            loss = loss + mu / 2 * sum((weight - start).square().sum() for weight, start in pairs)
        loss.backward()
        sgd.step()


def mean_change(
    layers: nn.Module, server: Parameters, fleet: Mapping[str, Examples], hyper: Hyper, number: int, mu: float
) -> Parameters:
    """Return sum_k (n_k / n) (w_k - w) of a round with all devices."""
    total, everybody = {name: np.zeros_like(leaf) for name, leaf in server.items()}, sum(map(len, fleet.values()))
    for device, data in fleet.items():
        layers.load_state_dict({name: torch.tensor(leaf, dtype=torch.float32) for name, leaf in server.items()})
        begun = {name: leaf.numpy().astype(np.float64) for name, leaf in layers.state_dict().items()}
        train(layers, data, hyper, derive_seed(SEED, number, device), mu)
        for name, leaf in layers.state_dict().items():
            total[name] += len(data) / everybody * (leaf.numpy().astype(np.float64) - begun[name])
    return total


def play(
    layers: nn.Module,
    fleet: Mapping[str, Examples],
    hyper: Hyper,
    rounds: int,
    step: Callable[[str, np.ndarray, np.ndarray], np.ndarray],
    mu: float = 0.0,
) -> Parameters:
    """Return the parameters after some rounds; `step` returns a parameter's next value from its name, it and d."""
    server = {name: leaf.numpy().astype(np.float64) for name, leaf in layers.state_dict().items()}
    for number in range(1, rounds + 1):
        change = mean_change(layers, server, fleet, hyper, number, mu)
        server = {name: step(name, leaf, change[name]) for name, leaf in server.items()}
    return server


def require_close(tree: Mapping[str, torch.Tensor], expected: Parameters, limit: float = 1e-6) -> None:
    """Compare the network's leaves of a server state with the textbook's, each within `limit`."""
    assert {name for name in tree if "/" not in name} == expected.keys()
    for name, leaf in expected.items():
        assert np.abs(tree[name].double().numpy() - leaf).max() <= limit, name
