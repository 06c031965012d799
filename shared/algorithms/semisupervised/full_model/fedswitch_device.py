"""Device half of FedSwitch: FixMatch steps with labels of teacher or student.

J. Zhao et al., https://arxiv.org/abs/2301.10114; a reconstruction, see `fedswitch`. FixMatch: K. Sohn et al., 2020,
https://arxiv.org/abs/2001.07685.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared.algorithms.base import Batches, Outcome, Result
from shared.algorithms.local_training import epochs
from shared.algorithms.semisupervised.full_model.network_steps import (
    Descent,
    StepLoss,
    TrainingCopy,
    require_examples,
    unlabelled_views,
)
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.losses import PseudoLabels, consistency
from shared.algorithms.semisupervised.settings import TEACHER, SteppedSettings, require_divergence, take_prefix
from shared.algorithms.semisupervised.switch import divergence_from_uniform, use_teacher
from shared.algorithms.semisupervised.teacher import update_teacher
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree, check_like, subtract

DIVERGENCE = "divergence"
"""Metric of an update: divergence of the labeller's mean prediction from uniform, in nats."""


@dataclass(frozen=True, kw_only=True)
class SwitchSettings(SteppedSettings):
    """FedSwitch's settings, by their names in a plan.

    Attributes:
        inertia: g of the teacher, on the server and on a device.
        switch_divergence: Divergence from which the student labels, in nats: 0 for always, more than log M of M
            classes, such as 100, for never.
        weighting: Weight of a student in the mean: equal for all, or by its device's examples.
    """

    inertia: float = 0.99
    switch_divergence: float = 0.5
    weighting: Literal["uniform", "examples"] = "uniform"

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        super().__post_init__()
        if not 0 <= self.inertia < 1:
            raise ValueError("inertia must be in [0, 1)")
        require_divergence(self.switch_divergence)


@torch.no_grad()
def mean_prediction(model: Model, leaves: Mapping[str, Tensor], batches: Batches) -> Tensor | None:
    """Return the mean of a network's predictions over a device's examples, of shape (M,); None without a batch.

    Args:
        model: The network, with or without storage.
        batches: The first epoch is used, without augmentation.
    """
    total = None
    for inputs, _ in next(epochs(batches), iter(())):
        shares = run_part(model, model.layers, leaves, inputs, train=False).softmax(1).sum(0, dtype=torch.float64)
        total = shares if total is None else total + shares
    return None if total is None else total / batches.num_examples


def read_models(model: Model, start: Tree) -> tuple[Tree, Tree]:
    """Return the received student and teacher, the latter empty where only the student was sent.

    Raises:
        WireError: They are not of this network.
    """
    like = model.tree()
    teacher, student = take_prefix(start, TEACHER), {name: start[name] for name in start.keys() & like.keys()}
    for tree in (student, teacher):
        check_like(tree, like)
    if len(student) != len(like) or len(teacher) not in {0, len(like)} or len(start) != len(student) + len(teacher):
        raise WireError(f"received {len(start)} tensors, expected one or two networks of {len(like)}", reason="shape")
    return student, teacher


@dataclass
class Adaptation:
    """A student on its device, and the teacher that follows it.

    Attributes:
        teacher: Weights and buffers; empty where the student labels.
    """

    settings: SwitchSettings
    model: Model
    student: TrainingCopy
    teacher: Tree

    def objective(self, weak: Tensor, strong: Tensor) -> StepLoss:
        """Return the mean loss of a batch, zero for examples without a confident label.

        Args:
            weak: The view that is labelled, of shape (B, ...).
            strong: The view that is trained on.
        """
        model, layers = self.model, self.model.layers
        with torch.no_grad():
            outputs = run_part(model, layers, self.teacher or self.student.all, weak, train=False)
        pseudo = PseudoLabels.of(outputs, self.settings.threshold)
        losses = consistency(run_part(model, layers, self.student.all, strong, train=True), pseudo)
        return StepLoss(losses.mean(), len(losses), sure=int(pseudo.confident.sum()))

    def adapt(self) -> None:
        """Move the teacher towards the student, if there is a teacher."""
        self.teacher = update_teacher(self.teacher, self.student.all, self.settings.inertia)


def local(
    settings: SwitchSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Outcome:
    """Device half: see `Algorithm.local`. Labels are not read.

    Raises:
        TaskFailed: There are no examples, or the training has diverged.
        WireError: The server sent other parameters.
    """
    require_examples(batches)
    student, teacher = read_models(model, start)
    mean, metrics = mean_prediction(model, teacher or student, batches), dict[str, float]()
    if mean is not None:
        metrics[DIVERGENCE] = divergence_from_uniform(mean)
        teacher = teacher if use_teacher(mean, settings.switch_divergence) else {}
    adaptation = Adaptation(settings, model, TrainingCopy.copy_from(model, student), teacher)
    views = unlabelled_views(settings, batches, assignment, "weak", "strong")
    descent = Descent([*adaptation.student.weights.items()], assignment.hyper, settings.nesterov)
    summary = descent.take((adaptation.objective(weak, strong) for _, (weak, strong) in views), after=adaptation.adapt)
    if summary.examples:
        metrics |= {"sure_labels": summary.sure / summary.examples, "teacher_labels": float(bool(teacher))}
    change, count = subtract(adaptation.student.detach_leaves(), student), batches.num_examples
    return state, Result(change, float(count), count, summary.loss, metrics=metrics)
