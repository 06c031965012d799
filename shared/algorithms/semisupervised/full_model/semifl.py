"""SemiFL: devices train the whole network on the global model's pseudo-labels.

E. Diao, J. Ding, V. Tarokh. SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training,
NeurIPS 2022, https://arxiv.org/abs/2106.01432; their code is
https://github.com/diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-Unlabeled-Clients-with-Alternate-Training. A
baseline of Y. Xu et al., SemiSFL, https://arxiv.org/abs/2307.15870. In every round the server takes some epochs of SGD
on weak views of its labelled examples, and measures BatchNorm's running statistics on them (static ones, "sBN"). A
device receives the model f and labels all of its examples with it, in evaluation mode:

    y^ = argmax f(x)        fix set: those with max softmax f(x) >= tau

If the fix set is empty, the device skips the round. Else it takes E epochs over the fix set, with as many x' drawn from
all examples:

    x_mix = lambda a_w(x) + (1 - lambda) a_w(x')        lambda ~ Beta(0.75, 0.75), one a batch
    CE(f(a_s(x)), y^) + lambda CE(f(x_mix), y^) + (1 - lambda) CE(f(x_mix), y^')        gradient clipped to norm 1

The mean of the devices that trained, with equal weights, gives the server a gradient, with momentum:

    v <- 0.5 v + (w - mean_i w_i)        w <- w - v

**What is tested** is the model after the server's epochs, as in the paper. There they end a round, here they begin the
next one, so that devices always receive the tested model: the figure of a round here is that of the paper's previous
round, and training on the devices in the last round does not enter the stored and served model. The mean itself is not
tested: its statistics would belong to other weights. The authors' code labels a weak view of each example, this the
example itself; their code can measure statistics on the devices' examples as well, this only on the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Batch, Cohort, Resources, Result, ServerTraining, network_leaves
from shared.algorithms.semisupervised.full_model.labelled_steps import supervise
from shared.algorithms.semisupervised.full_model.network_steps import FORWARD, TrainingCopy, assign_training
from shared.algorithms.semisupervised.full_model.semifl_device import FIX, MIX, local, timed_step
from shared.algorithms.semisupervised.full_model.semifl_settings import SemiflSettings, draw_epoch_batches
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.round_terms import add_terms_to_mean, average_terms, extract_terms, read_number
from shared.algorithms.semisupervised.semisfl_server import require_classes, view_batches
from shared.algorithms.semisupervised.settings import MOMENTUM, add_prefix, take_prefix, takes_options
from shared.models.base import Model
from shared.models.running_statistics import measure_statistics
from shared.protocol.messages import Assignment, derive_seed
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree

TESTED = "tested/"
"""Prefix of the leaves of the model after the server's epochs."""
ROUNDS = "server_rounds"
"""Fact: rounds, without missed ones, for which the server has trained."""
STATISTICS_BATCH = 250
"""Maximum labelled examples of a pass that measures running statistics, as in the authors' code."""


def init(model: Model, _seed: int) -> State:
    """Return the model, a second copy as the tested one, and a server momentum of zero."""
    leaves = model.tree()
    momentum = {name: torch.zeros_like(leaf) for name, leaf in model.layers.named_parameters() if leaf.requires_grad}
    first = ({name: leaf.clone() for name, leaf in leaves.items()} for _ in range(2))
    return State(next(first) | add_prefix(next(first), TESTED) | add_prefix(momentum, MOMENTUM), {ROUNDS: 0})


def train(settings: SemiflSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Take the server's epochs of a round, and measure running statistics: see `ServerTraining.train`.

    Args:
        model: The whole network, without storage.
        state: The server's before the round; not changed.

    Raises:
        ConfigError: A class has no example, or is unknown to the network; or training diverges.
    """
    require_classes(model, labelled)
    sent, rounds = broadcast(state), int(read_number(state.facts, ROUNDS))
    leaves, hyper = TrainingCopy.copy_from(model, sent), settings.hyper_of(cohort.hyper, number, cohort.rounds)

    def network(view: Tensor) -> Tensor:
        return run_part(model, model.layers, leaves.all, view, train=True)

    views = labelled_epochs(settings, labelled, cohort, number, first=not rounds)
    facts = supervise(settings.descent([*leaves.weights.items()], hyper), views, network, state.facts)
    trained_leaves = leaves.detach_leaves()
    batches = labelled[0].tensor_split(-(-len(labelled[0]) // STATISTICS_BATCH))
    trained = measure_statistics(model.layers, {name: trained_leaves[name] for name in sent}, batches)
    momentum = add_prefix(take_prefix(state.tree, MOMENTUM), MOMENTUM)
    return State(trained | add_prefix(trained, TESTED) | momentum, {**facts, ROUNDS: rounds + 1})


def labelled_epochs(
    settings: SemiflSettings, labelled: Batch, cohort: Cohort, number: int, *, first: bool
) -> Iterator[Batch]:
    """Yield a weak view of a labelled batch and its labels, for each step of a round's epochs.

    Args:
        first: Whether this is the first training, which includes the warm-up epochs.
    """
    seed, count = derive_seed(cohort.seed, number, "supervised"), len(labelled[1])
    generator, size = torch.Generator().manual_seed(seed), settings.server_batch_of(cohort.hyper, count)
    epochs = settings.server_epochs + (settings.warmup_epochs if first else 0)
    orders = (index for _ in range(epochs) for index in draw_epoch_batches(count, size, generator))
    for (view,), labels in view_batches(settings, labelled, enumerate(orders, 1), ("weak",), seed):
        yield view, labels


def broadcast(state: State, _device: str = "", _assignment: Assignment | None = None) -> Tree:
    """Return the model after the server's epochs, with its running statistics."""
    return network_leaves(state.tree)


def absorb(mean: Mean, _device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add a device's change; devices that trained have equal weights, those that skipped none."""
    terms = {name: result.metrics[name] for name in (FIX, MIX) if name in result.metrics}
    return add_terms_to_mean(tree.accumulate(mean, result.tree, 1.0, result.coverage), terms)


def aggregate(settings: SemiflSettings, state: State, mean: Mean) -> State:
    """Return the state after a step along the mean change; unchanged, momentum included, where no device trained."""
    changes = tree.finish_mean(mean)
    after = dict(state.tree)
    for name, momentum in take_prefix(state.tree, MOMENTUM).items():
        if name in changes:
            after[MOMENTUM + name] = settings.server_momentum * momentum - changes[name].to(momentum.dtype)
            after[name] = state.tree[name] - after[MOMENTUM + name]
    return State(after, {**state.facts, **extract_terms(mean)})


@takes_options(SemiflSettings)
def semifl(settings: SemiflSettings) -> Algorithm:
    """Build the algorithm; options as in `SemiflSettings`.

    Raises:
        ValueError: An option is out of range.
    """
    share = 2 + FORWARD / settings.epochs  # two batches per step, and one pass over all examples for labels
    return Algorithm(
        kinds=frozenset({"classification"}),
        init=init,
        assign=partial(assign_training, settings, epochs=settings.epochs),
        broadcast=broadcast,
        local=partial(local, settings),
        absorb=absorb,
        aggregate=partial(aggregate, settings),
        evaluated=lambda state: take_prefix(state.tree, TESTED),  # evaluated, exported and served
        server=ServerTraining(partial(train, settings), require_classes, average_terms),
        resources=Resources(step_share=lambda _model, _assignment: share, timed_step=partial(timed_step, settings)),
        reads_labels=False,
    )
