"""FedMatch: weights of two parts; labels at the server move one, devices the other by what they and helpers agree on.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang. Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint
Learning, ICLR 2021, https://arxiv.org/abs/2006.12097; their code, https://github.com/wyjeong/FedMatch, "labels at
server". A baseline of Y. Xu et al., SemiSFL, https://arxiv.org/abs/2307.15870. With theta = sigma + psi, and at first
psi = 0.2 sigma, in every round the server takes supervised steps on sigma, psi as it is:

    sigma <- sigma - eta d/dsigma lambda_s CE(theta; x, y)

Both go down, and a device takes steps on psi, sigma as it is. With p = softmax f(x) of theta, those examples of which
max p >= tau, and the helpers' p_h of sigma + psi_h,

    psi <- psi - eta d/dpsi [ lambda_ICCS 1/H sum_h KL(p_h || p) + lambda_a CE(f(a_s(x)), y^)
                              + lambda_L1 |psi|_1 + lambda_L2 |sigma - psi|_2^2 ]

where y^ is the class for which most of the device and its helpers vote, of equals the lowest. Changes of psi go up,
those of more than 1e-5 alone (`fedmatch_weights`), and their mean moves the server's; every device counts as much.
Tested and served is sigma + psi, with zeros where psi is no larger than 1e-5.

Every tenth round a device is sent helpers: of the psi of others, which the server keeps as they last came, the two with
which the network's prediction is nearest to that with its own, for one picture of noise. In all other rounds nobody
helps, and the device's own prediction is the label.

**Learning rate**: the objective is divided by lambda_s, so `learning_rate` is that of the labels' cross-entropy, as for
the methods that this is compared with; theirs of 1e-3 is 1e-2 here. Predictions are made in evaluation mode, a strong
view passes in training mode, and running statistics are averaged; their network has neither these nor biases. They
embed a device's network with the sigma of the round that it came in, this with that of the round before the helpers'.
Both parts go down whole, since devices keep nothing; theirs counts what has changed since a device's last round. On
digits that was all entries of both in the first rounds and about half of them after 20, when steps are small.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shared.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Resources,
    Result,
    ServerTraining,
)
from shared.algorithms.semisupervised.full_model.fedmatch_device import AGREEMENT, CLOSENESS, SPARSITY, local
from shared.algorithms.semisupervised.full_model.fedmatch_weights import (
    HELPER,
    LAST,
    PSI,
    PSI_VALUES,
    SIGMA,
    FedmatchSettings,
    check_changes,
    pack_changes,
    summed,
    unpack_changes,
    without_small,
)
from shared.algorithms.semisupervised.full_model.labelled_steps import labelled_views, supervise
from shared.algorithms.semisupervised.full_model.network_steps import FORWARD, Descent, assign
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.round_terms import (
    CONSISTENCY,
    absorb_terms,
    number_fact,
    round_terms,
    terms_of,
)
from shared.algorithms.semisupervised.semisfl_server import require_classes
from shared.algorithms.semisupervised.settings import prefixed, select, takes_options
from shared.data.augment import PICTURES
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Scalar, mix
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree, check_like

ROUNDS, ENTRIES = "server_rounds", "psi_entries"
"""Facts: rounds before which the server has trained, but for those that were missed; N, while updates are added."""
LOSS_TERMS = (CONSISTENCY, AGREEMENT, SPARSITY, CLOSENESS)
"""Metrics of an update that the record of a round tells the mean of."""
MIDDLE = 125 / 255
"""Mean and standard deviation of the noise of a picture's pixels, which are in [0, 1]."""


def init(settings: FedmatchSettings, model: Model, _seed: int) -> State:
    """Return sigma, the network's own parameters, psi, a share of it, and all that is not trained."""
    trained = {name: leaf.detach() for name, leaf in sorted(model.layers.named_parameters()) if leaf.requires_grad}
    others = {name: leaf.clone() for name, leaf in model.tree().items() if name not in trained}
    psi = torch.cat([leaf.flatten() for leaf in trained.values()]) * settings.psi_share
    sigma = {name: leaf.clone() for name, leaf in trained.items()}
    return State({**prefixed(sigma, SIGMA), PSI_VALUES: psi, **others}, {ROUNDS: 0})


def untrained(state: State) -> Tree:
    """Return running statistics, and parameters that are not trained."""
    return {name: leaf for name, leaf in state.tree.items() if not name.startswith((SIGMA, PSI, LAST))}


def train(
    settings: FedmatchSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int
) -> State:
    """Choose helpers, where it is their round, and take the supervised steps: see `ServerTraining.train`.

    Raises:
        ConfigError: A class has no example, or there is a class that the network does not know; or training diverges.
    """
    facts = {name: fact for name, fact in state.facts.items() if not name.startswith(HELPER)}
    if settings.helpers and number % settings.helper_period == 0:
        probe = make_probe(labelled[0], mix(cohort.seed, 0, "probe"))
        facts |= choose_helpers(settings, model, state, probe, cohort.devices)
    sigma = {name: leaf.clone().requires_grad_() for name, leaf in sorted(select(state.tree, SIGMA).items())}
    others = {name: leaf.clone() for name, leaf in untrained(state).items()}
    rounds, hyper = int(number_fact(state.facts, ROUNDS)), settings.hyper_of(cohort.hyper, number, cohort.rounds)
    views = labelled_views(settings, model, labelled, cohort, number, first=not rounds)

    def network(view: Tensor) -> Tensor:
        leaves = {**summed(sigma, state.tree[PSI_VALUES]), **others}
        return run_part(model, model.layers, leaves, view, train=True)

    facts = supervise(Descent([*sigma.items()], hyper, settings.nesterov), views, network, facts)
    moved = prefixed({name: leaf.detach() for name, leaf in sigma.items()}, SIGMA)
    return State({**state.tree, **moved, **others}, {**facts, ROUNDS: rounds + 1})


def check_labelled(settings: FedmatchSettings, model: Model, labelled: Batch, hyper: Hyper) -> None:
    """Refuse labelled examples of other classes than the network has, and a step size by which psi would diverge.

    Args:
        labelled: The server's own examples.

    Raises:
        ConfigError: They are such.
    """
    require_classes(model, labelled)
    settings.check_hyper(hyper)


def make_probe(inputs: Tensor, seed: int) -> Tensor:
    """Return one example of noise, of shape (1, ...): pixels of a picture normal, cut off to [0, 1].

    Args:
        inputs: The server's examples, of shape (B, ...); those that are no pictures have noise of their mean and
            standard deviation.
        seed: Of what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    if inputs.ndim != PICTURES:
        return inputs.mean() + inputs.std() * torch.randn(1, *inputs.shape[1:], generator=generator)
    low, high = torch.special.ndtr(torch.tensor([-1.0, 1 / MIDDLE - 1]))
    shares = low + (high - low) * torch.rand(1, *inputs.shape[1:], generator=generator)
    noise: Tensor = torch.special.ndtri(shares)
    return MIDDLE + MIDDLE * noise


@torch.no_grad()
def choose_helpers(
    settings: FedmatchSettings, model: Model, state: State, probe: Tensor, devices: tuple[str, ...]
) -> dict[str, Scalar]:
    """Return who helps whom, as facts: of devices that came before those whose predictions are nearest.

    Args:
        model: The whole network, without storage.
        probe: What they predict of, of shape (1, ...).
        devices: Who is to be helped.
    """
    sigma, others = select(state.tree, SIGMA), untrained(state)
    answers = dict[str, Tensor]()
    for device, psi in select(state.tree, LAST).items():
        leaves = {**summed(sigma, psi), **others}
        answers[device] = run_part(model, model.layers, leaves, probe, train=False).softmax(1)
    chosen = dict[str, Scalar]()
    for device in answers.keys() & set(devices):
        distances = {other: torch.dist(answers[device], answers[other]).item() for other in answers if other != device}
        nearest = sorted(distances, key=lambda other: (distances[other], other))
        chosen |= {f"{HELPER}{place}/{device}": other for place, other in enumerate(nearest[: settings.helpers])}
    return chosen


def broadcast(settings: FedmatchSettings, state: State, device: str, _assignment: Assignment) -> Tree:
    """Return sigma, psi and what is not trained; in a round of helpers, in what their psi differ from it, too."""
    down = {name: leaf for name, leaf in state.tree.items() if not name.startswith(LAST)}
    for place in range(settings.helpers):
        if (helper := state.facts.get(f"{HELPER}{place}/{device}")) is not None:
            psi = without_small(state.tree[f"{LAST}{helper}"], settings.least_value)
            down |= pack_changes(psi - state.tree[PSI_VALUES], settings.least_change, f"{HELPER}{place}/")
    return down


def check_update(_assignment: Assignment, sent: Tree, came: Tree) -> None:
    """Refuse what are not changes of entries of psi, and of all running statistics."""
    check_changes(came, PSI, sent[PSI_VALUES])
    like = {name: leaf for name, leaf in sent.items() if not name.startswith((SIGMA, PSI, HELPER))}
    rest = {name: leaf for name, leaf in came.items() if not name.startswith(PSI)}
    check_like(rest, like)
    if missing := sorted(like.keys() - rest.keys()):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")


def empty(state: State) -> Mean:
    """Return a mean that knows how many entries psi has."""
    return Mean(facts={ENTRIES: len(state.tree[PSI_VALUES])})


def absorb(settings: FedmatchSettings, mean: Mean, device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add changes, with zeros for entries that did not travel, and keep the device's where anybody is ever helped."""
    count = int(number_fact(mean.facts, ENTRIES))
    like = torch.empty(count, dtype=result.tree[PSI_VALUES].dtype, device="meta")
    changes = unpack_changes(result.tree, PSI, like)
    rest = {name: leaf for name, leaf in result.tree.items() if not name.startswith(PSI)}
    kept = {LAST + device: changes} if settings.helpers else {}
    told = {name: result.metrics[name] for name in LOSS_TERMS if name in result.metrics}
    return absorb_terms(tree.accumulate(mean, {PSI_VALUES: changes, **rest, **kept}, 1.0), told)


def aggregate(state: State, mean: Mean) -> State:
    """Move psi and running statistics by the mean change; put devices' psi in the place of what they sent before."""
    moved, psi = tree.finish_mean(mean), state.tree[PSI_VALUES]
    last = {name: psi + change.to(psi.dtype) for name, change in moved.items() if name.startswith(LAST)}
    shared = {name: leaf for name, leaf in moved.items() if not name.startswith(LAST)}
    return State(tree.add(state.tree, shared) | last, {**state.facts, **terms_of(mean)})


def tested(settings: FedmatchSettings, state: State) -> Tree:
    """Return sigma + psi: what is evaluated, exported and served."""
    psi = without_small(state.tree[PSI_VALUES], settings.least_value)
    return {**summed(select(state.tree, SIGMA), psi), **untrained(state)}


@takes_options(FedmatchSettings)
def fedmatch(settings: FedmatchSettings) -> Algorithm:
    """Build the algorithm; options as in `FedmatchSettings`.

    Raises:
        ValueError: One is out of range.
    """
    aided = (2 * FORWARD + settings.helpers * FORWARD) / settings.helper_period if settings.helpers else 0.0
    check = partial(check_labelled, settings)
    return Algorithm(
        init=partial(init, settings),
        assign=partial(assign, settings),
        broadcast=partial(broadcast, settings),
        local=partial(local, settings),
        absorb=partial(absorb, settings),
        aggregate=aggregate,
        empty=empty,
        check_update=check_update,
        server=ServerTraining(partial(train, settings), partial(tested, settings), check, round_terms),
        resources=Resources(step_share=lambda _model, _told: 1 + FORWARD + aided),
        reads_labels=False,
    )
