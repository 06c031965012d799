"""Settings of semi-supervised methods as plan options; prefixes of state leaves.

Y. Xu et al. SemiSFL: Split Federated Learning on Unlabeled and Non-IID Data, https://arxiv.org/abs/2307.15870; their
code is https://github.com/littlefishe/Capsule, whose values the defaults are where the paper gives none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from torch import Tensor

from shared.algorithms.base import Algorithm
from shared.algorithms.semisupervised.supervised_steps import StepRule
from shared.data.views.pair import Strength
from shared.models.base import Model
from shared.protocol.messages import Hyper
from shared.tensors.tree import Tree

S = TypeVar("S")

TEACHER, HEAD, TEACHER_HEAD, MOMENTUM = "teacher/", "head/", "teacher-head/", "momentum/"
"""Prefixes of leaves of the server's state other than the student's; the teacher's also in downloads."""


@dataclass(frozen=True, kw_only=True)
class LabelledSettings:
    """Settings common to methods with labels at the server alone, by their names in a plan; symbols are the papers'.

    Attributes:
        server_batch: Labelled examples of a supervised step on the server; 0 for a device's batch size.
        threshold: tau, above which a pseudo-label counts.
        mirrors: Whether a view of an image may be mirrored.
        schedule: Schedule of the step size, over the rounds of the run.
        least_rate: Final step size of the cosine schedule.
        nesterov: Whether momentum is Nesterov's; it starts at zero in every round.
    """

    server_batch: int = 0
    threshold: float = 0.95
    mirrors: bool = True
    schedule: Literal["cosine", "constant"] = "cosine"
    least_rate: float = 0.005
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        if self.server_batch < 0 or not 0 < self.threshold < 1:
            raise ValueError("server_batch must be >= 0, threshold in (0, 1)")
        if not 0 <= self.least_rate < math.inf:
            raise ValueError("least_rate must be >= 0 and finite")
        for name, hint in get_type_hints(type(self)).items():
            choices = get_args(hint)
            if choices and getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(choices)}")

    def server_batch_of(self, hyper: Hyper, labelled: int) -> int:
        """Return the examples of a supervised step, at most all labelled ones."""
        return min(self.server_batch or hyper.batch_size, labelled)

    def hyper_of(self, hyper: Hyper, number: int, rounds: int) -> Hyper:
        """Return the hyperparameters of a round, with the step size of the schedule.

        The cosine falls from the plan's rate to `least_rate`; if that is not smaller, the rate is constant.

        Args:
            number: The round, from 1.
            rounds: Number of rounds of the run.
        """
        most = hyper.learning_rate
        least = most if self.schedule == "constant" else min(self.least_rate, most)
        swing = (1 + math.cos(math.pi * (number - 1) / max(rounds, number))) / 2
        return msgspec.structs.replace(hyper, learning_rate=least + (most - least) * swing)


@dataclass(frozen=True, kw_only=True)
class SteppedSettings(LabelledSettings):
    """Settings of methods whose server takes a number of supervised steps before a round.

    Attributes:
        supervised_steps: K_s, supervised steps of the server before a round, initially.
        warmup_steps: Additional steps before the first round, for better pseudo-labels.
        server_views: Both views of a supervised step; a device's are weak and strong.
    """

    supervised_steps: int = 100
    warmup_steps: int = 0
    server_views: Strength = "strong"

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        super().__post_init__()
        if self.supervised_steps < 1 or self.warmup_steps < 0:
            raise ValueError("supervised_steps must be >= 1, warmup_steps >= 0")


def require_divergence(nats: float) -> None:
    """Check the range of `switch_divergence`: see `switch.use_teacher`.

    Raises:
        ValueError: It is negative, or not finite, which no journal could store.
    """
    if not 0 <= nats < math.inf:
        raise ValueError(f"switch_divergence must be >= 0, in nats, and finite, such as 100 for never; not {nats}")


@dataclass(frozen=True, kw_only=True)
class SemisflSettings(SteppedSettings):
    """SemiSFL's settings, by their names in a plan; symbols are the paper's.

    Attributes:
        cut: Where the network is cut, as the model counts its cuts; 0 for its first.
        steps: K_u, steps of a round's session.
        temperature: kappa of the contrastive loss, above zero.
        inertia: gamma of the teacher.
        head: Projection of features: `none`, one layer (`linear`), or two layers (`mlp`).
        hidden: Features between the two layers of `mlp`.
        projections: Numbers of a projection; with head `none` as many as there are features.
        labelled_queue: Stored projections of the server's earlier batches, as references.
        unlabelled_queue: Stored projections of the devices' earlier batches, as references.
        teacher_update: Whether only the `server` moves the teacher, or each `device` its copy in a session too; (8).
        contrastive: Whether the supervised loss has the contrastive term T.
        clustering: Whether the unlabelled loss has the clustering regularization C. Without both there is no head.
        switch: Whether the student labels the examples of devices whose mean prediction is concentrated on few classes.
        switch_divergence: KL divergence of that mean from uniform from which the student labels, in nats: 0 for always,
            more than log M of M classes, such as 100, for never.
        adapt: Whether K_s falls, by (9) and (10).
    """

    cut: int = 0
    steps: int = 50
    temperature: float = 0.2
    inertia: float = 0.99
    head: Literal["none", "linear", "mlp"] = "mlp"
    hidden: int = 512
    projections: int = 128
    labelled_queue: int = 1024
    unlabelled_queue: int = 1024
    teacher_update: Literal["server", "device"] = "server"
    contrastive: bool = True
    clustering: bool = True
    switch: bool = False
    switch_divergence: float = 0.5
    adapt: bool = True
    rule: StepRule = field(default_factory=StepRule)

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range or unknown."""
        super().__post_init__()
        counts, others = (self.steps, self.hidden, self.projections), (self.labelled_queue, self.unlabelled_queue)
        if min(counts) < 1 or min(self.cut, *others) < 0:
            raise ValueError("steps, hidden and projections must be >= 1, cut and queues >= 0")
        if not 0 <= self.inertia < 1 or not 0 < self.temperature < math.inf:
            raise ValueError("inertia must be in [0, 1), temperature above 0 and finite")
        require_divergence(self.switch_divergence)

    @property
    def projects(self) -> bool:
        """True if a term of the losses compares projections, so that there are a head and a queue."""
        return self.contrastive or self.clustering

    def cut_of(self, model: Model) -> int:
        """Return the cut, as `Model.below` takes it."""
        return self.cut or next(iter(model.cut_places), 0)


def takes_options(settings: type[S]) -> Callable[[Callable[[S], Algorithm]], Callable[..., Algorithm]]:
    """Return a decorator that replaces a builder's settings parameter by the fields of the settings as options.

    A plan's options, their defaults and their reference are read from the resulting signature.

    Args:
        settings: A frozen dataclass with the options of the plan as fields.
    """

    def taking(builder: Callable[[S], Algorithm]) -> Callable[..., Algorithm]:
        @wraps(builder)
        def built(**options: Any) -> Algorithm:
            return builder(settings(**options))

        built.__signature__ = inspect.signature(settings)  # type: ignore[attr-defined]  # what `signature` reads
        built.__annotations__ = get_type_hints(settings)
        return built

    return taking


def take_prefix(tree: Mapping[str, Tensor], prefix: str) -> Tree:
    """Return the leaves whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): leaf for name, leaf in tree.items() if name.startswith(prefix)}


def add_prefix(tree: Mapping[str, Tensor], prefix: str) -> Tree:
    """Return leaves with a prefix before their names."""
    return {prefix + name: leaf for name, leaf in tree.items()}
