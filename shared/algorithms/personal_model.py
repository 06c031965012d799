"""A device's own full model: what it has kept of it, or what every device begins with.

Niu, Dong, Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic Parameter
Update. AAAI 2025. https://arxiv.org/abs/2403.11464

It never travels, nor does the first one, w^0: that follows from the model's builder and the run's seed.
"""

from __future__ import annotations

from shared.algorithms.subnetwork.server_half import MODEL_SEED
from shared.errors import TaskFailed, WireError
from shared.models.base import Model
from shared.models.build import initial
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree, check_like


def personal(model: Model, state: State, _came: Tree, assignment: Assignment) -> Tree:
    """Return the parameters that a device has kept, those of the run's beginning where it has none yet.

    Raises:
        TaskFailed: What it kept is of another model, or nobody knows how this model began.
    """
    own = state.tree or _first(model, assignment)
    if {key: leaf.shape for key, leaf in own.items()} != {key: leaf.shape for key, leaf in model.tree().items()}:
        raise TaskFailed("the personal model that this device has kept is another one; remove its state")
    return own


def require_finite(own: Tree) -> None:
    """Refuse to keep what has diverged: nothing that comes later would take the place of all of it.

    Raises:
        TaskFailed: A number is NaN or infinite; what the device had kept before stays.
    """
    try:
        check_like(own, own)
    except WireError as error:
        raise TaskFailed(f"training has diverged: {error}; nothing of it is kept, lower the learning rate") from error


def _first(model: Model, assignment: Assignment) -> Tree:
    seed = assignment.values.get(MODEL_SEED)
    if model.spec is None or not isinstance(seed, int):
        raise TaskFailed("the task does not say from what model and seed personal models begin")
    return initial(model.spec, seed).tree()
