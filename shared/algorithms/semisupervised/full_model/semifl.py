"""SemiFL: labels at the server alone; devices train the whole network towards what the global model is sure of.

E. Diao, J. Ding, V. Tarokh. SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training,
NeurIPS 2022, https://arxiv.org/abs/2106.01432; their code is
https://github.com/diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-Unlabeled-Clients-with-Alternate-Training. A
baseline of Y. Xu et al., SemiSFL, https://arxiv.org/abs/2307.15870. In every round the server takes some epochs of SGD
on weak views of its labelled examples, and measures BatchNorm's running statistics anew on these (static ones, "sBN").
A device is sent the model f and labels all of its examples with it, in evaluation mode:

    y^ = argmax f(x)        fix set: those with max softmax f(x) >= tau

If there are none, its round is skipped. Else it takes E epochs over the fix set, with as many x' drawn from all:

    x_mix = lambda a_w(x) + (1 - lambda) a_w(x')        lambda ~ Beta(0.75, 0.75), one a batch
    CE(f(a_s(x)), y^) + lambda CE(f(x_mix), y^) + (1 - lambda) CE(f(x_mix), y^')        gradient clipped to norm 1

The mean of the devices that trained, each counting as much, gives the server a gradient, with a momentum:

    v <- 0.5 v + (w - mean_i w_i)        w <- w - v

**What is tested** is what the server's epochs left, as in the paper. There they end a round, here they begin the next
one, so that devices are always sent what is tested: the figure of a round here is that of the paper's round before, and
what devices trained in the last round does not count in what is kept and served. The mean itself is not tested: its
statistics would be those of other weights. The code labels a weak view of each example, this the example itself; the
code measures statistics on the devices' examples as well, where it is told to, and this on the server's alone.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from msgspec.structs import replace
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Batch,
    Cohort,
    Resources,
    Result,
    ServerTraining,
    assign_alike,
)
from shared.algorithms.semisupervised.full_model.labelled_steps import require_finite_step
from shared.algorithms.semisupervised.full_model.semifl_device import local, timed_step
from shared.algorithms.semisupervised.full_model.semifl_settings import ClippedSgd, SemiflSettings, split_epoch
from shared.algorithms.semisupervised.semisfl_server import number_fact, require_classes
from shared.algorithms.semisupervised.settings import MOMENTUM, prefixed, select
from shared.data.views.pair import make_views
from shared.models.base import Model
from shared.models.evaluate import in_mode
from shared.models.running_statistics import measure_statistics
from shared.protocol.messages import Assignment, mix
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree

TESTED = "tested/"
"""Begins the leaves of the model that the server's epochs left."""
ROUNDS = "server_rounds"
"""Fact: rounds before which the server has trained, but for those that were missed."""
STATISTICS_BATCH = 250
"""Most labelled examples of which running statistics are measured at a time, as in the code."""
FORWARD = 1 / 3
"""Of a training step's operations, its forward pass."""


def init(model: Model, _seed: int) -> State:
    """Return the model, also as the one that is tested, and a server's momentum of zero."""
    leaves = model.tree()
    moved = {name: torch.zeros_like(leaf) for name, leaf in model.layers.named_parameters() if leaf.requires_grad}
    first = ({name: leaf.clone() for name, leaf in leaves.items()} for _ in range(2))
    return State(next(first) | prefixed(next(first), TESTED) | prefixed(moved, MOMENTUM), {ROUNDS: 0})


def train(settings: SemiflSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Take the server's epochs of a round, and measure running statistics: see `ServerTraining.train`.

    Args:
        settings: The method's.
        model: The whole network, without storage.
        state: The server's before the round; not changed.
        labelled: The server's own examples.
        cohort: Hyperparameters, seed, and rounds of the run.
        number: The round.

    Raises:
        ConfigError: A class has no example, or there is a class that the network does not know; or training diverges.
    """
    inputs, labels = labelled
    require_classes(model, labelled)
    leaves = {name: leaf.clone() for name, leaf in broadcast(state).items()}
    names = (name for name, leaf in model.layers.named_parameters() if leaf.requires_grad)
    weights = [(name, leaves[name].requires_grad_()) for name in names]  # a state from disk is in another order
    hyper = settings.hyper_of(cohort.hyper, number, cohort.rounds)
    sgd, seed = ClippedSgd(settings, weights, hyper), mix(cohort.seed, number, "supervised")
    generator = torch.Generator().manual_seed(seed)
    rounds, step = int(number_fact(state.facts, ROUNDS)), 0
    with in_mode(model.layers, train=True):
        for _ in range(settings.server_epochs + (0 if rounds else settings.warmup_epochs)):
            for index in split_epoch(len(labels), settings.server_batch or hyper.batch_size, generator):
                step += 1
                (view,) = make_views(inputs[index], ("weak",), mix(seed, step, "views"), mirrors=settings.mirrors)
                loss = functional.cross_entropy(functional_call(model.layers, leaves, (view,)), labels[index])
                require_finite_step(loss.item(), step)
                sgd.step(loss)
    leaves = {name: leaf.detach() for name, leaf in leaves.items()}
    batches = inputs.tensor_split(-(-len(inputs) // STATISTICS_BATCH))
    leaves = measure_statistics(model.layers, leaves, batches)
    momentum = prefixed(select(state.tree, MOMENTUM), MOMENTUM)
    return State(leaves | prefixed(leaves, TESTED) | momentum, {**state.facts, ROUNDS: rounds + 1})


def assign(
    settings: SemiflSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Tell every device its epochs and the round's step size."""
    hyper = settings.hyper_of(cohort.hyper, number, cohort.rounds)
    ours = Cohort(cohort.devices, replace(hyper, local_epochs=settings.epochs), cohort.seed, cohort.rounds)
    return assign_alike(state, ours, allocation, number)


def broadcast(state: State, _device: str = "", _assignment: Assignment | None = None) -> Tree:
    """Return the model that the server's epochs left, with its running statistics."""
    return {name: leaf for name, leaf in state.tree.items() if not name.startswith((TESTED, MOMENTUM))}


def absorb(mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add how far a device moved; those that trained count as much as each other, and those that skipped do not."""
    return tree.accumulate(mean, result.tree, 1.0, result.coverage)


def aggregate(settings: SemiflSettings, state: State, mean: Mean) -> State:
    """Return the state after a step along the mean change; where nobody trained, as it is, its momentum too."""
    changes = tree.finish_mean(mean)
    after = dict(state.tree)
    for name, momentum in select(state.tree, MOMENTUM).items():
        if name in changes:
            after[MOMENTUM + name] = settings.server_momentum * momentum - changes[name].to(momentum.dtype)
            after[name] = state.tree[name] - after[MOMENTUM + name]
    return State(after, state.facts)


def tested(state: State) -> Tree:
    """Return the model that the server's epochs left: what is evaluated, exported and served."""
    return select(state.tree, TESTED)


def semifl(  # noqa: PLR0913 - options of a plan, all by name
    *,
    epochs: int = 5,
    server_epochs: int = 5,
    warmup_epochs: int = 0,
    server_batch: int = 0,
    threshold: float = 0.95,
    mixing: float = 0.75,
    server_momentum: float = 0.5,
    clip: float = 1.0,
    mirrors: bool = True,
    schedule: Literal["cosine", "constant"] = "cosine",
    least_rate: float = 0.0,
    nesterov: bool = True,
) -> Algorithm:
    """Build the algorithm; options as in `SemiflSettings`.

    Raises:
        ValueError: One is out of range.
    """
    settings = SemiflSettings(**locals())
    share = 2 + FORWARD / settings.epochs  # two batches a step, and all examples once to label them
    return Algorithm(
        init=init,
        assign=partial(assign, settings),
        broadcast=broadcast,
        local=partial(local, settings),
        absorb=absorb,
        aggregate=partial(aggregate, settings),
        server=ServerTraining(partial(train, settings), tested, require_classes),
        resources=Resources(step_share=lambda _model, _told: share, timed_step=partial(timed_step, settings)),
        reads_labels=False,
    )
