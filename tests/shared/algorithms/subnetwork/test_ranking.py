"""Which neurons matter: figures worked out one by one, and the share that is kept."""

from __future__ import annotations

import math

import pytest
import torch

from shared.algorithms.subnetwork.neuron_ranking import gradient_l2, select_strongest, weight_l1, weight_l2


@pytest.mark.parametrize("shape", [(3, 4), (5, 2, 3, 3), (1, 1)])
def test_merits_are_norms_of_what_comes_into_a_neuron(shape):
    generator = torch.Generator().manual_seed(1)
    weights, gradient = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    for row in range(shape[0]):
        numbers, slopes = weights[row].flatten().tolist(), gradient[row].flatten().tolist()
        assert weight_l2(weights, gradient)[row].item() == pytest.approx(math.hypot(*numbers))
        assert weight_l1(weights, gradient)[row].item() == pytest.approx(sum(map(abs, numbers)))
        assert gradient_l2(weights, gradient)[row].item() == pytest.approx(math.hypot(*slopes))


def test_the_norms_do_not_agree_on_who_matters():
    """A neuron with one large weight against one with many small ones."""
    weights = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.9, 0.9, 0.9, 0.9]])
    assert select_strongest({"0": weight_l2(weights, weights)}, 0.5)["0"].tolist() == [0]
    assert select_strongest({"0": weight_l1(weights, weights)}, 0.5)["0"].tolist() == [1]


@pytest.mark.parametrize(
    ("keep", "expected"), [(0.1, [3]), (0.4, [1, 3]), (0.59, [1, 3]), (0.6, [1, 2, 3]), (1.0, [0, 1, 2, 3, 4])]
)
def test_the_share_is_rounded_down_and_at_least_one_in_order(keep, expected):
    merits = torch.tensor([0.0, 2.0, 1.0, 5.0, 0.5])
    assert select_strongest({"0": merits}, keep)["0"].tolist() == expected


def test_of_equal_neurons_the_first_are_kept():
    assert select_strongest({"0": torch.ones(6)}, 0.5)["0"].tolist() == [0, 1, 2]
