"""Local training alone: personal models without any exchange, as a reference.

The reference of personalised methods, as in Niu, Dong, Qin, AAAI 2025, https://arxiv.org/abs/2403.11464

    w_k <- w_k - eta * dF_k(w_k) / dw_k         from w^0, common to all devices

No tensor travels in either direction; the server's model never changes.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm, Batches, Outcome, Personal, Result
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.fedavg import ALL_STEP_OPTIONS, require_finite, train_copies
from shared.algorithms.personal_model import describe_origin, personal_model
from shared.algorithms.subnetwork.server_half import assign
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree, check_like


@stops_early
def local_only(*, stopping: Stopping) -> Algorithm:
    """Build the algorithm."""

    def local(model: Model, state: State, down: Tree, batches: Batches, assignment: Assignment) -> Outcome:
        """Device half: SGD on the whole model, which stays on the device."""
        personal, loss = train_copies(model, personal_model(model, state, down, assignment), batches, assignment.hyper)
        require_finite(personal)
        facts, metrics = stopping.judge(state.facts, loss, model, personal, batches.validation)
        count = batches.num_examples
        return State(personal, facts), Result({}, float(count), count, loss, metrics=metrics)

    return Algorithm(
        init=_begin,
        assign=assign,
        broadcast=lambda _state, _device, _assignment: {},
        local=local,
        absorb=lambda mean, _device, _assignment, _result: mean,
        aggregate=lambda state, _mean: state,
        personal=Personal(personal_model),
        check_update=_check_update,
        step_options=ALL_STEP_OPTIONS,
    )


def _begin(model: Model, seed: int) -> State:
    return State({key: leaf.clone() for key, leaf in model.tree().items()}, describe_origin(model, seed))


def _check_update(_assignment: Assignment, _down: Tree, up: Tree) -> None:
    check_like(up, {})
