"""FedMatch: weights as a supervised part plus an unsupervised part.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang. Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint
Learning, ICLR 2021, https://arxiv.org/abs/2006.12097; their code, https://github.com/wyjeong/FedMatch, "labels at
server". A baseline of Y. Xu et al., SemiSFL, https://arxiv.org/abs/2307.15870. With theta = sigma + psi, and initially
psi = 0.2 sigma, in every round the server takes supervised steps on sigma with fixed psi:

    sigma <- sigma - eta d/dsigma lambda_s CE(theta; x, y)

Devices receive both, and take steps on psi with fixed sigma. With p = softmax f(x) of theta, the examples with
max p >= tau, and the helpers' p_h of sigma + psi_h,

    psi <- psi - eta d/dpsi [ lambda_ICCS 1/H sum_h KL(p_h || p) + lambda_a CE(f(a_s(x)), y^)
                              + lambda_L1 |psi|_1 + lambda_L2 |sigma - psi|_2^2 ]

where y^ is the class with most votes of the device and its helpers, the lowest in a tie. Devices send changes of psi
larger than 1e-5 (`fedmatch_weights`), and their mean, with equal weights, changes the server's psi. Tested and served
is sigma + psi, with zeros where psi is at most 1e-5.

Every tenth round a device receives helpers: of the psi of other devices, which the server stores as last received, the
two whose predictions are nearest to the device's, for one noise image. In all other rounds there are no helpers, and
the device's prediction is the label.

**Learning rate**: the objective is divided by lambda_s, so `learning_rate` is that of the labels' cross-entropy, as in
the methods compared with it; the authors' 1e-3 is 1e-2 here. Predictions are made in evaluation mode, strong views pass
in training mode, and running statistics are averaged; the authors' network has neither these nor biases. They embed a
device's network with the sigma of the round in which it arrived, this implementation with that of the round before the
helpers'. Both parts are sent whole, since devices store nothing; the authors count what has changed since a device's
last round. On digits those were all entries of both in the first rounds and about half of them after 20, when steps are
small.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Batch, Cohort, Resources, Result, ServerTraining, network_leaves
from shared.algorithms.semisupervised.full_model.fedmatch_device import AGREEMENT, CLOSENESS, SPARSITY, local
from shared.algorithms.semisupervised.full_model.fedmatch_weights import (
    HELPER,
    LAST,
    PSI,
    PSI_VALUES,
    SIGMA,
    FedmatchSettings,
    add_psi,
    check_changes,
    pack_changes,
    unpack_changes,
    without_small,
)
from shared.algorithms.semisupervised.full_model.labelled_steps import labelled_views, supervise
from shared.algorithms.semisupervised.full_model.network_steps import FORWARD, Descent, assign_training
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.round_terms import (
    CONSISTENCY,
    add_terms_to_mean,
    average_terms,
    extract_terms,
    read_number,
)
from shared.algorithms.semisupervised.semisfl_server import require_classes
from shared.algorithms.semisupervised.settings import add_prefix, take_prefix, takes_options
from shared.data.augment import PICTURES
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Scalar, derive_seed
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree, check_like

ROUNDS, ENTRIES = "server_rounds", "psi_entries"
"""Facts: rounds, without missed ones, for which the server has trained; N, while updates are added."""
LOSS_TERMS = (CONSISTENCY, AGREEMENT, SPARSITY, CLOSENESS)
"""Metrics of an update whose mean is recorded for a round."""
NOISE_MEAN = 125 / 255
"""Mean and standard deviation of the noise image's pixels, which are in [0, 1]."""


def init(settings: FedmatchSettings, model: Model, _seed: int) -> State:
    """Return the initial state: sigma, the network's parameters; psi, a share of them; and all untrained leaves."""
    trained = {name: leaf.detach() for name, leaf in sorted(model.layers.named_parameters()) if leaf.requires_grad}
    others = {name: leaf.clone() for name, leaf in model.tree().items() if name not in trained}
    psi = torch.cat([leaf.flatten() for leaf in trained.values()]) * settings.psi_share
    sigma = {name: leaf.clone() for name, leaf in trained.items()}
    return State({**add_prefix(sigma, SIGMA), PSI_VALUES: psi, **others}, {ROUNDS: 0})


def untrained_leaves(state: State) -> Tree:
    """Return running statistics, and parameters that are not trained."""
    return network_leaves(state.tree)


def train(
    settings: FedmatchSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int
) -> State:
    """Choose helpers, if due, and take the supervised steps: see `ServerTraining.train`.

    Raises:
        ConfigError: A class has no example, or is unknown to the network; or training diverges.
    """
    facts = {name: fact for name, fact in state.facts.items() if not name.startswith(HELPER)}
    if settings.helpers and number % settings.helper_period == 0:
        probe = make_probe(labelled[0], derive_seed(cohort.seed, 0, "probe"))
        facts |= choose_helpers(settings, model, state, probe, cohort.devices)
    sigma = {name: leaf.clone().requires_grad_() for name, leaf in sorted(take_prefix(state.tree, SIGMA).items())}
    others = {name: leaf.clone() for name, leaf in untrained_leaves(state).items()}
    rounds, hyper = int(read_number(state.facts, ROUNDS)), settings.hyper_of(cohort.hyper, number, cohort.rounds)
    views = labelled_views(settings, model, labelled, cohort, number, first=not rounds)

    def network(view: Tensor) -> Tensor:
        leaves = {**add_psi(sigma, state.tree[PSI_VALUES]), **others}
        return run_part(model, model.layers, leaves, view, train=True)

    facts = supervise(Descent([*sigma.items()], hyper, settings.nesterov), views, network, facts)
    updated_sigma = add_prefix({name: leaf.detach() for name, leaf in sigma.items()}, SIGMA)
    return State({**state.tree, **updated_sigma, **others}, {**facts, ROUNDS: rounds + 1})


def check_labelled(settings: FedmatchSettings, model: Model, labelled: Batch, hyper: Hyper) -> None:
    """Reject labelled examples of classes that the network lacks, and a step size with which psi would diverge.

    Raises:
        ConfigError: The examples or the step size are rejected.
    """
    require_classes(model, labelled)
    settings.check_hyper(hyper)


def make_probe(inputs: Tensor, seed: int) -> Tensor:
    """Return one noise example, of shape (1, ...): for images, normal pixels truncated to [0, 1].

    Args:
        inputs: The server's examples, of shape (B, ...); if they are not images, the noise has their mean and standard
            deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    if inputs.ndim != PICTURES:
        return inputs.mean() + inputs.std() * torch.randn(1, *inputs.shape[1:], generator=generator)
    low, high = torch.special.ndtr(torch.tensor([-1.0, 1 / NOISE_MEAN - 1]))
    shares = low + (high - low) * torch.rand(1, *inputs.shape[1:], generator=generator)
    noise: Tensor = torch.special.ndtri(shares)
    return NOISE_MEAN + NOISE_MEAN * noise


@torch.no_grad()
def choose_helpers(
    settings: FedmatchSettings, model: Model, state: State, probe: Tensor, devices: tuple[str, ...]
) -> dict[str, Scalar]:
    """Return the helpers of each device as facts: the other devices with the nearest predictions.

    Args:
        model: The whole network, without storage.
        probe: Input of the predictions, of shape (1, ...).
    """
    sigma, others = take_prefix(state.tree, SIGMA), untrained_leaves(state)
    answers = dict[str, Tensor]()
    for device, psi in take_prefix(state.tree, LAST).items():
        leaves = {**add_psi(sigma, psi), **others}
        answers[device] = run_part(model, model.layers, leaves, probe, train=False).softmax(1)
    chosen = dict[str, Scalar]()
    for device in answers.keys() & set(devices):
        distances = {other: torch.dist(answers[device], answers[other]).item() for other in answers if other != device}
        nearest = sorted(distances, key=lambda other: (distances[other], other))
        chosen |= {f"{HELPER}{place}/{device}": other for place, other in enumerate(nearest[: settings.helpers])}
    return chosen


def broadcast(settings: FedmatchSettings, state: State, device: str, _assignment: Assignment) -> Tree:
    """Return sigma, psi and untrained leaves; in a round with helpers, also the differences of their psi."""
    parts = {name: leaf for name, leaf in state.tree.items() if name.startswith((SIGMA, PSI))}
    down = {**parts, **untrained_leaves(state)}
    for place in range(settings.helpers):
        if (helper := state.facts.get(f"{HELPER}{place}/{device}")) is not None:
            psi = without_small(state.tree[f"{LAST}{helper}"], settings.least_value)
            down |= pack_changes(psi - state.tree[PSI_VALUES], settings.least_change, f"{HELPER}{place}/")
    return down


def check_update(_assignment: Assignment, down: Tree, up: Tree) -> None:
    """Reject an update other than changes of psi's entries and of all running statistics."""
    check_changes(up, PSI, down[PSI_VALUES])
    like = {name: leaf for name, leaf in down.items() if not name.startswith((SIGMA, PSI, HELPER))}
    statistics = {name: leaf for name, leaf in up.items() if not name.startswith(PSI)}
    check_like(statistics, like)
    if missing := sorted(like.keys() - statistics.keys()):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")


def empty(state: State) -> Mean:
    """Return a mean that records the number of psi's entries."""
    return Mean(facts={ENTRIES: len(state.tree[PSI_VALUES])})


def absorb(settings: FedmatchSettings, mean: Mean, device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add changes, zero for entries that did not travel; store the device's changes if there are ever helpers."""
    count = int(read_number(mean.facts, ENTRIES))
    like = torch.empty(count, dtype=result.tree[PSI_VALUES].dtype, device="meta")
    changes = unpack_changes(result.tree, PSI, like)
    statistics = {name: leaf for name, leaf in result.tree.items() if not name.startswith(PSI)}
    stored = {LAST + device: changes} if settings.helpers else {}
    terms = {name: result.metrics[name] for name in LOSS_TERMS if name in result.metrics}
    return add_terms_to_mean(tree.accumulate(mean, {PSI_VALUES: changes, **statistics, **stored}, 1.0), terms)


def aggregate(state: State, mean: Mean) -> State:
    """Add the mean change to psi and running statistics; replace the stored psi of the devices."""
    means, psi = tree.finish_mean(mean), state.tree[PSI_VALUES]
    last = {name: psi + change.to(psi.dtype) for name, change in means.items() if name.startswith(LAST)}
    shared = {name: leaf for name, leaf in means.items() if not name.startswith(LAST)}
    return State(tree.add(state.tree, shared) | last, {**state.facts, **extract_terms(mean)})


def summed_parameters(settings: FedmatchSettings, state: State) -> Tree:
    """Return sigma + psi: the parameters that are evaluated, exported and served."""
    psi = without_small(state.tree[PSI_VALUES], settings.least_value)
    return {**add_psi(take_prefix(state.tree, SIGMA), psi), **untrained_leaves(state)}


@takes_options(FedmatchSettings)
def fedmatch(settings: FedmatchSettings) -> Algorithm:
    """Build the algorithm; options as in `FedmatchSettings`.

    Raises:
        ValueError: An option is out of range.
    """
    helper_cost = (2 * FORWARD + settings.helpers * FORWARD) / settings.helper_period if settings.helpers else 0.0
    check = partial(check_labelled, settings)
    return Algorithm(
        kinds=frozenset({"classification"}),
        init=partial(init, settings),
        assign=partial(assign_training, settings),
        broadcast=partial(broadcast, settings),
        local=partial(local, settings),
        absorb=partial(absorb, settings),
        aggregate=aggregate,
        empty=empty,
        check_update=check_update,
        evaluated=partial(summed_parameters, settings),
        server=ServerTraining(partial(train, settings), check, average_terms),
        resources=Resources(
            step_share=lambda _model, _assignment: 1 + FORWARD + helper_cost,
            uploaded=lambda down: {name: leaf for name, leaf in down.items() if not name.startswith((SIGMA, HELPER))},
        ),
        reads_labels=False,
    )
