"""The baseline: the server's part of SemiSFL to the bit, and devices that send nothing."""

from __future__ import annotations

import pytest
import torch

from shared.algorithms.base import Cohort, Result
from shared.algorithms.semisupervised.semisfl import semisfl
from shared.algorithms.semisupervised.supervised_only import supervised_only
from shared.errors import WireError
from shared.protocol.messages import Hyper
from shared.tensors.tree import Mean, State
from tests.shared.algorithms.sessions import Own, examples, make

SMALL = {"supervised_steps": 3, "hidden": 7, "projections": 4, "labelled_queue": 8}


def test_it_is_the_methods_first_round_and_devices_add_nothing():
    whole, skeleton = make("mlp")
    data, cohort = examples((6,), 12), Cohort(("a",), Hyper(batch_size=4, momentum=0.5), seed=3, rounds=4)
    states = []
    for algorithm in (semisfl(**SMALL), supervised_only(**SMALL)):
        state = algorithm.init(whole, 5)
        states.append(algorithm.server.train(skeleton, state, (data.inputs, data.labels), cohort, 1))
    ours = states[1].tree
    unqueued = {name: leaf for name, leaf in states[0].tree.items() if not name.startswith("queue/unlabelled")}
    assert all(torch.equal(leaf, ours[name]) for name, leaf in unqueued.items())
    told = algorithm.assign(states[1], cohort, {}, 1)["a"]
    assert algorithm.broadcast(states[1], "a", told) == {}
    _, result = algorithm.local(whole, State(), {}, Own(data, told), told)
    after = algorithm.aggregate(states[1], algorithm.absorb(Mean(), "a", told, result))
    assert (result.tree, after) == ({}, states[1])


def test_an_update_with_anything_in_it_is_refused():
    result = Result({"1.weight": torch.zeros(2)}, 1.0, 3)
    with pytest.raises(WireError) as caught:
        supervised_only().check_update(None, {}, result.tree)
    assert caught.value.reason == "unknown-tensor"
