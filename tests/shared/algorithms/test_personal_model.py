"""Personal model between tasks: no diverged weights, nothing shared."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shared.algorithms import ALGORITHMS
from shared.algorithms.fedselect import fedselect
from shared.algorithms.local_only import local_only
from shared.algorithms.subnetwork.fedspu import fedspu
from shared.algorithms.subnetwork.hermes import hermes
from shared.errors import TaskFailed
from shared.tensors.generators import seed_torch
from shared.tensors.tree import State, Tree
from tests.shared.algorithms.dropouts import HYPER, Site, network, same
from tests.shared.algorithms.sessions import Own

DIVERGING = msgspec.structs.replace(HYPER, learning_rate=1e38)


@pytest.mark.parametrize("build", [fedspu, local_only, fedselect, hermes])
@pytest.mark.parametrize("rounds", [0, 1])
def test_training_that_diverges_fails_and_a_device_goes_on_with_what_it_had(build, rounds):
    """Nothing of it is kept: what does not travel would be NaN for good, and so would a choice that was made of it."""
    site = Site(build(), {"a": 0.5})
    if build in {fedspu, local_only}:
        site.devices["a"] = State(network().tree())
    for _ in range(rounds):
        site.round("a")
    site.hyper = DIVERGING
    before = site.devices.get("a", State())
    copies = {key: leaf.clone() for key, leaf in before.tree.items()}
    site.tell("a")
    with pytest.raises(TaskFailed, match="diverged"):
        site.train("a")
    assert site.devices.get("a", before) is before
    assert all(torch.equal(leaf, copies[key]) for key, leaf in before.tree.items())
    site.hyper = HYPER
    assert all(leaf.isfinite().all() for leaf in site.round("a")["a"].tree.values())


@pytest.mark.parametrize(
    "name", ["fedavg", "fedspu", "local_only", "random_dropout", "fedselect", "fjord", "fjord_fixed", "hermes"]
)
def test_a_network_that_another_task_left_trains_as_a_fresh_one(name):
    """In evaluation mode, and with gradients of a step that was cut short."""
    algorithm, ups = ALGORITHMS[name](), list[Tree]()
    site = Site(algorithm, {"a": 0.5})
    site.tell("a")
    own, told = network(7).tree() if name in {"fedspu", "local_only"} else {}, site.told["a"]
    for model in (network(6), network(8)):
        if ups:
            model.layers.eval()
            for weight in model.layers.parameters():
                weight.grad = torch.ones_like(weight)
        with seed_torch(1):
            after, result = algorithm.local(model, State(own), site.down["a"], Own(site.data("a"), told), told)
        ups.append(after.tree or result.tree)
    assert same(*ups)
