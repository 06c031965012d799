"""FedAdam, FedYogi and FedAdagrad against algorithm 2 of the paper in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from shared.algorithms.base import Algorithm
from shared.algorithms.server_optimizers.fedadagrad import fedadagrad
from shared.algorithms.server_optimizers.fedadam import fedadam
from shared.algorithms.server_optimizers.fedyogi import fedyogi
from tests.shared.algorithms.server_optimizers import textbook


@dataclass(frozen=True)
class Textbook:
    """A method, the default of its beta1, and (v, d * d, beta2) -> the next v."""

    build: Callable[..., Algorithm]
    beta1: float
    second: Callable[[np.ndarray, np.ndarray, float], np.ndarray]


TEXTBOOKS = {
    "fedadam": Textbook(fedadam, 0.9, lambda v, squares, beta2: beta2 * v + (1 - beta2) * squares),
    "fedyogi": Textbook(fedyogi, 0.9, lambda v, squares, beta2: v - (1 - beta2) * squares * np.sign(v - squares)),
    "fedadagrad": Textbook(fedadagrad, 0.0, lambda v, squares, _beta2: v + squares),
}
OTHERS = {"server_learning_rate": 0.03, "beta1": 0.5, "tau": 0.01}


@pytest.mark.parametrize("options", [{}, OTHERS, {"mu": 0.5}, {"beta2": 0.9}], ids=repr)
@pytest.mark.parametrize("name", TEXTBOOKS)
def test_four_rounds_are_the_textbooks(name, play, fleet, model, hyper, options):
    if name == "fedadagrad":
        options = {key: value for key, value in options.items() if key != "beta2"}
    method, beta2 = TEXTBOOKS[name], options.get("beta2", 0.99)
    rate, tau = options.get("server_learning_rate", 0.1), options.get("tau", 1e-3)
    beta1 = options.get("beta1", method.beta1)
    hyper, first, second = msgspec.structs.replace(hyper, momentum=0.5, weight_decay=0.01), {}, {}

    def step(leaf: str, weight: np.ndarray, change: np.ndarray) -> np.ndarray:
        first[leaf] = beta1 * first.get(leaf, 0.0) + (1 - beta1) * change
        second[leaf] = method.second(second.get(leaf, np.full_like(weight, tau**2)), change**2, beta2)
        return weight + rate * first[leaf] / (np.sqrt(second[leaf]) + tau)

    expected = textbook.play(model().layers, fleet, hyper, 4, step, options.get("mu", 0.0))
    textbook.require_close(play(method.build(**options), fleet, 4, hyper).tree, expected)
