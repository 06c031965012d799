"""FedYogi against algorithm 2 of the paper in a plain loop."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shared.algorithms.server_optimizers.fedyogi import fedyogi
from tests.shared.algorithms.server_optimizers import textbook

OTHERS = {"server_learning_rate": 0.03, "beta1": 0.5, "beta2": 0.9, "tau": 0.01}


@pytest.mark.parametrize("options", [{}, OTHERS, {"mu": 0.5}], ids=repr)
def test_four_rounds_are_the_textbooks(play, fleet, model, hyper, options):
    rate, tau = options.get("server_learning_rate", 0.1), options.get("tau", 1e-3)
    beta1 = options.get("beta1", 0.9)
    beta2 = options.get("beta2", 0.99)
    hyper, first, second = msgspec.structs.replace(hyper, momentum=0.5, weight_decay=0.01), {}, {}

    def step(name: str, weight: np.ndarray, change: np.ndarray) -> np.ndarray:
        first[name] = beta1 * first.get(name, 0.0) + (1 - beta1) * change
        second.setdefault(name, np.full_like(weight, tau**2))
        second[name] -= (1 - beta2) * change**2 * np.sign(second[name] - change**2)
        return weight + rate * first[name] / (np.sqrt(second[name]) + tau)

    expected = textbook.play(model().layers, fleet, hyper, 4, step, options.get("mu", 0.0))
    textbook.require_close(play(fedyogi(**options), fleet, 4, hyper).tree, expected)
