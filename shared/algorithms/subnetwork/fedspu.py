"""FedSPU: devices train and exchange random parts of their personal models.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

    S_l   of each hidden layer's n_l neurons floor(p_k n_l), at least one, drawn uniformly by the server in each round
    A_k   weights with both ends in S, biases and BatchNorm's numbers of neurons in S, the output's bias
    w_k[j] <- w[j]                                  merge, j in A_k; w_k[j] stays elsewhere
    w_k[j] <- w_k[j] - eta * dF_k(w_k) / dw_k[j]    train, j in A_k; forward and error signal through the whole network
    w[j]   <- sum_k n_k w_k[j] / sum_k n_k          over the devices with j in A_k; w[j] stays where there is none

With p_k = 1 on all devices this is FedAvg. p_k is `keep`.
"""

from __future__ import annotations

from dataclasses import replace

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import ALL_STEP_OPTIONS, descend_batches, require_finite, train_copies
from shared.algorithms.personal_model import personal_model
from shared.algorithms.subnetwork.server_half import begin, build_algorithm, is_whole, keep_share, read_download
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.frozen_network import freeze
from shared.subnetworks.frozen_payoff import is_worth_freezing
from shared.subnetworks.neurons import all_neurons, extract, first_neurons, merge, read_chain
from shared.tensors.tree import State, Tree


@stops_early
def fedspu(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm.

    Args:
        keep: Share p_k of the neurons for devices without a share from the resource optimizer, in (0, 1].
        stopping: When devices leave for good.

    Raises:
        ValueError: An option is out of its range.
    """

    def local(model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: merge, train the active part, store the whole model, send the active part."""
        active, index, values = read_download(model, down)
        merged = merge(personal_model(model, state, down, assignment), values, index)
        if is_whole(active, model):
            personal, loss = train_copies(model, merged, batches, assignment.hyper)
        else:
            network = freeze(model.chain, merged, active, batch_shape(model, assignment))
            loss = descend_batches(network, list(network.weights.items()), batches, assignment.hyper, model.objective)
            personal = network.tree()
        require_finite(personal)
        facts, metrics = stopping.judge(state.facts, loss, model, personal, batches.validation)
        count = batches.num_examples
        return State(personal, facts), Result(extract(personal, index), float(count), count, loss, metrics=metrics)

    return replace(
        build_algorithm(local, keep=keep, step_share=step_share),
        init=init,
        step_options=ALL_STEP_OPTIONS,
        personal=Personal(personal_model, lambda _state, _device, _told: {}),
    )


def init(model: Model, seed: int) -> State:
    """Return the server's initial state; models that no device could train in part are rejected once.

    Raises:
        ConfigError: The model is not a chain of layers, or a layer cannot be trained in part.
    """
    state = begin(model, seed)
    outline = {key: leaf.to("meta") for key, leaf in state.tree.items()}
    freeze(model.chain, outline, all_neurons(read_chain(model.chain).hidden))
    return state


def batch_shape(model: Model, assignment: Assignment) -> tuple[int, ...]:
    """Return the shape of a batch; empty for a model without a declared input shape."""
    return (assignment.hyper.batch_size, *model.example) if model.example else ()


def step_share(model: Model, assignment: Assignment) -> float:
    """Return the relative cost of a step with weight gradients of active neurons alone: (2 + p^2) / 3.

    1 in a network so small that all gradients are computed.
    """
    keep, layout, inputs = keep_share(assignment), read_chain(model.chain), batch_shape(model, assignment)
    is_partial = not inputs or is_worth_freezing(model.chain, layout.index(first_neurons(layout.hidden, keep)), inputs)
    return (2 + keep**2) / 3 if is_partial else 1.0
