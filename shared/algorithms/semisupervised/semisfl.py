"""SemiSFL: semi-supervised split learning with labels at the server alone.

Y. Xu, Y. Liao, H. Xu, Z. Yao, L. Huang, C. Qiao. SemiSFL: Split Federated Learning on Unlabeled and Non-IID Data,
https://arxiv.org/abs/2307.15870; their code is https://github.com/littlefishe/Capsule. In every round the server takes
K_s supervised steps,

    l_s = CE + T        w~ <- g w~ + (1 - g) w                                             (4)

sends the bottoms of student and teacher, and then takes K_u steps with the devices. Each device sends the student's
features of a strong view and the teacher's of a weak one, and receives the gradient of the former:

    l_u = H + C         H: cross-entropy with the teacher's confident labels   C: clustering    (1), (5), (6)
    w_s <- w_s - eta/N sum_i dH_i/dw_s        w_p <- w_p - eta/N sum_i dC_i/dw_p           (7)
    w_ci <- w_ci - eta dl_ui/dw_c                                                          (8)
    w_c <- 1/N sum_i w_ci

where w_p projects features for T and C. The teacher is evaluated and served. No label, no output of the network and no
example travels. `fedswitch_sl`, the paper's main ablation, is without T, C and w_p, and if the teacher predicts mostly
few classes for a device's examples, the student labels them in its next session (`switch`): then only the student's
bottom is sent, and computes both views. The parts are in `losses`, `queue`, `teacher`, `switch` and `supervised_steps`,
the halves in `semisfl_device` and `semisfl_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import nn

from shared.algorithms.base import (
    Algorithm,
    Allocation,
    Cohort,
    Resources,
    Result,
    ServerTraining,
    Split,
    assign_alike,
)
from shared.algorithms.semisupervised.queue import Queue, Ring
from shared.algorithms.semisupervised.round_terms import average_terms, read_number
from shared.algorithms.semisupervised.semisfl_device import local
from shared.algorithms.semisupervised.semisfl_server import (
    ANSWERS,
    FOLLOWED,
    HISTORY,
    LABELLED,
    LABELLER,
    SESSION_STEPS,
    STUDENT,
    SUPERVISED_LOSS,
    UNLABELLED_LOSS,
    check_features,
    check_labelled,
    decide_labellers,
    serve,
    train,
)
from shared.algorithms.semisupervised.settings import (
    HEAD,
    MOMENTUM,
    TEACHER,
    TEACHER_HEAD,
    SemisflSettings,
    add_prefix,
    take_prefix,
)
from shared.algorithms.semisupervised.supervised_steps import StepHistory, StepRule, least_steps
from shared.algorithms.split.cut_shapes import infer_feature_shape
from shared.data.views.pair import Strength
from shared.errors import ConfigError, WireError
from shared.models.base import Model
from shared.models.initial_weights import fill
from shared.protocol.messages import Assignment
from shared.tensors import tree
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State, Tree, check_like

EXAMPLES = "examples/"
"""Prefix of the facts with the number of a device's examples."""


def init(settings: SemisflSettings, model: Model, seed: int) -> State:
    """Return student, teacher, heads and an empty queue.

    Raises:
        ConfigError: The model cannot be cut there, or does not declare the shape of its inputs.
    """
    cut = settings.cut_of(model)
    below = model.below(cut).state_dict()
    if not model.example:
        raise ConfigError(
            "the model does not say the shape of its inputs, which the projection head needs: return "
            "shared.models.base.Model(network, example=(channels, height, width)) from its builder"
        )
    zeros = {name: torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in below.items()}
    width = torch.Size(infer_feature_shape(model, cut, zeros)).numel()
    head = _draw_head(settings, width, seed)
    out = width if settings.head == "none" else settings.projections
    student = model.tree()
    leaves = {name: leaf.clone() for name, leaf in student.items()}
    leaves |= add_prefix({name: leaf.clone() for name, leaf in student.items()}, TEACHER)
    leaves |= add_prefix(head, HEAD) | add_prefix({name: leaf.clone() for name, leaf in head.items()}, TEACHER_HEAD)
    room = settings.labelled_queue * settings.projects, settings.unlabelled_queue * settings.clustering
    rings = (Ring.empty(capacity, out) for capacity in room)
    facts = {FOLLOWED: 0, LABELLED: 0, SUPERVISED_LOSS: 0.0, UNLABELLED_LOSS: 0.0, SESSION_STEPS: 0}
    return State(
        leaves | Queue(*rings).tree(),
        {**facts, **StepHistory(steps=settings.supervised_steps).facts(HISTORY), "below": " ".join(below)},
    )


def _draw_head(settings: SemisflSettings, width: int, seed: int) -> Tree:
    """Return the initial projection head for features of `width` numbers; empty if no loss uses it."""
    if not settings.projects:
        return {}
    hidden, out = settings.hidden, settings.projections
    widths = {"none": [], "linear": [(width, out)], "mlp": [(width, hidden), (hidden, out)]}[settings.head]
    with seed_torch(seed):
        layers = nn.Sequential(*(nn.Linear(*pair) for pair in widths))
    fill(layers, seed + 1, he_normal=False)
    return {name: leaf.detach() for name, leaf in layers.state_dict().items()}


def assign(
    settings: SemisflSettings, state: State, cohort: Cohort, allocation: Allocation, number: int
) -> dict[str, Assignment]:
    """Assign every device its steps and the round's step size."""
    hyper = settings.hyper_of(cohort.hyper, number, cohort.rounds)
    hyper = msgspec.structs.replace(hyper, local_epochs=settings.steps)  # epochs of at least one batch
    return {
        device: msgspec.structs.replace(task, hyper=hyper, steps=settings.steps)
        for device, task in assign_alike(state, cohort, allocation, number).items()
    }


def broadcast(state: State, device: str, _assignment: Assignment) -> Tree:
    """Return the bottoms of student and teacher; the student's alone if it labels the device's examples."""
    below = str(state.facts["below"]).split()
    if state.facts.get(LABELLER + device) == STUDENT:
        return {name: state.tree[name] for name in below}
    both = (*below, *(TEACHER + name for name in below))
    return {name: state.tree[name] for name in both}


def students_leaves(down: Tree) -> Tree:
    """Return the student's leaves of a download."""
    return {name: leaf for name, leaf in down.items() if not name.startswith(TEACHER)}


def check_update(_assignment: Assignment, down: Tree, up: Tree) -> None:
    """Reject an update other than the whole bottom of a student."""
    like = students_leaves(down)
    check_like(up, like)
    if missing := sorted(like.keys() - up.keys()):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")


def absorb(mean: Mean, device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add a device's bottom, with equal weights."""
    total = tree.accumulate(mean, result.tree, 1.0)
    return Mean(total.total, total.weight, {**total.facts, EXAMPLES + device: result.num_examples})


def aggregate(settings: SemisflSettings, state: State, mean: Mean) -> State:
    """Return the state with the mean as the student's bottom, an empty session queue, and the next K_s."""
    if not mean.total:
        return state
    means = tree.finish_mean(mean)
    for name, leaf in means.items():
        like = state.tree[name]
        means[name] = (leaf if like.is_floating_point() else leaf.round()).to(like.dtype)
    others = {name: leaf for name, leaf in state.tree.items() if not name.startswith((MOMENTUM, ANSWERS))}
    facts = {**state.facts, **mean.facts, **decide_labellers(settings, state.tree)}
    history = StepHistory.from_facts(facts, HISTORY)
    steps = int(read_number(facts, SESSION_STEPS))
    if settings.adapt and steps:
        unlabelled = sum(int(read_number(facts, name)) for name in facts if name.startswith(EXAMPLES))
        least = least_steps(settings.rule, int(read_number(facts, LABELLED)), unlabelled, settings.steps)
        supervised_loss, unlabelled_loss = (
            read_number(facts, SUPERVISED_LOSS),
            read_number(facts, UNLABELLED_LOSS) / steps,
        )
        history = history.observe(settings.rule, supervised_loss, unlabelled_loss, settings.steps).decide(
            settings.rule, least
        )
    queue = Queue.from_tree(state.tree).after_session().tree()
    return State({**others, **means, **queue}, {**facts, **history.facts(HISTORY)})


def teacher_of(state: State) -> Tree:
    """Return the teacher's parameters, which are evaluated, exported and served."""
    return take_prefix(state.tree, TEACHER)


def semisfl(  # noqa: PLR0913 - options of a plan, all by name
    *,
    cut: int = 0,
    steps: int = 50,
    supervised_steps: int = 100,
    warmup_steps: int = 0,
    server_batch: int = 0,
    threshold: float = 0.95,
    temperature: float = 0.2,
    inertia: float = 0.99,
    head: Literal["none", "linear", "mlp"] = "mlp",
    hidden: int = 512,
    projections: int = 128,
    labelled_queue: int = 1024,
    unlabelled_queue: int = 1024,
    mirrors: bool = True,
    server_views: Strength = "strong",
    teacher_update: Literal["server", "device"] = "server",
    schedule: Literal["cosine", "constant"] = "cosine",
    least_rate: float = 0.005,
    nesterov: bool = True,
    contrastive: bool = True,
    clustering: bool = True,
    switch: bool = False,
    switch_divergence: float = 0.5,
    adapt: bool = True,
    alpha: float = 1.5,
    beta: float = 8.0,
    period: int = 10,
    window: int = 10,
    per_step: bool = True,
) -> Algorithm:
    """Build the algorithm; options as in `SemisflSettings` and `StepRule`.

    Raises:
        ValueError: An option is out of range.
    """
    options = dict(locals())
    rule = StepRule(**{name: options.pop(name) for name in ("alpha", "beta", "period", "window", "per_step")})
    return _algorithm(SemisflSettings(**options, rule=rule))


def _algorithm(settings: SemisflSettings) -> Algorithm:
    return Algorithm(
        kinds=frozenset({"classification"}),
        init=partial(init, settings),
        assign=partial(assign, settings),
        broadcast=broadcast,
        local=partial(local, settings),
        absorb=absorb,
        aggregate=partial(aggregate, settings),
        check_update=check_update,
        split=Split(partial(serve, settings), partial(check_features, settings), passes=2, cut_of=settings.cut_of),
        evaluated=teacher_of,
        server=ServerTraining(partial(train, settings), partial(check_labelled, settings), average_terms),
        resources=Resources(uploaded=students_leaves),
        reads_labels=False,
    )


VARIANTS: Mapping[str, Callable[..., Algorithm]] = {
    "semisfl_fixed": partial(semisfl, adapt=False),
    "fedswitch_sl": partial(semisfl, contrastive=False, clustering=False, switch=True),
}
"""Ablations with other defaults: constant K_s; no projections, with a switch of the labeller."""
