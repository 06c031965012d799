"""FedSwitch: devices train the whole network on pseudo-labels of teacher or student.

J. Zhao, S. Ghosh, A. Bharadwaj, C.-Y. Ma. When does the student surpass the teacher? Federated Semi-supervised Learning
with Teacher-Student EMA, https://arxiv.org/abs/2301.10114. **A reconstruction**: none of its code is public, and this
relies on its abstract and on what Y. Xu et al., SemiSFL, https://arxiv.org/abs/2307.15870, say of it. In every round
the server takes supervised steps, and its teacher follows:

    w <- w - eta dCE/dw        w~ <- g w~ + (1 - g) w

Devices receive student and teacher. With q~ the teacher's mean prediction over a device's examples,

    the teacher labels where KL(q~ || uniform) < switch_divergence, else the student does

and the device takes FixMatch's steps: cross-entropy of a strong view with the label of the weak one, where that is
confident, as a mean over the whole batch. If the teacher labels, it follows the student on the device as well; that
copy stays there. Changes of the students go up, and their mean moves the server's. Evaluated and served is the teacher.

Only necessary models travel: after its student labelled, a device receives the student alone, whose mean prediction
is tested in the teacher's place, until it is even enough again. The divergence is sent with the update: a number that
tells how uneven a device's classes seem, but not which classes they are.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shared.algorithms.base import Algorithm, Batch, Cohort, Resources, Result, ServerTraining, network_leaves
from shared.algorithms.semisupervised.full_model.fedswitch_device import DIVERGENCE, SwitchSettings, local
from shared.algorithms.semisupervised.full_model.labelled_steps import labelled_views, supervise
from shared.algorithms.semisupervised.full_model.network_steps import FORWARD, Descent, TrainingCopy, assign_training
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.round_terms import CONSISTENCY, add_terms_to_mean, average_terms, read_number
from shared.algorithms.semisupervised.semisfl import check_update, students_leaves, teacher_of
from shared.algorithms.semisupervised.semisfl_server import FOLLOWED, require_classes
from shared.algorithms.semisupervised.settings import TEACHER, add_prefix, take_prefix, takes_options
from shared.algorithms.semisupervised.teacher import ema_decay, update_teacher
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree


def init(model: Model, _seed: int) -> State:
    """Return student and teacher, initially equal."""
    student = model.tree()
    teacher = add_prefix({name: leaf.clone() for name, leaf in student.items()}, TEACHER)
    return State({name: leaf.clone() for name, leaf in student.items()} | teacher, {FOLLOWED: 0})


def train(settings: SwitchSettings, model: Model, state: State, labelled: Batch, cohort: Cohort, number: int) -> State:
    """Take the supervised steps of a round: see `ServerTraining.train`.

    Raises:
        ConfigError: A class has no example, or is unknown to the network; or training diverges.
    """
    student, teacher = TrainingCopy.copy_from(model, state.tree), take_prefix(state.tree, TEACHER)
    followed, hyper = int(read_number(state.facts, FOLLOWED)), settings.hyper_of(cohort.hyper, number, cohort.rounds)
    views = labelled_views(settings, model, labelled, cohort, number, first=not followed)

    def network(view: Tensor) -> Tensor:
        return run_part(model, model.layers, student.all, view, train=True)

    def teach() -> None:
        nonlocal teacher, followed
        teacher = update_teacher(teacher, student.all, ema_decay(followed, settings.inertia))
        followed += 1

    descent = Descent([*student.weights.items()], hyper, settings.nesterov)
    facts = supervise(descent, views, network, state.facts, teach)
    return State({**student.detach_leaves(), **add_prefix(teacher, TEACHER)}, {**facts, FOLLOWED: followed})


def broadcast(settings: SwitchSettings, state: State, device: str, _assignment: Assignment) -> Tree:
    """Return student and teacher; the student alone if it labels the device's examples."""
    divergence = state.facts.get(f"{DIVERGENCE}/{device}", 0.0)
    assert isinstance(divergence, float)
    if divergence < settings.switch_divergence:
        return {**student_of(state), **add_prefix(take_prefix(state.tree, TEACHER), TEACHER)}
    return student_of(state)


def student_of(state: State) -> Tree:
    """Return the student's leaves."""
    return network_leaves(state.tree)


def absorb(settings: SwitchSettings, mean: Mean, device: str, _assignment: Assignment, result: Result) -> Mean:
    """Add a student's change, and record its loss and the divergence of its labels."""
    added = tree.accumulate(mean, result.tree, result.weight if settings.weighting == "examples" else 1.0)
    noted = {f"{DIVERGENCE}/{device}": float(result.metrics[DIVERGENCE])} if DIVERGENCE in result.metrics else {}
    terms = {} if result.loss is None else {CONSISTENCY: result.loss}
    return add_terms_to_mean(Mean(added.total, added.weight, {**added.facts, **noted}), terms)


def aggregate(state: State, mean: Mean) -> State:
    """Move the student by the mean change."""
    student = tree.add(student_of(state), tree.finish_mean(mean))
    return State({**state.tree, **student}, {**state.facts, **mean.facts})


def step_share(_model: Model, assignment: Assignment) -> float:
    """Return the relative cost of a step, with the pass for labels and a share of the pass for the divergence."""
    return 1 + FORWARD + FORWARD / max(1, assignment.hyper.local_epochs)


@takes_options(SwitchSettings)
def fedswitch(settings: SwitchSettings) -> Algorithm:
    """Build the algorithm; options as in `SwitchSettings`.

    Raises:
        ValueError: An option is out of range.
    """
    return Algorithm(
        kinds=frozenset({"classification"}),
        init=init,
        assign=partial(assign_training, settings),
        broadcast=partial(broadcast, settings),
        local=partial(local, settings),
        absorb=partial(absorb, settings),
        aggregate=aggregate,
        check_update=check_update,
        evaluated=teacher_of,
        server=ServerTraining(partial(train, settings), require_classes, average_terms),
        resources=Resources(step_share=step_share, uploaded=students_leaves),
        reads_labels=False,
    )
