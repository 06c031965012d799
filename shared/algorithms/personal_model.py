"""Personal model: a device's full model, which never leaves it.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

It is stored after each training. The initial model w^0 does not travel either: a device rebuilds it from the model's
specification, the run's seed and the name of the random generator.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import TaskFailed
from shared.models.base import Model
from shared.models.build import TORCHS, build_initial
from shared.protocol.messages import Assignment, Scalar
from shared.tensors.tree import State, Tree, to_device

MODEL_SEED, MODEL_DRAW = "model_seed", "model_draw"
"""Seed and random generator of the initial model, in the server's facts and a task's values. Without the second,
torch's generator drew it, as in older runs."""


def describe_origin(model: Model, seed: int) -> dict[str, Scalar]:
    """Return the facts from which a device draws the initial parameters of `model`."""
    seeded: dict[str, Scalar] = {MODEL_SEED: seed}
    return seeded if model.draw == TORCHS else {**seeded, MODEL_DRAW: model.draw}


def select_origin(facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the entries of `describe_origin` in the server's facts."""
    return {key: facts[key] for key in (MODEL_SEED, MODEL_DRAW) if key in facts}


def personal_model(model: Model, state: State, _down: Tree, assignment: Assignment) -> Tree:
    """Return a device's stored parameters, or the initial ones where it has none yet.

    Args:
        assignment: Names the model's seed and generator.

    Raises:
        TaskFailed: The stored model is another one, or the origin of the initial model is unknown.
    """
    parameters = state.tree or initial_parameters(model, assignment)
    if {key: leaf.shape for key, leaf in parameters.items()} != {key: leaf.shape for key, leaf in model.tree().items()}:
        raise TaskFailed("the personal model stored on this device belongs to another network; remove its state")
    return parameters


def initial_parameters(model: Model, assignment: Assignment) -> Tree:
    """Return the initial parameters, common to all devices, on the model's device.

    Raises:
        ConfigError: The random generator is unknown.
        TaskFailed: The task does not name the model's origin, or the model has no specification.
    """
    seed, draw = assignment.values.get(MODEL_SEED), assignment.values.get(MODEL_DRAW, TORCHS)
    if model.spec is None or not isinstance(seed, int) or not isinstance(draw, str):
        raise TaskFailed("the task does not name the model and seed of the initial personal model")
    return to_device(build_initial(model.spec, seed, draw).tree(), model.device)
