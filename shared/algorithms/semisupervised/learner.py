"""Student, teacher, heads and queue of SemiSFL as the server moves them; equations (1) to (7).

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. The server part gets the gradient of the consistency
alone, the head that of the clustering regularization alone, features that of both; the teacher gets none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
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
    prefixed,
    select,
)
from shared.algorithms.semisupervised.teacher import follow, inertia
from shared.models.base import Model
from shared.models.evaluate import in_mode
from shared.protocol.messages import Hyper
from shared.tensors.sgd import descend
from shared.tensors.tree import Tree

Terms: TypeAlias = dict[str, float]
"""Terms of a loss, by name."""


def _mean_of_devices(losses: Tensor, sizes: list[int]) -> Tensor:
    """Return the mean over devices of the mean of each, whose examples lie behind each other."""
    return torch.stack([own.mean() for own in losses.split(sizes)]).mean()


def run_part(model: Model, part: nn.Sequential, leaves: Mapping[str, Tensor], inputs: Tensor, *, train: bool) -> Tensor:
    """Pass a batch through some layers; buffers among the leaves are changed in place where it trains.

    Args:
        model: The whole network, whose mode its parts share.
        part: Its layers below a cut, or above it.
        inputs: Of shape (B, ...).
        train: Whether BatchNorm goes by the batch, and features are dropped.
    """
    own = {name: leaves[name] for name in part.state_dict()}
    with in_mode(model.layers, train=train):
        outputs: Tensor = functional_call(part, own, (inputs,))
    return outputs


def project(head: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Return the projections of features by a head's linear layers, each of length 1; of shape (B, P)."""
    rows = features.flatten(1)
    places = sorted({int(name.partition(".")[0]) for name in head})
    for place in places:
        rows = functional.linear(rows, head[f"{place}.weight"], head[f"{place}.bias"])
        rows = rows if place == places[-1] else rows.relu()
    return unit_rows(rows)


@dataclass
class Learner:
    """All that a round moves; leaves are those of the server's state, without their prefixes.

    Attributes:
        model: The whole network, without storage.
        weights: The student's, which have a gradient.
        buffers: The student's running statistics.
        head: The student's projection head.
        momenta: Of weights and head, by their names in the state.
        followed: Steps that the teacher has followed so far, over the whole run.
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
        """Return what lies in a server's state; it shares its storage.

        Args:
            model: The whole network, without storage.
            followed: Steps that the teacher has followed.
        """
        trainable = {name for name, leaf in model.layers.named_parameters() if leaf.requires_grad}
        names = model.layers.state_dict().keys()
        return cls(
            settings,
            model,
            {name: tree[name].detach().requires_grad_() for name in names if name in trainable},
            {name: tree[name] for name in names if name not in trainable},
            {name: leaf.detach().requires_grad_() for name, leaf in select(tree, HEAD).items()},
            select(tree, TEACHER),
            select(tree, TEACHER_HEAD),
            select(tree, MOMENTUM),
            Queue.from_tree(tree),
            followed,
        )

    def tree(self) -> Tree:
        """Return all of it as the tree of a server's state."""
        return {
            **{name: leaf.detach() for name, leaf in self.weights.items()},
            **self.buffers,
            **prefixed({name: leaf.detach() for name, leaf in self.head.items()}, HEAD),
            **prefixed(self.teacher, TEACHER),
            **prefixed(self.teacher_head, TEACHER_HEAD),
            **prefixed(self.momenta, MOMENTUM),
            **self.queue.tree(),
        }

    def supervised_step(self, view: Tensor, other: Tensor | None, labels: Tensor, hyper: Hyper) -> tuple[float, Terms]:
        """Move student and teacher by a labelled batch; return l_s of equation (4), and its terms.

        Args:
            view: What the student is given, of shape (B, ...).
            other: Another view of the same examples, for the teacher; None where nothing is projected.
        """
        cut = self.settings.cut_of(self.model)
        below, above = self.model.below(cut), self.model.above(cut)
        leaves = {**self.weights, **self.buffers}
        features = run_part(self.model, below, leaves, view, train=True)
        loss = functional.cross_entropy(run_part(self.model, above, leaves, features, train=True), labels)
        terms = {SUPERVISED: loss.item()}
        current = None if other is None else self._seen_labelled(other, labels)
        if current and self.settings.contrastive:
            references = self.queue.among(current)
            compared = contrast(project(self.head, features), labels, references, self.settings.temperature).mean()
            loss, terms[CONTRASTIVE] = loss + compared, compared.item()
        moved = self._moved(self.model.layers, with_head=self.settings.contrastive)
        self._step(moved, torch.autograd.grad(loss, list(moved.values())), hyper)
        self._teach()
        self.queue = self.queue.push_labelled(current) if current else self.queue
        return loss.item(), terms

    @torch.no_grad()
    def _seen_labelled(self, view: Tensor, labels: Tensor) -> References:
        """Return the teacher's projections of labelled examples."""
        seen = run_part(self.model, self.model.below(self.settings.cut_of(self.model)), self.teacher, view, train=False)
        return References(project(self.teacher_head, seen), labels, torch.ones_like(labels, dtype=torch.bool))

    def session_pass(
        self, sent: Mapping[str, tuple[Tensor, Tensor]], by_student: Collection[str] = frozenset()
    ) -> SessionPass:
        """Pass all devices' features forward and back, moving nothing; equations (1), (5) and (6).

        The mean is over each device's own batch, then over devices; with equal batches it is that over all examples.

        Args:
            sent: By device, the student's features and those of whoever labels, each of shape (B, ...).
            by_student: Devices whose examples the student labels; of all others, the teacher does.
        """
        above = self.model.above(self.settings.cut_of(self.model))
        sizes = [len(student) for student, _ in sent.values()]
        features = torch.cat([student for student, _ in sent.values()]).requires_grad_()
        seen = torch.cat([labeller for _, labeller in sent.values()])
        outputs = self._answers(seen, [device in by_student for device in sent], sizes)
        pseudo = PseudoLabels.of(outputs, self.settings.threshold)
        buffers = {name: leaf.clone() for name, leaf in self.buffers.items()}
        losses = consistency(run_part(self.model, above, {**self.weights, **buffers}, features, train=True), pseudo)
        current, terms = None, {CONSISTENCY: _mean_of_devices(losses, sizes).item()}
        if self.settings.clustering:
            with torch.no_grad():
                current = References(project(self.teacher_head, seen), pseudo.labels, pseudo.confident)
            references = self.queue.among(current)
            anchors = project(self.head, features)
            compared = contrast(anchors, pseudo.labels, references, self.settings.temperature)
            losses, terms[CLUSTERING] = losses + compared, _mean_of_devices(compared, sizes).item()
        loss = _mean_of_devices(losses, sizes)
        moved = self._moved(above, with_head=self.settings.clustering)
        upstream, *gradients = torch.autograd.grad(loss, [features, *moved.values()], materialize_grads=True)
        down = dict(zip(sent, (upstream * len(sizes)).split(sizes), strict=True))
        answers = dict(zip(sent, outputs.softmax(1).split(sizes), strict=True))
        return SessionPass(
            loss.item(), terms, down, dict(zip(moved, gradients, strict=True)), buffers, current, answers
        )

    @torch.no_grad()
    def _answers(self, seen: Tensor, by_student: Sequence[bool], sizes: Sequence[int]) -> Tensor:
        """Return outputs for weak views, of whoever labels a device's examples; of shape (B, classes)."""
        above = self.model.above(self.settings.cut_of(self.model))
        outputs = run_part(self.model, above, self.teacher, seen, train=False)
        if not any(by_student):
            return outputs
        own = run_part(self.model, above, {**self.weights, **self.buffers}, seen, train=False)
        chosen = torch.tensor(by_student).repeat_interleave(torch.tensor(sizes)).to(own.device)
        return torch.where(chosen[:, None], own, outputs)

    def take(self, found: SessionPass, hyper: Hyper) -> None:
        """Move the server part and the head by a pass; equation (7)."""
        above = self.model.above(self.settings.cut_of(self.model))
        moved = self._moved(above, with_head=self.settings.clustering)
        self._step(moved, tuple(found.gradients.values()), hyper)
        self.buffers = found.buffers
        self.queue = self.queue.push_unlabelled(found.current) if found.current else self.queue

    def _moved(self, part: nn.Sequential, *, with_head: bool) -> Tree:
        """Return the weights of some layers, and the head's if a loss has them, by their names in the state."""
        own = part.state_dict()
        moved = {name: leaf for name, leaf in self.weights.items() if name in own}
        return moved | prefixed(self.head, HEAD) if with_head else moved

    def _step(self, moved: Tree, gradients: tuple[Tensor, ...], hyper: Hyper) -> None:
        for leaf, gradient in zip(moved.values(), gradients, strict=True):
            leaf.grad = gradient
        descend(moved.items(), self.momenta, hyper, nesterov=self.settings.nesterov)

    def _teach(self) -> None:
        share = inertia(self.followed, self.settings.inertia)
        self.teacher = follow(self.teacher, {**self.weights, **self.buffers}, share)
        self.teacher_head = follow(self.teacher_head, self.head, share)
        self.followed += 1


@dataclass(frozen=True)
class SessionPass:
    """What came of a pass of devices' features.

    Attributes:
        loss: f_u, the mean over devices.
        terms: What it is the sum of.
        down: By device, the gradient of its own mean loss, of its features' shape; equation (8).
        gradients: Of the server part and the head: the mean over devices.
        buffers: The student's, after it.
        current: The teacher's projections; None where nothing is compared with them.
        answers: By device, the shares of the classes that its labeller predicts, of shape (B, classes).
    """

    loss: float
    terms: Terms
    down: Tree
    gradients: Tree
    buffers: Tree
    current: References | None
    answers: Tree
