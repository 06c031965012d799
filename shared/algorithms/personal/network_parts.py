"""Global and personal parts of a network: settings, and the parameters of each part.

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
"""Layers of the global part. Normalisation layers are personal in partial splits, since they depend on a device's
data."""
MATRIX = 2
"""Minimum dimensions of weights, which can be pruned; biases cannot."""
OWN = "personal/"


@dataclass(frozen=True)
class PersonalizationSettings:
    """Settings of the method.

    Attributes:
        split: Layers of the global part u; all others are the personal part v.
        updating: `alternating`: first v, then u; `simultaneous`: both at every step.
        personal_steps: Steps on v, one per batch.
        global_steps: Steps on the shared part u, one per batch.
        warmup_steps: Steps on u for the ranking of its weights; their result is discarded. 0 disables pruning, unless
            importance needs no warm-up.
        importance: `difference` ranks by the change of a weight in warm-up, `taylor` by that times the weight,
            `magnitude` by the weight.
        prune: Share of the global weights that a device leaves out, where the optimizer allocates none.
        weighting: Weight of the holders of a coordinate: equal, or by examples.
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
        """Raise ValueError for a setting that is out of range or unknown."""
        if self.personal_steps < 0 or self.global_steps < 1 or self.warmup_steps < 0:
            raise ValueError("personal_steps and warmup_steps must be >= 0, global_steps >= 1")
        if not 0 <= self.prune <= 1:
            raise ValueError("prune must be in [0, 1]")
        if self.prune and not self.prunes:
            raise ValueError(
                f"prune is {self.prune}, but importance {self.importance} needs warmup_steps: set either prune to 0 "
                "or warmup_steps to 1"
            )
        for name, hint in get_type_hints(type(self)).items():
            if (choices := get_args(hint)) and getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(choices)}")

    @property
    def prunes(self) -> bool:
        """True if weights can be ranked."""
        return self.warmup_steps > 0 or self.importance == "magnitude"

    @property
    def steps(self) -> int:
        """Steps of a round, without warm-up."""
        simultaneous = self.updating == "simultaneous"
        return max(self.personal_steps, self.global_steps) if simultaneous else self.personal_steps + self.global_steps


def shared_part(split: str, model: Model) -> Tree:
    """Return the leaves of the global part, in the network's order; the tensors are the network's.

    Raises:
        ConfigError: It has no weights to prune.
    """
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in model.layers.named_modules()
        if isinstance(layer, SHARED[split])
        for name in (*layer._parameters, *layer._buffers)  # noqa: SLF001 - without those of nested layers
    }
    shared = {key: leaf for key, leaf in model.tree().items() if key in names}
    if not select_weights(shared):
        raise ConfigError(f"the model has no weights that split = {split!r} would share; choose another split")
    return shared


def select_weights(shared: Tree) -> Tree:
    """Return the prunable leaves of a global part."""
    return {key: leaf for key, leaf in shared.items() if leaf.ndim >= MATRIX}


def personal_part(split: str, model: Model, state: State, assignment: Assignment) -> Tree:
    """Return the leaves of a device's personal part: as stored, or the initial ones.

    Initial leaves follow from the model and the run's seed, so no personal part ever travels.

    Args:
        split: Layers of the global part, as in the settings.
        assignment: Names the model's seed.

    Raises:
        TaskFailed: The stored part is of another model, or the origin of the initial model is unknown.
    """
    shared = shared_part(split, model)
    expected = {key: leaf for key, leaf in model.tree().items() if key not in shared}
    personal = {key.removeprefix(OWN): leaf for key, leaf in state.tree.items() if key.startswith(OWN)}
    if not personal and expected:
        initial = initial_parameters(model, assignment)
        personal = {key: initial[key] for key in expected}
    if {key: leaf.shape for key, leaf in personal.items()} != {key: leaf.shape for key, leaf in expected.items()}:
        raise TaskFailed("the personal part stored on this device is of another model; remove its state")
    return personal
