"""Global and personal part of a network: the method's settings, and which leaves belong to which part.

Liu, Ratnarajah, Sellathurai, Eldar. Adaptive Model Pruning and Personalization for Federated Learning over Wireless
Networks, https://arxiv.org/abs/2309.01816. Its section V shares the linear layers; its table of latencies fits shared
convolutions. The two ways of updating are those of Pillutla et al., Federated Learning with Partial Model
Personalization, ICML 2022, https://proceedings.mlr.press/v162/pillutla22a.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args, get_type_hints

from torch import nn

from shared.algorithms.personal_model import initial_parameters
from shared.errors import ConfigError, TaskFailed
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree

Split: TypeAlias = Literal["fc_global", "conv_global", "all_global"]
Updating: TypeAlias = Literal["alternating", "simultaneous"]
Importance: TypeAlias = Literal["difference", "taylor", "magnitude"]
SHARED: Mapping[str, tuple[type[nn.Module], ...]] = {
    "fc_global": (nn.Linear,),
    "conv_global": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "all_global": (nn.Module,),
}
"""Whose parameters are shared. Of those in part, what normalises is not: it belongs to a device's own data."""
MATRIX = 2
"""Leaves of so many dimensions and more are weights, which can be pruned; biases are not."""
OWN = "personal/"


@dataclass(frozen=True)
class PersonalizationSettings:
    """What the method is set to.

    Attributes:
        split: Which layers are the global part u; all others are the personal part v.
        updating: v first and then u, or both at every step.
        personal_steps: Steps on v, one a batch.
        global_steps: Steps on the shared part u, one a batch.
        warmup_steps: Steps on u by which its weights are ranked; their result is thrown away. 0 prunes nothing, unless
            importance needs none.
        importance: `difference` ranks by how far warm-up moved a weight, `taylor` by that times the weight,
            `magnitude` by the weight.
        prune: Share of the global weights that a device leaves out, where the server does not say.
        weighting: Whether every holder of a weight counts alike, or by its examples.
    """

    split: Split = "fc_global"
    updating: Updating = "alternating"
    personal_steps: int = 5
    global_steps: int = 5
    warmup_steps: int = 1
    importance: Importance = "difference"
    prune: float = 0.5
    weighting: Literal["uniform", "examples"] = "uniform"

    def __post_init__(self) -> None:
        """Refuse what no round can use.

        Raises:
            ValueError: It is such a setting.
        """
        if self.personal_steps < 0 or self.global_steps < 1 or self.warmup_steps < 0:
            raise ValueError("personal_steps and warmup_steps must be >= 0, global_steps >= 1")
        if not 0 <= self.prune <= 1:
            raise ValueError("prune must be in [0, 1]")
        if self.prune and not self.prunes:
            raise ValueError("nothing can be pruned by a ranking without warmup_steps: set prune to 0 or these to 1")
        for name, hint in get_type_hints(type(self)).items():
            if (known := get_args(hint)) and getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(known)}")

    @property
    def prunes(self) -> bool:
        """Whether weights can be ranked at all."""
        return self.warmup_steps > 0 or self.importance == "magnitude"

    @property
    def steps(self) -> int:
        """Steps on batches in a round, warm-up's left out."""
        together = self.updating == "simultaneous"
        return max(self.personal_steps, self.global_steps) if together else self.personal_steps + self.global_steps


def shared_part(split: str, model: Model) -> Tree:
    """Return the leaves of the global part, in the network's order; the tensors are its own.

    Raises:
        ConfigError: There is nothing in it that could be pruned.
    """
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in model.layers.named_modules()
        if isinstance(layer, SHARED[split])
        for name in (*layer._parameters, *layer._buffers)  # noqa: SLF001 - its own, not those of layers inside it
    }
    found = {key: leaf for key, leaf in model.tree().items() if key in names}
    if not weights_of(found):
        raise ConfigError(f"the model has no weights that split = {split!r} would share; choose another split")
    return found


def weights_of(shared: Tree) -> Tree:
    """Return those leaves of a global part that can be pruned."""
    return {key: leaf for key, leaf in shared.items() if leaf.ndim >= MATRIX}


def personal_part(split: str, model: Model, state: State, assignment: Assignment) -> Tree:
    """Return the leaves of a device's personal part: as it left them, or as all devices begin.

    These follow from the model and the run's seed, so that no device's part ever travels, nor does the first one.

    Args:
        split: How many layers are shared, as in the settings.
        state: What the device remembers.
        assignment: Of the round; it names the model's seed.

    Raises:
        TaskFailed: What the device left is of another model, or nobody knows how this model began.
    """
    shared = shared_part(split, model)
    wanted = {key: leaf for key, leaf in model.tree().items() if key not in shared}
    own = {key.removeprefix(OWN): leaf for key, leaf in state.tree.items() if key.startswith(OWN)}
    if not own and wanted:
        begun = initial_parameters(model, assignment)
        own = {key: begun[key] for key in wanted}
    if {key: leaf.shape for key, leaf in own.items()} != {key: leaf.shape for key, leaf in wanted.items()}:
        raise TaskFailed("the personal part that this device has kept is of another model; remove its state")
    return own
