"""FedAvgM against its formula in a plain loop."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from shared.algorithms.fedavg import fedavg
from shared.algorithms.server_optimizers.fedavgm import fedavgm
from tests.shared.algorithms.server_optimizers import textbook


@pytest.mark.parametrize("options", [{}, {"server_learning_rate": 0.5, "server_momentum": 0.3}, {"mu": 0.5}], ids=repr)
def test_four_rounds_are_the_textbooks(play, fleet, model, hyper, options):
    rate, beta = options.get("server_learning_rate", 1.0), options.get("server_momentum", 0.9)
    hyper, velocity = msgspec.structs.replace(hyper, momentum=0.5, weight_decay=0.01), {}

    def step(name: str, weight: np.ndarray, change: np.ndarray) -> np.ndarray:
        velocity[name] = beta * velocity.get(name, 0.0) + change
        return weight + rate * velocity[name]

    expected = textbook.play(model().layers, fleet, hyper, 4, step, options.get("mu", 0.0))
    textbook.require_close(play(fedavgm(**options), fleet, 4, hyper).tree, expected)


def test_without_momentum_it_is_fedavg_bit_for_bit(play, fleet):
    found, averaged = play(fedavgm(server_momentum=0.0), fleet, 3).tree, play(fedavg(), fleet, 3).tree
    assert all(torch.equal(found[name], leaf) for name, leaf in averaged.items())
