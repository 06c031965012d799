"""Which of a resource optimizer's decisions a method trains by is what it says, found by giving it others."""

from __future__ import annotations

import pytest
import torch

from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Cohort
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import State, Tree
from tests.shared.algorithms.sessions import Own

NAMES = ("keep", "prune", "steps")


@pytest.mark.parametrize("name", [name for name, builder in ALGORITHMS.items() if not builder().program])
def test_a_method_heeds_what_changes_its_updates_and_nothing_else(name, model, fleet, hyper):
    """A quarter or three quarters of each; a split method heeds nothing."""
    algorithm = build(ALGORITHMS, Spec(name=name), "algorithm")
    state = algorithm.init(model(), 5)

    def update(value: str, amount: float) -> Tree:
        cohort = Cohort(("c",), hyper, seed=1, rounds=3)
        told = algorithm.assign(state, cohort, {"c": {value: amount}}, 1)["c"]
        down = algorithm.broadcast(state, "c", told)
        outcome = algorithm.local(model(), State(), down, Own(fleet["c"], told), told)
        assert isinstance(outcome, tuple)
        return outcome[1].tree

    if algorithm.split:
        assert not algorithm.resources.uses
        return
    for value in NAMES:
        first, other = update(value, 0.25), update(value, 0.75)
        alike = first.keys() == other.keys() and all(
            leaf.shape == other[key].shape and torch.equal(leaf, other[key]) for key, leaf in first.items()
        )
        assert (value in algorithm.resources.uses) == (not alike)
