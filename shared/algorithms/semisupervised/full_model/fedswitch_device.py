"""The device half of FedSwitch: FixMatch by whoever labels best, the teacher or the student, and a teacher that adapts.

J. Zhao et al., https://arxiv.org/abs/2301.10114; a reconstruction, see `fedswitch`. FixMatch: K. Sohn et al., 2020,
https://arxiv.org/abs/2001.07685.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.algorithms.base import Batches, Outcome, Result
from shared.algorithms.fedavg import require_finite_loss
from shared.algorithms.local_training import epochs
from shared.algorithms.semisupervised.full_model.labelled_steps import Leaves
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.losses import PseudoLabels, consistency
from shared.algorithms.semisupervised.settings import TEACHER, SemisflSettings, select
from shared.algorithms.semisupervised.switch import divergence_from_uniform, use_teacher
from shared.algorithms.semisupervised.teacher import follow
from shared.data.views.pair import make_views
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, mix
from shared.tensors.sgd import descend
from shared.tensors.tree import State, Tree, check_like, subtract

DIVERGENCE = "divergence"
"""What a device says of its labeller's answers: how far their mean is from equal shares of the classes, in nats."""


@dataclass(frozen=True)
class SwitchSettings:
    """The method's settings, by their names in a plan.

    Attributes:
        common: Those that it has in common with SemiSFL.
        switch_divergence: From which divergence on the student labels: 0 for always, infinite for never.
        weighting: Whether every student counts as much in the mean, or by its device's examples.
    """

    common: SemisflSettings
    switch_divergence: float = 0.5
    weighting: str = "uniform"

    def __post_init__(self) -> None:
        """Refuse what is no such method.

        Raises:
            ValueError: A setting is out of range, or unknown.
        """
        if not self.switch_divergence >= 0:
            raise ValueError(f"switch_divergence must be >= 0, in nats, or inf, not {self.switch_divergence}")
        if self.weighting not in {"uniform", "examples"}:
            raise ValueError(f"weighting must be uniform or examples, not {self.weighting!r}")


@torch.no_grad()
def mean_prediction(model: Model, leaves: Mapping[str, Tensor], batches: Batches) -> Tensor | None:
    """Return the mean of a network's predictions over a device's examples, of shape (M,); None without a batch.

    Args:
        model: The network, of any storage.
        leaves: Its parameters and buffers.
        batches: Of which the first epoch is looked at, as it is, without a view.
    """
    total = None
    for inputs, _ in next(epochs(batches), iter(())):
        shares = run_part(model, model.layers, leaves, inputs, train=False).softmax(1).sum(0, dtype=torch.float64)
        total = shares if total is None else total + shares
    return None if total is None else total / batches.num_examples


def read_models(model: Model, start: Tree) -> tuple[Tree, Tree]:
    """Return the student and the teacher that came, the latter empty where only the student did.

    Raises:
        WireError: It is not that, of this network.
    """
    like = model.layers.state_dict()
    teacher, student = select(start, TEACHER), {name: start[name] for name in start.keys() & like.keys()}
    for tree in (student, teacher):
        check_like(tree, like)
    if len(student) != len(like) or len(teacher) not in {0, len(like)} or len(start) != len(student) + len(teacher):
        raise WireError(f"{len(start)} tensors came, not one or two networks of {len(like)}", reason="shape")
    return student, teacher


@dataclass
class Adaptation:
    """A student on its device, with the teacher that follows it where that labels.

    Attributes:
        settings: The method's.
        model: The network.
        student: What is trained.
        teacher: Weights and buffers; empty where the student labels.
        momenta: Of the student's weights.
    """

    settings: SemisflSettings
    model: Model
    student: Leaves
    teacher: Tree
    momenta: Tree

    def losses(self, weak: Tensor, strong: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each example, of shape (B,), and whether its label is sure.

        Args:
            weak: The view that is labelled, of shape (B, ...).
            strong: The view that is trained on.
        """
        model, layers = self.model, self.model.layers
        with torch.no_grad():
            outputs = run_part(model, layers, self.teacher or self.student.all, weak, train=False)
        pseudo = PseudoLabels.of(outputs, self.settings.threshold)
        return consistency(run_part(model, layers, self.student.all, strong, train=True), pseudo), pseudo.confident

    def step(self, loss: Tensor, hyper: Hyper) -> None:
        """Move the student along the gradient of a loss, and the teacher after it."""
        torch.autograd.backward(loss, inputs=[*self.student.weights.values()])
        descend(self.student.weights.items(), self.momenta, hyper, nesterov=self.settings.nesterov)
        self.teacher = follow(self.teacher, self.student.all, self.settings.inertia)


def local(
    settings: SwitchSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. Labels, if the batches had any, are not looked at.

    Raises:
        TaskFailed: There are no examples, or the training has diverged.
        WireError: The server sent other parameters.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")
    student, teacher = read_models(model, start)
    mean, metrics = mean_prediction(model, teacher or student, batches), dict[str, float]()
    if mean is not None:
        metrics[DIVERGENCE] = divergence_from_uniform(mean)
        teacher = teacher if use_teacher(mean, settings.switch_divergence) else {}
    here = Adaptation(settings.common, model, Leaves.copied(model, student), teacher, {})
    seen, sure, total = 0, 0, list[float]()
    for step, (inputs, _) in enumerate(batches, 1):
        seed = mix(assignment.seed, step, "views")
        weak, strong = make_views(inputs, ("weak", "strong"), seed, mirrors=settings.common.mirrors)
        losses, confident = here.losses(weak, strong)
        total.append(require_finite_loss(losses.mean().item(), step) * len(inputs))
        here.step(losses.mean(), assignment.hyper)
        seen, sure = seen + len(inputs), sure + int(confident.sum())
    if seen:
        metrics |= {"sure_labels": sure / seen, "teacher_labels": float(bool(teacher))}
    moved = subtract(here.student.detached(), student)
    count = batches.num_examples
    return state, Result(moved, float(count), count, math.fsum(total) / seen if seen else None, metrics=metrics)
