"""A device's personal full model: stored after each training, at first the common initial model.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

It never travels. Neither does the initial model w^0, which a device rebuilds from the model's specification, the run's
seed and the name of the random generator.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.algorithms.fedavg import REMEDY
from shared.errors import Diverged, TaskFailed, WireError
from shared.models.base import Model
from shared.models.build import TORCHS, initial
from shared.protocol.messages import Assignment, Scalar
from shared.tensors.placement import to_device
from shared.tensors.tree import State, Tree, check_like

MODEL_SEED, MODEL_DRAW = "model_seed", "model_draw"
"""Of the server's facts and of a task's values: how all models began. Without the second torch's generator drew them,
as in runs that are older than it."""


def origin(model: Model, seed: int) -> dict[str, Scalar]:
    """Return the facts by which a device draws what `model` began with."""
    seeded: dict[str, Scalar] = {MODEL_SEED: seed}
    return seeded if model.draw == TORCHS else {**seeded, MODEL_DRAW: model.draw}


def origin_in(facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return what `origin` gave the server's facts."""
    return {key: facts[key] for key in (MODEL_SEED, MODEL_DRAW) if key in facts}


def personal_model(model: Model, state: State, _came: Tree, assignment: Assignment) -> Tree:
    """Return the parameters that a device has kept, those of the run's beginning where it has none yet.

    Args:
        state: What the device kept.
        assignment: Its task; says from what model and seed first weights follow.

    Raises:
        TaskFailed: What it kept is of another model, or nobody knows how this model began.
    """
    own = state.tree or first(model, assignment)
    if {key: leaf.shape for key, leaf in own.items()} != {key: leaf.shape for key, leaf in model.tree().items()}:
        raise TaskFailed("the personal model that this device has kept is another one; remove its state")
    return own


def require_finite(own: Tree) -> None:
    """Refuse to keep what has diverged: nothing that comes later would take the place of all of it.

    Raises:
        Diverged: A number is NaN or infinite; what the device had kept before stays.
    """
    try:
        check_like(own, own)
    except WireError as error:
        raise Diverged(
            f"training has diverged, {error} after the last step, nothing of it is kept: {REMEDY}"
        ) from error


def first(model: Model, assignment: Assignment) -> Tree:
    """Return the parameters that every device began with, where the model is.

    Raises:
        ConfigError: They are drawn in a way that is not known here.
        TaskFailed: The task does not say how the model began, or the model not what it was built from.
    """
    seed, draw = assignment.values.get(MODEL_SEED), assignment.values.get(MODEL_DRAW, TORCHS)
    if model.spec is None or not isinstance(seed, int) or not isinstance(draw, str):
        raise TaskFailed("the task does not say from what model and seed personal models begin")
    return to_device(initial(model.spec, seed, draw).tree(), model.device)
