"""FedSPU: every device has a full model of its own; a random part of it is trained and exchanged, the rest is frozen.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

    S_l   of each hidden layer's n_l neurons floor(p_k n_l), at least one, uniformly by the server, anew each round
    A_k   weights with both ends in S, biases and BatchNorm's numbers of neurons in S, the output's bias
    w_k[j] <- w[j]                                  merge, j in A_k; w_k[j] stays elsewhere
    w_k[j] <- w_k[j] - eta * dF_k(w_k) / dw_k[j]    train, j in A_k; forward and error signal through the whole network
    w[j]   <- sum_k n_k w_k[j] / sum_k n_k          over the devices with j in A_k; w[j] stays where there is none

With p_k = 1 on all devices this is FedAvg. Here p_k is `keep`.
"""

from __future__ import annotations

from dataclasses import replace

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import descend_batches, train_copies
from shared.algorithms.personal_model import personal_model, require_finite
from shared.algorithms.subnetwork.server_half import begin, is_whole, keep_share, neurons, read_download
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.frozen_network import freeze, is_worth_freezing
from shared.subnetworks.neurons import all_neurons, extract, first_neurons, merge, read_chain
from shared.tensors.tree import State, Tree


@stops_early
def fedspu(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm.

    Args:
        keep: Share p_k of the neurons for devices of which the resource optimizer says nothing, in (0, 1].
        stopping: When devices leave for good.

    Raises:
        ValueError: An option is out of its range.
    """

    def local(model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: merge, train what is active, keep all, send what is active."""
        active, index, values = read_download(model, down)
        merged = merge(personal_model(model, state, down, assignment), values, index)
        if is_whole(active, model):
            own, loss = train_copies(model.layers, merged, batches, assignment.hyper)
        else:
            network = freeze(model.layers, merged, active, inputs_of(model, assignment))
            loss = descend_batches(network, list(network.weights.items()), batches, assignment.hyper)
            own = network.tree()
        require_finite(own)
        facts, metrics = stopping.judge(state.facts, loss, model.layers, own, batches.validation)
        count = batches.num_examples
        return State(own, facts), Result(extract(own, index), float(count), count, loss, metrics=metrics)

    return replace(
        neurons(local, keep=keep, step_share=step_share),
        init=init,
        personal=Personal(personal_model, lambda _state, _device, _told: {}),
    )


def init(model: Model, seed: int) -> State:
    """Return the server's first state; what no device could train a part of is refused here, once.

    Raises:
        ConfigError: The model is no chain whose neurons can be told apart, or a layer cannot be trained in part.
    """
    state = begin(model, seed)
    outline = {key: leaf.to("meta") for key, leaf in state.tree.items()}
    freeze(model.layers, outline, all_neurons(read_chain(model.layers).hidden))
    return state


def inputs_of(model: Model, assignment: Assignment) -> tuple[int, ...]:
    """Return the shape of a batch; nothing of a model that does not say what it is made for."""
    return (assignment.hyper.batch_size, *model.example) if model.example else ()


def step_share(model: Model, assignment: Assignment) -> float:
    """Return how much of a step is left where weight gradients are those of active neurons: (2 + p^2) / 3.

    All of it, where the network is so small that all of them are made.
    """
    keep, layout, inputs = keep_share(assignment), read_chain(model.layers), inputs_of(model, assignment)
    own = not inputs or is_worth_freezing(model.layers, layout.index(first_neurons(layout.hidden, keep)), inputs)
    return (2 + keep**2) / 3 if own else 1.0
