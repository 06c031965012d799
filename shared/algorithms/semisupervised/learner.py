"""Student, teacher, heads and queue of SemiSFL as the server moves them; equations (1) to (7).

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. The server part gets the gradient of the consistency
alone, the head that of the clustering regularization alone, features that of both; the teacher gets none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.semisupervised.losses import PseudoLabels, References, consistency, contrast, unit_rows
from shared.algorithms.semisupervised.queue import Queue
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


def run_part(model: Model, part: nn.Sequential, leaves: Mapping[str, Tensor], inputs: Tensor, *, train: bool) -> Tensor:
    """Pass a batch through some layers; buffers among the leaves are changed in place where it trains.

    Args:
        model: The whole network, whose mode its parts share.
        part: Its layers below a cut, or above it.
        leaves: At least theirs.
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
        settings: The method's.
        model: The whole network, without storage.
        weights: The student's, which have a gradient.
        buffers: The student's running statistics.
        head: The student's projection head.
        teacher: Weights and buffers.
        teacher_head: Its head.
        momenta: Of weights and head, by their names in the state.
        queue: Both levels.
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
            settings: The method's.
            model: The whole network, without storage.
            tree: The state's.
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

    def supervised_step(self, view: Tensor, other: Tensor, labels: Tensor, hyper: Hyper) -> float:
        """Move student and teacher by a labelled batch; return l_s of equation (4).

        Args:
            view: What the student is given, of shape (B, ...).
            other: Another view of the same examples, for the teacher.
            labels: Their classes.
            hyper: Of the step.
        """
        cut = self.settings.cut_of(self.model)
        below, above = self.model.below(cut), self.model.above(cut)
        with torch.no_grad():
            seen = run_part(self.model, below, self.teacher, other, train=False)
            current = References(project(self.teacher_head, seen), labels, torch.ones_like(labels, dtype=torch.bool))
        leaves = {**self.weights, **self.buffers}
        features = run_part(self.model, below, leaves, view, train=True)
        logits = run_part(self.model, above, leaves, features, train=True)
        references = self.queue.among(current)
        pulled = contrast(project(self.head, features), labels, references, self.settings.temperature)
        loss = functional.cross_entropy(logits, labels) + pulled.mean()
        moved = self._moved(self.model.layers)
        self._step(moved, torch.autograd.grad(loss, list(moved.values())), hyper)
        self._teach()
        self.queue = self.queue.push_labelled(current)
        return loss.item()

    def session_pass(self, sent: Mapping[str, tuple[Tensor, Tensor]]) -> SessionPass:
        """Pass all devices' features forward and back, moving nothing; equations (1), (5) and (6).

        The mean is over each device's own batch, then over devices; with equal batches it is that over all examples.

        Args:
            sent: By device, the student's features and the teacher's, each of shape (B, ...).
        """
        above = self.model.above(self.settings.cut_of(self.model))
        sizes = [len(student) for student, _ in sent.values()]
        features = torch.cat([student for student, _ in sent.values()]).requires_grad_()
        seen = torch.cat([teacher for _, teacher in sent.values()])
        with torch.no_grad():
            outputs = run_part(self.model, above, self.teacher, seen, train=False)
            pseudo = PseudoLabels.of(outputs, self.settings.threshold)
            current = References(project(self.teacher_head, seen), pseudo.labels, pseudo.confident)
        buffers = {name: leaf.clone() for name, leaf in self.buffers.items()}
        logits = run_part(self.model, above, {**self.weights, **buffers}, features, train=True)
        anchors = project(self.head, features)
        regularization = contrast(anchors, pseudo.labels, self.queue.among(current), self.settings.temperature)
        each = (consistency(logits, pseudo) + regularization).split(sizes)
        loss = torch.stack([own.mean() for own in each]).mean()
        moved = self._moved(above)
        upstream, *gradients = torch.autograd.grad(loss, [features, *moved.values()], materialize_grads=True)
        down = dict(zip(sent, (upstream * len(sizes)).split(sizes), strict=True))
        return SessionPass(loss.item(), down, dict(zip(moved, gradients, strict=True)), buffers, current)

    def take(self, found: SessionPass, hyper: Hyper) -> None:
        """Move the server part and the head by a pass; equation (7)."""
        above = self.model.above(self.settings.cut_of(self.model))
        self._step(self._moved(above), tuple(found.gradients.values()), hyper)
        self.buffers = found.buffers
        self.queue = self.queue.push_unlabelled(found.current)

    def _moved(self, part: nn.Sequential) -> Tree:
        """Return the weights of some layers and the head's, by their names in the state."""
        own = part.state_dict()
        return {name: leaf for name, leaf in self.weights.items() if name in own} | prefixed(self.head, HEAD)

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
        down: By device, the gradient of its own mean loss, of its features' shape; equation (8).
        gradients: Of the server part and the head: the mean over devices.
        buffers: The student's, after it.
        current: The teacher's projections.
    """

    loss: float
    down: Tree
    gradients: Tree
    buffers: Tree
    current: References
