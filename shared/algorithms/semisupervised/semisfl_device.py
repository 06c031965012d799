"""Device half of SemiSFL: features of two views; equation (8).

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. The teacher's bottom runs in evaluation mode: its forward
pass stores no activations, and its BatchNorm uses the received running statistics.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn

from shared.algorithms.base import Batches, Result, Session
from shared.algorithms.semisupervised.learner import run_part
from shared.algorithms.semisupervised.settings import TEACHER, SemisflSettings, take_prefix
from shared.algorithms.semisupervised.teacher import update_teacher
from shared.algorithms.split.settings import is_finite
from shared.data.views.pair import make_views
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Missed, derive_seed
from shared.tensors.training_step import descend
from shared.tensors.tree import State, Tree, check_like


class Bottoms:
    """A device's private copies of both parts below the cut, for one session."""

    def __init__(self, settings: SemisflSettings, model: Model, start: Tree) -> None:
        """Copy the student's leaves; the teacher's are never written.

        Args:
            model: The whole network, without storage.
            start: Received leaves of both bottoms; with `switch`, possibly the student's alone.

        Raises:
            WireError: The leaves are not those of this network.
        """
        self._settings, self._model = settings, model
        self._part: nn.Sequential = model.below(settings.cut_of(model))
        like = dict(self._part.state_dict())
        self._teacher, student = take_prefix(start, TEACHER), {name: start[name] for name in start.keys() & like.keys()}
        for tree in (student, self._teacher):
            check_like(tree, like)
        labels_itself = settings.switch and not self._teacher
        if len(start) != len(like) * (1 if labels_itself else 2) or len(student) != len(like):
            raise WireError(f"received {len(start)} tensors, expected both bottoms of {len(like)}", reason="shape")
        trainable = {name for name, leaf in self._part.named_parameters() if leaf.requires_grad}
        self._names = tuple(like)
        self._weights = {name: student[name].clone().requires_grad_() for name in like if name in trainable}
        self._buffers = {name: student[name].clone() for name in like if name not in trainable}
        self._momenta: Tree = {}

    def forward(self, strong: Tensor) -> tuple[Tensor, Tree]:
        """Return the student's features of a view, and the buffers after it."""
        buffers = {name: leaf.clone() for name, leaf in self._buffers.items()}
        return run_part(self._model, self._part, {**self._weights, **buffers}, strong, train=True), buffers

    @torch.no_grad()
    def teach(self, weak: Tensor) -> Tensor:
        """Return features of a view in evaluation mode: the teacher's, or the student's if no teacher was sent."""
        leaves = self._teacher or {**self._weights, **self._buffers}
        return run_part(self._model, self._part, leaves, weak, train=False)

    def step(self, features: Tensor, upstream: Tensor, buffers: Tree, hyper: Hyper) -> bool:
        """Step the student along the gradient of its features; return False, without a step, if that is not finite.

        Args:
            features: Output of `forward`, of shape (B, ...).
            upstream: Their gradient, of the same shape.
            buffers: Output of `forward`; the student's from now on.
        """
        if self._weights:
            # not `backward(features, upstream)`: to compare shapes, torch imports a symbolic algebra package of 50 MB
            torch.autograd.backward(torch.dot(features.flatten(), upstream.flatten()), inputs=[*self._weights.values()])
        if not all(is_finite(leaf.grad) for leaf in self._weights.values() if leaf.grad is not None):
            for leaf in self._weights.values():
                leaf.grad = None
            return False
        descend(self._weights.items(), self._momenta, hyper, nesterov=self._settings.nesterov)
        self._buffers = buffers
        if self._settings.teacher_update == "device":
            self._teacher = update_teacher(self._teacher, {**self._weights, **buffers}, self._settings.inertia)
        return True

    def student(self) -> Tree:
        """Return the student's leaves."""
        leaves = {name: leaf.detach() for name, leaf in self._weights.items()} | self._buffers
        return {name: leaves[name] for name in self._names}


def local(
    settings: SemisflSettings, model: Model, state: State, start: Tree, batches: Batches, assignment: Assignment
) -> Session:
    """Device half: see `Algorithm.local`. Labels are not read.

    Raises:
        TaskFailed: There are no examples, or the bottom has diverged.
        WireError: The server sent other parameters, or a gradient of another shape.
    """
    if not batches.num_examples:
        raise TaskFailed("no examples to train on")
    bottoms, due, missed, refused = Bottoms(settings, model, start), 1, 0, 0
    del start  # frees a file's pages
    for step, (inputs, _) in enumerate(islice(batches, assignment.steps), 1):
        if step < due:
            continue
        seed = derive_seed(assignment.seed, step, "views")  # so that a missed step changes no later draw
        weak, strong = make_views(inputs, ("weak", "strong"), seed, mirrors=settings.mirrors)
        taught = bottoms.teach(weak)
        features, buffers = bottoms.forward(strong)
        if not is_finite(features):
            raise TaskFailed("the bottom has diverged: features are NaN or infinite; lower the learning rate")
        down = yield {"features": features.detach(), "teacher": taught}
        due = step + (down.steps if isinstance(down, Missed) else 1)
        if isinstance(down, Missed):
            missed += min(due, assignment.steps + 1) - step
        elif "gradient" not in down:
            refused += 1
        else:
            if down["gradient"].shape != features.shape:
                raise WireError(f"gradient of shape {tuple(down['gradient'].shape)}", reason="shape")
            refused += not bottoms.step(features, down["gradient"], buffers, assignment.hyper)
        del features, buffers  # before the next batch needs the memory
    metrics = {"missed_steps": float(missed), "refused_batches": float(refused)}
    return state, Result(bottoms.student(), 1.0, batches.num_examples, metrics=metrics)
