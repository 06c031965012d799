"""Training alone: plain SGD on a model that stays, and not a tensor on the wire."""

from __future__ import annotations

import pytest
import torch

from shared.algorithms.base import Cohort, Result
from shared.algorithms.fedavg import fedavg
from shared.algorithms.local_only import local_only
from shared.errors import WireError
from shared.models.build import build_initial
from shared.protocol.messages import Hyper, Spec
from shared.tensors.tree import Mean, State, add
from tests.shared.algorithms.sessions import Own, examples

HYPER = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1, momentum=0.9)
SPEC = Spec(name="cnn", options={"side": 8, "width": 6, "hidden": 20, "classes": 3})


def test_a_device_goes_on_with_its_own_model():
    """Two rounds are FedAvg's device half twice, from what it left; the server's model stays as it was."""
    algorithm, data = local_only(), examples((1, 8, 8), 9)
    state, own, expected = algorithm.init(build_initial(SPEC, 5), 5), State(), build_initial(SPEC, 5).tree()
    for number in (1, 2):
        told = algorithm.assign(state, Cohort(("a",), HYPER, seed=11), {}, number)["a"]
        assert algorithm.broadcast(state, "a", told) == {}
        own, result = algorithm.local(build_initial(SPEC, 6), own, {}, Own(data, told), told)
        moved = fedavg().local(build_initial(SPEC, 7), State(), expected, Own(data, told), told)[1]
        expected = add(expected, moved.tree)
        torch.testing.assert_close(own.tree, expected)
        torch.testing.assert_close(algorithm.personal.parameters(build_initial(SPEC, 6), own, {}, told), expected)
        assert (result.tree, result.weight, result.loss) == ({}, 9.0, pytest.approx(moved.loss, rel=1e-5))
        mean = algorithm.absorb(algorithm.empty(state), "a", told, result)
        assert algorithm.aggregate(state, mean) is state


def test_nothing_is_taken_from_a_device():
    told = local_only().assign(State({}, {"model_seed": 1}), Cohort(("a",), HYPER, seed=1), {}, 1)["a"]
    local_only().check_update(told, {}, {})
    with pytest.raises(WireError):
        local_only().check_update(told, {}, {"0.weight": torch.zeros(1)})
    assert local_only().absorb(Mean(), "a", told, Result({"0.weight": torch.zeros(1)}, 1.0, 1)).total == {}
