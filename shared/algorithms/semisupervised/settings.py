"""What both halves of SemiSFL agree on: its settings, its step size, and the names of what the server keeps.

Y. Xu et al. SemiSFL: Split Federated Learning on Unlabeled and Non-IID Data; their code is
https://github.com/littlefishe/Capsule, whose values the defaults are where the paper gives none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

import msgspec
from torch import Tensor

from shared.algorithms.semisupervised.supervised_steps import StepRule
from shared.data.views.pair import Strength
from shared.models.base import Model
from shared.protocol.messages import Hyper
from shared.tensors.tree import Tree

TEACHER, HEAD, TEACHER_HEAD, MOMENTUM = "teacher/", "head/", "teacher-head/", "momentum/"
"""What leaves of the server's state begin with that are not the student's; so do the teacher's on their way down."""


@dataclass(frozen=True)
class SemisflSettings:
    """The method's settings, by their names in a plan; symbols are the paper's.

    Attributes:
        cut: Where the network is cut, as the model counts its cuts; 0 for its first.
        steps: K_u, steps of a round's session.
        supervised_steps: K_s, the server's own steps before it, at first.
        warmup_steps: More of them before the first session, so that its pseudo-labels are of some use.
        server_batch: Examples of such a step; 0 for as many as a device takes.
        threshold: tau, above which a pseudo-label counts.
        temperature: kappa.
        inertia: gamma of the teacher.
        head: What projects features: nothing (`none`), one layer (`linear`), or two (`mlp`).
        hidden: Features between these two.
        projections: Numbers of a projection; with head `none` as many as there are features.
        labelled_queue: Projections of the server's earlier batches that are compared with.
        unlabelled_queue: Likewise, of the devices'.
        mirrors: Whether a view of a picture may be mirrored.
        server_views: Both views of a supervised step; a device's are weak and strong.
        teacher_update: Whether only the `server` moves the teacher, or each `device` its own in a session too; (8).
        schedule: Of the step size, over the rounds of the run.
        least_rate: Where the cosine ends.
        nesterov: Whether momentum is Nesterov's.
        contrastive: Whether the supervised loss has the contrastive term T.
        clustering: Whether the unlabelled loss has the clustering regularization C. Without both there is no head.
        switch: Whether the student labels the examples of devices whose mean prediction crowds on a few classes.
        switch_divergence: From which KL divergence of that mean from uniform on it does, in nats.
        adapt: Whether K_s falls, as (9) and (10) say.
        rule: How.
    """

    cut: int = 0
    steps: int = 50
    supervised_steps: int = 100
    warmup_steps: int = 0
    server_batch: int = 0
    threshold: float = 0.95
    temperature: float = 0.2
    inertia: float = 0.99
    head: Literal["none", "linear", "mlp"] = "mlp"
    hidden: int = 512
    projections: int = 128
    labelled_queue: int = 1024
    unlabelled_queue: int = 1024
    mirrors: bool = True
    server_views: Strength = "strong"
    teacher_update: Literal["server", "device"] = "server"
    schedule: Literal["cosine", "constant"] = "cosine"
    least_rate: float = 0.005
    nesterov: bool = True
    contrastive: bool = True
    clustering: bool = True
    switch: bool = False
    switch_divergence: float = 0.5
    adapt: bool = True
    rule: StepRule = field(default_factory=StepRule)

    def __post_init__(self) -> None:
        """Refuse what is no such method.

        Raises:
            ValueError: A setting is out of range, or unknown.
        """
        counts = (self.steps, self.supervised_steps, self.hidden, self.projections)
        others = (self.cut, self.warmup_steps, self.server_batch, self.labelled_queue, self.unlabelled_queue)
        if min(counts) < 1 or min(others) < 0:
            raise ValueError("steps, supervised_steps, hidden and projections must be >= 1, all other counts >= 0")
        if not 0 < self.threshold < 1 or not 0 <= self.inertia < 1:
            raise ValueError("threshold must be in (0, 1), inertia in [0, 1)")
        if not 0 < self.temperature < math.inf or not 0 <= self.least_rate < math.inf:
            raise ValueError("temperature must be above 0, least_rate >= 0, both finite")
        if not 0 <= self.switch_divergence < math.inf:
            raise ValueError("switch_divergence must be >= 0 and finite")
        require_known_words(self)

    @property
    def projects(self) -> bool:
        """Whether any term of the losses compares projections, so that there are a head and a queue."""
        return self.contrastive or self.clustering

    def cut_of(self, model: Model) -> int:
        """Return the cut, as `Model.below` takes it."""
        return self.cut or next(iter(model.cuts), 0)

    def server_batch_of(self, hyper: Hyper, labelled: int) -> int:
        """Return how many examples a supervised step takes, of so many that there are."""
        return min(self.server_batch or hyper.batch_size, labelled)

    def hyper_of(self, hyper: Hyper, number: int, rounds: int) -> Hyper:
        """Return the hyperparameters of a round: the step size follows the schedule, whole in the first.

        Args:
            hyper: The plan's.
            number: The round, from 1.
            rounds: Of the whole run.
        """
        least = math.inf if self.schedule == "constant" else self.least_rate
        return falling_rate(hyper, number, rounds, least)


def require_known_words(settings: object) -> None:
    """Refuse settings of which a word is none of those that its annotation lists.

    Raises:
        ValueError: There is one.
    """
    for name, hint in get_type_hints(type(settings)).items():
        known = get_args(hint)
        if known and getattr(settings, name) not in known:
            raise ValueError(f"{name} is {getattr(settings, name)!r}, it must be one of {', '.join(known)}")


def falling_rate(hyper: Hyper, number: int, rounds: int, least: float) -> Hyper:
    """Return hyperparameters whose step size falls as half a cosine, over the rounds of a run.

    Args:
        hyper: The plan's, whose step size is that of the first round.
        number: The round, from 1.
        rounds: Of the whole run.
        least: Where it ends; from what is no less than the plan's on, it does not fall.
    """
    most, least = hyper.learning_rate, min(least, hyper.learning_rate)
    swing = (1 + math.cos(math.pi * (number - 1) / max(rounds, number))) / 2
    return msgspec.structs.replace(hyper, learning_rate=least + (most - least) * swing)


def select(tree: Mapping[str, Tensor], prefix: str) -> Tree:
    """Return the leaves whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): leaf for name, leaf in tree.items() if name.startswith(prefix)}


def prefixed(tree: Mapping[str, Tensor], prefix: str) -> Tree:
    """Return leaves under names that begin with a prefix."""
    return {prefix + name: leaf for name, leaf in tree.items()}
