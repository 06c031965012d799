"""FedSwitch: labels at the server alone; devices train the whole network by a teacher, or by the student itself.

J. Zhao, S. Ghosh, A. Bharadwaj, C.-Y. Ma. When does the student surpass the teacher? Federated Semi-supervised Learning
with Teacher-Student EMA, https://arxiv.org/abs/2301.10114. **A reconstruction**: no code of it is public, and what is
known here are its abstract and what Y. Xu et al., SemiSFL, https://arxiv.org/abs/2307.15870, say of it. In every round
the server takes supervised steps, and its teacher follows:

    w <- w - eta dCE/dw        w~ <- g w~ + (1 - g) w

Student and teacher go down. With q~ the teacher's mean prediction over a device's examples,

    the teacher labels where KL(q~ || uniform) < switch_divergence, else the student does

and the device takes FixMatch's steps: cross-entropy of a strong view with the label of the weak one, where that is
sure, as a mean over the whole batch. Where the teacher labels, it follows the student there as well; that copy stays on
the device. Changes of the students go up, and their mean moves the server's. Judged and served is the teacher.

Only what is needed travels: a device whose student labelled is sent the student alone from then on, whose mean
prediction is tested in the teacher's place, until that is even enough again. The divergence goes up with the update: a
number that says how uneven a device's classes seem, and not which they are.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shared.algorithms.base import (
    Algorithm,
    Batch,
    Cohort,
    Resources,
    Result,
    ServerTraining,
)
from shared.algorithms.semisupervised.full_model.fedswitch_device import DIVERGENCE, SwitchSettings, local
from shared.algorithms.semisupervised.full_model.labelled_steps import labelled_views, supervise
from shared.algorithms.semisupervised.full_model.network_steps import FORWARD, Descent, Leaves, assign
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.round_terms import CONSISTENCY, absorb_terms, number_fact, round_terms
from shared.algorithms.semisupervised.semisfl import check_update, teacher_of
from shared.algorithms.semisupervised.semisfl_server import FOLLOWED, require_classes
from shared.algorithms.semisupervised.settings import TEACHER, prefixed, select, takes_options
from shared.algorithms.semisupervised.teacher import follow, inertia
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree


def init(model: Model, _seed: int) -> State:
    """Return student and teacher, which begin alike."""
    student = model.tree()
    teacher = prefixed({name: leaf.clone() for name, leaf in student.items()}, TEACHER)
    return State({name: leaf.clone() for name, leaf in student.items()} | teacher, {FOLLOWED: 0})


def train(settings: SwitchSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Take the supervised steps of a round: see `ServerTraining.train`.

    Raises:
        ConfigError: A class has no example, or there is a class that the network does not know; or training diverges.
    """
    student, teacher = Leaves.copied(model, state.tree), select(state.tree, TEACHER)
    followed, hyper = int(number_fact(state.facts, FOLLOWED)), settings.hyper_of(cohort.hyper, number, cohort.rounds)
    views = labelled_views(settings, model, labelled, cohort, number, first=not followed)

    def network(view: Tensor) -> Tensor:
        return run_part(model, model.layers, student.all, view, train=True)

    def teach() -> None:
        nonlocal teacher, followed
        teacher = follow(teacher, student.all, inertia(followed, settings.inertia))
        followed += 1

    descent = Descent([*student.weights.items()], hyper, settings.nesterov)
    facts = supervise(descent, views, network, state.facts, teach)
    return State({**student.detached(), **prefixed(teacher, TEACHER)}, {**facts, FOLLOWED: followed})


def broadcast(settings: SwitchSettings, state: State, device: str, _assignment: Assignment) -> Tree:
    """Return student and teacher; the student alone where that labels the device's examples."""
    divergence = state.facts.get(f"{DIVERGENCE}/{device}", 0.0)
    assert isinstance(divergence, float)
    if divergence < settings.switch_divergence:
        return state.tree
    return student_of(state)


def student_of(state: State) -> Tree:
    """Return the student's leaves."""
    return {name: leaf for name, leaf in state.tree.items() if not name.startswith(TEACHER)}


def absorb(settings: SwitchSettings, mean: Mean, device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add a student's change, and note its loss and how even its labeller's answers were."""
    added = tree.accumulate(mean, result.tree, result.weight if settings.weighting == "examples" else 1.0)
    noted = {f"{DIVERGENCE}/{device}": float(result.metrics[DIVERGENCE])} if DIVERGENCE in result.metrics else {}
    told = {} if result.loss is None else {CONSISTENCY: result.loss}
    return absorb_terms(Mean(added.total, added.weight, {**added.facts, **noted}), told)


def aggregate(state: State, mean: Mean) -> State:
    """Move the student by the mean change."""
    moved = tree.add(student_of(state), tree.finish_mean(mean))
    return State({**state.tree, **moved}, {**state.facts, **mean.facts})


def step_share(_model: Model, assignment: Assignment) -> float:
    """Return what a step takes with the pass that labels, and its share of the pass that tests who does."""
    return 1 + FORWARD + FORWARD / max(1, assignment.hyper.local_epochs)


@takes_options(SwitchSettings)
def fedswitch(settings: SwitchSettings) -> Algorithm:
    """Build the algorithm; options as in `SwitchSettings`.

    Raises:
        ValueError: One is out of range.
    """
    return Algorithm(
        init=init,
        assign=partial(assign, settings),
        broadcast=partial(broadcast, settings),
        local=partial(local, settings),
        absorb=partial(absorb, settings),
        aggregate=aggregate,
        check_update=check_update,
        server=ServerTraining(partial(train, settings), teacher_of, require_classes, round_terms),
        resources=Resources(step_share=step_share),
        reads_labels=False,
    )
