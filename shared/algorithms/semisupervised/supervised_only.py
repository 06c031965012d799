"""Supervised baseline: SemiSFL's supervised steps on the server, while devices do nothing.

The baseline of Y. Xu et al. SemiSFL, https://arxiv.org/abs/2307.15870: step 1 of its rounds, with the same views, loss
and teacher, so that any difference is due to the devices' unlabelled examples. Devices send an empty update.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import msgspec

from shared.algorithms.base import Algorithm, Allocation, Batches, Cohort, Outcome, Result, ServerTraining, assign_alike
from shared.algorithms.semisupervised.round_terms import average_terms
from shared.algorithms.semisupervised.semisfl import init, teacher_of
from shared.algorithms.semisupervised.semisfl_server import check_labelled, train
from shared.algorithms.semisupervised.settings import SemisflSettings
from shared.data.views.pair import Strength
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree


def assign(state: State, cohort: Cohort, allocation: Allocation, number: int) -> dict[str, Assignment]:
    """Assign every device a task without training."""
    hyper = msgspec.structs.replace(cohort.hyper, local_epochs=0)
    tasks = assign_alike(state, cohort, allocation, number)
    return {device: msgspec.structs.replace(task, hyper=hyper) for device, task in tasks.items()}


def local(_model: Model, state: State, _start: Tree, batches: Batches, _assignment: Assignment) -> Outcome:
    """Device half: see `Algorithm.local`. Trains nothing."""
    return state, Result({}, 1.0, batches.num_examples)


def check_update(_assignment: Assignment, _down: Tree, up: Tree) -> None:
    """Reject any tensor."""
    if up:
        raise WireError(f"{len(up)} tensors in an update that must be empty", reason="unknown-tensor")


def supervised_only(  # noqa: PLR0913 - options of a plan, all by name
    *,
    cut: int = 0,
    supervised_steps: int = 100,
    warmup_steps: int = 0,
    server_batch: int = 0,
    temperature: float = 0.2,
    inertia: float = 0.99,
    head: Literal["none", "linear", "mlp"] = "mlp",
    hidden: int = 512,
    projections: int = 128,
    labelled_queue: int = 1024,
    mirrors: bool = True,
    server_views: Strength = "strong",
    schedule: Literal["cosine", "constant"] = "cosine",
    least_rate: float = 0.005,
    nesterov: bool = True,
    contrastive: bool = True,
) -> Algorithm:
    """Build the algorithm; options as in `SemisflSettings`.

    Raises:
        ValueError: An option is out of range.
    """
    settings = SemisflSettings(**locals(), unlabelled_queue=0, clustering=False, adapt=False)
    return Algorithm(
        kinds=frozenset({"classification"}),
        init=partial(init, settings),
        assign=assign,
        broadcast=lambda _state, _device, _assignment: {},
        local=local,
        absorb=lambda mean, _device, _assignment, _result: mean,
        aggregate=lambda state, _mean: state,
        check_update=check_update,
        evaluated=teacher_of,
        server=ServerTraining(partial(train, settings), partial(check_labelled, settings), average_terms),
        reads_labels=False,
    )
