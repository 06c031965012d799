"""How much of a whole network's step methods compute that train some of its neurons."""

from __future__ import annotations

import pytest

from shared.algorithms import ALGORITHMS
from shared.models.build import build_blank
from shared.protocol.messages import Assignment, Hyper, Spec

LARGE = build_blank(Spec(name="mlp", options={"features": 784, "hidden": 1024, "classes": 10}))
SMALL = build_blank(Spec(name="mlp", options={"features": 8, "hidden": 16, "classes": 4}))


def told(keep: float, **values: str) -> Assignment:
    hyper = Hyper(local_epochs=5, batch_size=64, learning_rate=0.1)
    return Assignment(seed=1, hyper=hyper, values={"keep": keep, **values})


def work(name: str, model, assignment, **options) -> float:
    counted = ALGORITHMS[name](**options).resources.step_share
    assert counted is not None
    return counted(model, assignment)


def test_frozen_training_makes_the_weight_gradients_of_active_neurons_alone():
    """Of a network so small that its own layers do not pay, all of them."""
    assert work("fedspu", LARGE, told(0.5)) == pytest.approx((2 + 0.25) / 3)
    assert work("fedspu", LARGE, told(1.0)) == 1.0
    assert work("fedspu", SMALL, told(0.5)) == 1.0


@pytest.mark.parametrize("name", ["random_dropout", "fjord_fixed"])
def test_a_smaller_network_is_the_square(name):
    assert work(name, SMALL, told(0.5)) == 0.25


@pytest.mark.parametrize("name", ["hermes", "fedmp", "prunefl"])
def test_the_first_epoch_of_those_who_choose_is_of_the_whole_network(name):
    assert work(name, SMALL, told(0.5)) == 0.25
    assert work(name, SMALL, told(0.5, chain="{}")) == pytest.approx((1 + 4 * 0.25) / 5)


def test_ordered_dropout_is_the_mean_of_the_widths_that_are_drawn():
    assert work("fjord", SMALL, told(0.5), widths="0.25,0.5,1") == pytest.approx((0.0625 + 0.25) / 2)
    assert work("fjord", SMALL, told(0.5), widths="0.25,0.5,1", distil=True) == pytest.approx(0.15625 + 0.25)


@pytest.mark.parametrize("name", ["fedavg", "fedselect", "local_only", "pruned_personalization"])
def test_others_compute_it_all(name):
    assert ALGORITHMS[name]().resources.step_share is None
