"""Random dropout: devices train a random, smaller network and store nothing.

Niu, Dong, Qin compare FedSPU with it, in their code as `feddrop`: AAAI 2025, https://arxiv.org/abs/2403.11464. The
idea is from Caldas, Konecny, McMahan, Talwalkar. Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements. 2018. https://arxiv.org/abs/1812.07210

Neurons are drawn as in FedSPU, and exactly the same bytes travel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result, network_leaves
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import ALL_STEP_OPTIONS, descend_batches
from shared.algorithms.subnetwork.server_half import Choice, build_algorithm, draw_active, read_download, smaller_step
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.narrow import build_narrow_network
from shared.subnetworks.neurons import PREFIX, Active
from shared.tensors.tree import State, Tree


@stops_early
def random_dropout(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    method = build_dropout(draw_active, stopping, keep=keep)
    return replace(
        method, personal=Personal(received_parameters, lambda state, _device, _assignment: network_leaves(state.tree))
    )


def build_dropout(choose: Choice, stopping: Stopping, *, keep: float) -> Algorithm:
    """Build the algorithm from a choice of neurons, which is repeated in each round and which no device stores.

    Args:
        choose: Neurons of a device in a round.
        keep: Share of neurons for devices without an allocated share.
    """
    base = build_algorithm(partial(train_received, stopping), choose, keep=keep, step_share=smaller_step)
    return replace(base, personal=Personal(received_parameters), step_options=ALL_STEP_OPTIONS)


def train_received(
    stopping: Stopping, model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: train the smaller network, send all of it, store nothing."""
    active, index, values = read_download(model, down)
    layers = build_smaller(model, active, values)
    loss = descend_batches(layers, list(layers.named_parameters()), batches, assignment.hyper, model.objective)
    trained = dict(layers.state_dict())
    facts, metrics = stopping.judge(state.facts, loss, replace(model, layers=layers), trained, batches.validation)
    up, count = {key: trained[key] for key in index}, batches.num_examples
    return State(facts=facts), Result(up, float(count), count, loss, metrics=metrics)


def build_smaller(model: Model, active: Active, values: Tree) -> nn.Sequential:
    """Return the network of the active neurons alone, with their values, in training mode.

    Args:
        model: The whole network, without storage.
    """
    layers = build_narrow_network(model.chain, active)
    layers.load_state_dict(values, strict=False)  # BatchNorm's counts of batches are missing
    return layers.train()


def received_parameters(_model: Model, _state: State, down: Tree, _assignment: Assignment) -> Tree:
    """Return the received parameters: the server's model, or a smaller network, which the same layers can compute."""
    return {key: leaf for key, leaf in down.items() if not key.startswith(PREFIX)}
