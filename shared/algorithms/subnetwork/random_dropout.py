"""Random dropout: devices train a random, physically smaller network and store no model.

Niu, Dong, Qin compare FedSPU with it, in their code as `feddrop`: AAAI 2025, https://arxiv.org/abs/2403.11464. The
idea is from Caldas, Konecny, McMahan, Talwalkar. Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements. 2018. https://arxiv.org/abs/1812.07210

Neurons are drawn as in FedSPU, and exactly the same bytes travel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import descend_batches
from shared.algorithms.subnetwork.server_half import (
    Choice,
    draw_active,
    neurons,
    read_download,
    smaller_step,
)
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import PREFIX, Active, build_narrowed
from shared.tensors.tree import State, Tree


@stops_early
def random_dropout(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    method = build_dropout(draw_active, stopping, keep=keep)
    return replace(method, personal=Personal(parameters_in_use, lambda state, _device, _assignment: state.tree))


def build_dropout(choose: Choice, stopping: Stopping, *, keep: float) -> Algorithm:
    """Build the algorithm of any choice of neurons, which is made anew each round and which no device remembers.

    Args:
        choose: Which neurons a device is given in a round.
        stopping: When a device stops.
        keep: Share of neurons where the server does not say.
    """
    built = neurons(partial(train_what_came, stopping), choose, keep=keep, step_share=smaller_step)
    return replace(built, personal=Personal(parameters_in_use))


def train_what_came(
    stopping: Stopping, model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: train the smaller network, send all of it, keep nothing.

    Args:
        stopping: When the device stops.
        state: What the device kept.
    """
    active, index, values = read_download(model, down)
    layers = build_smaller(model, active, values)
    loss = descend_batches(layers, list(layers.named_parameters()), batches, assignment.hyper)
    trained = dict(layers.state_dict())
    facts, metrics = stopping.judge(state.facts, loss, layers, trained, batches.validation)
    up, count = {key: trained[key] for key in index}, batches.num_examples
    return State(facts=facts), Result(up, float(count), count, loss, metrics=metrics)


def build_smaller(model: Model, active: Active, values: Tree) -> nn.Sequential:
    """Return the network of the active neurons alone, with their values, in training mode.

    Args:
        model: The whole network, without storage.
        active: Its active neurons, by layer.
        values: Their parameters and buffers.
    """
    layers = build_narrowed(model.layers, active)
    layers.load_state_dict(values, strict=False)  # all but BatchNorm's counts of batches
    return layers.train()


def parameters_in_use(_model: Model, _state: State, down: Tree, _assignment: Assignment) -> Tree:
    """Return what a device was given: the server's model, or a smaller network, which its layers take as well.

    Args:
        _state: What the device kept.
    """
    return {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)}
