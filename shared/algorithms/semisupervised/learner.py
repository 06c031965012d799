"""SemiSFL's server-side learner: student, teacher, heads and queue; equations (1) to (7).

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. The server part gets the gradient of the consistency
loss alone, the head that of the clustering regularization alone, the features that of both; the teacher gets none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.algorithms.semisupervised.losses import PseudoLabels, References, consistency, contrast, unit_rows
from shared.algorithms.semisupervised.queue import Queue
from shared.algorithms.semisupervised.round_terms import CLUSTERING, CONSISTENCY, CONTRASTIVE, SUPERVISED
from shared.algorithms.semisupervised.settings import (
    HEAD,
    MOMENTUM,
    TEACHER,
    TEACHER_HEAD,
    SemisflSettings,
    add_prefix,
    take_prefix,
)
from shared.algorithms.semisupervised.teacher import ema_decay, update_teacher
from shared.models.base import Model
from shared.models.chain import LayerChain
from shared.models.evaluate import training_mode
from shared.models.leaves import call_with, read_leaves
from shared.protocol.messages import Hyper
from shared.tensors.training_step import descend
from shared.tensors.tree import Tree

Terms: TypeAlias = dict[str, float]
"""Terms of a loss, by name."""


def _mean_of_devices(losses: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack([part.mean() for part in losses.split(sizes)]).mean()


def run_part(model: Model, part: nn.Module, leaves: Mapping[str, Tensor], inputs: Tensor, *, train: bool) -> Tensor:
    """Pass a batch through some layers; in training mode, buffers among the leaves change in place.

    Args:
        model: The whole network, whose mode its parts share.
        part: All of its layers, those below a cut, or those above it.
        inputs: Of shape (B, ...).
        train: Training mode: BatchNorm uses the batch, dropout is active.
    """
    part_leaves = {name: leaves[name] for name in read_leaves(part)}
    with training_mode(part if isinstance(part, LayerChain) else model.layers, train=train):
        outputs: Tensor = call_with(part, part_leaves, inputs)
    return outputs


def project(head: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Return the projections of features by a head's linear layers, normalised to length 1; of shape (B, P)."""
    rows = features.flatten(1)
    places = sorted({int(name.partition(".")[0]) for name in head})
    for place in places:
        rows = functional.linear(rows, head[f"{place}.weight"], head[f"{place}.bias"])
        rows = rows if place == places[-1] else rows.relu()
    return unit_rows(rows)


@dataclass
class Learner:
    """All leaves that a round changes, with the names of the server's state without prefixes.

    Attributes:
        model: The whole network, without storage.
        weights: The student's, which have a gradient.
        buffers: The student's running statistics.
        head: The student's projection head.
        momenta: Of weights and head, by their names in the state.
        followed: Steps that the teacher has followed, over the whole run.
    """

    settings: SemisflSettings
    model: Model
    weights: Tree
    buffers: Tree
    head: Tree
    teacher: Tree
    teacher_head: Tree
    momenta: Tree
    queue: Queue
    followed: int

    @classmethod
    def from_tree(cls, settings: SemisflSettings, model: Model, tree: Tree, followed: int) -> Learner:
        """Read a learner from a server's state, whose storage it shares.

        Args:
            model: The whole network, without storage.
            followed: Steps that the teacher has followed.
        """
        trainable = {name for name, leaf in model.layers.named_parameters() if leaf.requires_grad}
        names = model.tree().keys()
        return cls(
            settings,
            model,
            {name: tree[name].detach().requires_grad_() for name in names if name in trainable},
            {name: tree[name] for name in names if name not in trainable},
            {name: leaf.detach().requires_grad_() for name, leaf in take_prefix(tree, HEAD).items()},
            take_prefix(tree, TEACHER),
            take_prefix(tree, TEACHER_HEAD),
            take_prefix(tree, MOMENTUM),
            Queue.from_tree(tree),
            followed,
        )

    def tree(self) -> Tree:
        """Return all leaves as the tree of a server's state."""
        return {
            **{name: leaf.detach() for name, leaf in self.weights.items()},
            **self.buffers,
            **add_prefix({name: leaf.detach() for name, leaf in self.head.items()}, HEAD),
            **add_prefix(self.teacher, TEACHER),
            **add_prefix(self.teacher_head, TEACHER_HEAD),
            **add_prefix(self.momenta, MOMENTUM),
            **self.queue.tree(),
        }

    def supervised_step(self, view: Tensor, other: Tensor | None, labels: Tensor, hyper: Hyper) -> tuple[float, Terms]:
        """Train student and teacher on a labelled batch; return l_s of equation (4), and its terms.

        Args:
            view: Input of the student, of shape (B, ...).
            other: Another view of the same examples, for the teacher; None without projections.
        """
        cut = self.settings.cut_of(self.model)
        below, above = self.model.below(cut), self.model.above(cut)
        leaves = {**self.weights, **self.buffers}
        features = run_part(self.model, below, leaves, view, train=True)
        loss = functional.cross_entropy(run_part(self.model, above, leaves, features, train=True), labels)
        terms = {SUPERVISED: loss.item()}
        current = None if other is None else self._labelled_references(other, labels)
        if current and self.settings.contrastive:
            references = self.queue.with_current(current)
            compared = contrast(project(self.head, features), labels, references, self.settings.temperature).mean()
            loss, terms[CONTRASTIVE] = loss + compared, compared.item()
        trained = self._trained_weights(self.model.layers, with_head=self.settings.contrastive)
        self._step(trained, torch.autograd.grad(loss, list(trained.values())), hyper)
        self._teach()
        self.queue = self.queue.push_labelled(current) if current else self.queue
        return loss.item(), terms

    @torch.no_grad()
    def _labelled_references(self, view: Tensor, labels: Tensor) -> References:
        features = run_part(
            self.model, self.model.below(self.settings.cut_of(self.model)), self.teacher, view, train=False
        )
        return References(project(self.teacher_head, features), labels, torch.ones_like(labels, dtype=torch.bool))

    def session_pass(
        self, features_by_device: Mapping[str, tuple[Tensor, Tensor]], by_student: Collection[str] = frozenset()
    ) -> SessionPass:
        """Pass all devices' features forward and back, without a step; equations (1), (5) and (6).

        The loss is the mean over devices of their batch means; with equal batches, the mean over all examples.

        Args:
            features_by_device: By device, features of the student and of the labeller, each of shape (B, ...).
            by_student: Devices whose examples the student labels instead of the teacher.
        """
        above = self.model.above(self.settings.cut_of(self.model))
        sizes = [len(student) for student, _ in features_by_device.values()]
        features = torch.cat([student for student, _ in features_by_device.values()]).requires_grad_()
        labeller_features = torch.cat([labeller for _, labeller in features_by_device.values()])
        outputs = self._answers(labeller_features, [device in by_student for device in features_by_device], sizes)
        pseudo = PseudoLabels.of(outputs, self.settings.threshold)
        buffers = {name: leaf.clone() for name, leaf in self.buffers.items()}
        losses = consistency(run_part(self.model, above, {**self.weights, **buffers}, features, train=True), pseudo)
        current, terms = None, {CONSISTENCY: _mean_of_devices(losses, sizes).item()}
        if self.settings.clustering:
            with torch.no_grad():
                current = References(project(self.teacher_head, labeller_features), pseudo.labels, pseudo.confident)
            references = self.queue.with_current(current)
            anchors = project(self.head, features)
            compared = contrast(anchors, pseudo.labels, references, self.settings.temperature)
            losses, terms[CLUSTERING] = losses + compared, _mean_of_devices(compared, sizes).item()
        loss = _mean_of_devices(losses, sizes)
        trained = self._trained_weights(above, with_head=self.settings.clustering)
        upstream, *gradients = torch.autograd.grad(loss, [features, *trained.values()], materialize_grads=True)
        down = dict(zip(features_by_device, (upstream * len(sizes)).split(sizes), strict=True))
        answers = dict(zip(features_by_device, outputs.softmax(1).split(sizes), strict=True))
        return SessionPass(
            loss.item(), terms, down, dict(zip(trained, gradients, strict=True)), buffers, current, answers
        )

    @torch.no_grad()
    def _answers(self, features: Tensor, by_student: Sequence[bool], sizes: Sequence[int]) -> Tensor:
        """Return the labeller's outputs for weak views, of shape (B, classes)."""
        above = self.model.above(self.settings.cut_of(self.model))
        outputs = run_part(self.model, above, self.teacher, features, train=False)
        if not any(by_student):
            return outputs
        student_outputs = run_part(self.model, above, {**self.weights, **self.buffers}, features, train=False)
        chosen = torch.tensor(by_student).repeat_interleave(torch.tensor(sizes)).to(student_outputs.device)
        return torch.where(chosen[:, None], student_outputs, outputs)

    def take(self, result: SessionPass, hyper: Hyper) -> None:
        """Step the server part and the head along a pass; equation (7)."""
        above = self.model.above(self.settings.cut_of(self.model))
        trained = self._trained_weights(above, with_head=self.settings.clustering)
        self._step(trained, tuple(result.gradients.values()), hyper)
        self.buffers = result.buffers
        self.queue = self.queue.push_unlabelled(result.current) if result.current else self.queue

    def _trained_weights(self, part: nn.Module, *, with_head: bool) -> Tree:
        names = part.state_dict()
        weights = {name: leaf for name, leaf in self.weights.items() if name in names}
        return weights | add_prefix(self.head, HEAD) if with_head else weights

    def _step(self, trained: Tree, gradients: tuple[Tensor, ...], hyper: Hyper) -> None:
        for leaf, gradient in zip(trained.values(), gradients, strict=True):
            leaf.grad = gradient
        descend(trained.items(), self.momenta, hyper, nesterov=self.settings.nesterov)

    def _teach(self) -> None:
        share = ema_decay(self.followed, self.settings.inertia)
        self.teacher = update_teacher(self.teacher, {**self.weights, **self.buffers}, share)
        self.teacher_head = update_teacher(self.teacher_head, self.head, share)
        self.followed += 1


@dataclass(frozen=True)
class SessionPass:
    """Result of passing devices' features.

    Attributes:
        loss: f_u, the mean over devices.
        down: By device, the gradient of its mean loss, of its features' shape; equation (8).
        gradients: Mean over devices, of the server part and the head.
        current: The teacher's projections; None without a clustering term.
        answers: By device, the labeller's class probabilities, of shape (B, classes).
    """

    loss: float
    terms: Terms
    down: Tree
    gradients: Tree
    buffers: Tree
    current: References | None
    answers: Tree
