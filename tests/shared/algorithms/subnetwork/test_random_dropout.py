"""Random dropout: a smaller network is trained, nothing is kept."""

from __future__ import annotations

import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Cohort
from shared.algorithms.early_stopping import LOSS, STOPPED
from shared.algorithms.subnetwork.random_dropout import random_dropout
from shared.models.build import build_initial
from shared.protocol.messages import Hyper, Spec
from shared.subnetworks.neurons import draw_neurons, extract, read_chain, spread
from shared.tensors.tree import State
from tests.shared.algorithms.sessions import Own, examples

HYPER = Hyper(batch_size=16, learning_rate=0.1)
SPEC = Spec(name="cnn", options={"side": 8, "width": 6, "hidden": 20, "classes": 3})


def test_one_step_is_a_step_of_the_whole_network_whose_other_neurons_are_zero():
    """By autograd of the whole network, in which all that does not belong to the choice is zero; nothing is kept."""
    algorithm, model = random_dropout(keep=0.5), build_initial(SPEC, 5)
    state = algorithm.init(model, 5)
    told = algorithm.assign(state, Cohort(("a",), HYPER, seed=11), {}, 1)["a"]
    data, layout = examples((1, 8, 8), 9), read_chain(model.layers)
    index = layout.index(draw_neurons(layout.hidden, 0.5, told.seed))
    whole = spread(extract(state.tree, index), index, state.tree)
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in whole.items()}
    functional.cross_entropy(functional_call(model.layers, leaves, (data.inputs,)), data.labels).backward()
    expected = {key: (leaf - 0.1 * leaf.grad).detach() for key, leaf in leaves.items()}
    down = algorithm.broadcast(state, "a", told)
    after, result = algorithm.local(build_initial(SPEC, 6), State(), down, Own(data, told), told)
    assert (after.tree, after.facts) == ({}, {})
    torch.testing.assert_close(result.tree, extract(expected, index))


def test_a_device_serves_the_smaller_network_that_it_was_given():
    """The whole network's layers take its leaves; a history of losses is all that a device keeps, if it may stop."""
    algorithm, model = random_dropout(keep=0.5, early_stopping=True), build_initial(SPEC, 5)
    state = algorithm.init(model, 5)
    told = algorithm.assign(state, Cohort(("a",), HYPER, seed=11), {}, 1)["a"]
    down, data, layout = algorithm.broadcast(state, "a", told), examples((1, 8, 8), 9), read_chain(model.layers)
    index = layout.index(draw_neurons(layout.hidden, 0.5, told.seed))
    served = algorithm.personal.parameters(model, State(), down, told)
    outputs = functional_call(model.layers, served, (data.inputs,))
    whole = spread(extract(state.tree, index), index, state.tree)
    torch.testing.assert_close(outputs, functional_call(model.layers, whole, (data.inputs,)))
    after, result = algorithm.local(model, State(), down, Own(data, told), told)
    assert after.tree == {}
    assert after.facts[LOSS] == result.loss
    assert result.metrics[STOPPED] == 0.0


def test_a_device_that_only_evaluates_tries_the_whole_model():
    """Half of it at random is no model that anybody would use; the other half of the method is how it is trained."""
    algorithm, model = random_dropout(keep=0.5), build_initial(SPEC, 5)
    state = algorithm.init(model, 5)
    told = algorithm.assign(state, Cohort(("a",), HYPER, seed=11), {}, 1)["a"]
    served = algorithm.personal.parameters(
        model, State(), algorithm.personal.sent_for_evaluation(state, "a", told), told
    )
    assert all(leaf is state.tree[key] for key, leaf in served.items())
