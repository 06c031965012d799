"""A small network of convolutions and linear layers, devices with pictures, rounds that keep what devices keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.algorithms.base import Algorithm, Cohort, Result
from shared.data.examples import Examples
from shared.models.base import Model
from shared.models.build import initial
from shared.protocol.messages import Assignment, Hyper, Spec, Value
from shared.tensors.tree import Mean, State, Tree
from tests.shared.algorithms.small import Own

CNN = Spec(name="cnn", options={"side": 8, "width": 4, "hidden": 9, "classes": 3})
NORMED = Spec(name="vgg13", options={"width": 0.04, "classes": 3})
HYPER = Hyper(batch_size=4, learning_rate=0.1)
SEED = 5


def network(spec: Spec = CNN, seed: int = 9) -> Model:
    """Return a device's network; its parameters are whatever came before."""
    return initial(spec, seed)


def pictures(count: int, seed: int, shape: tuple[int, ...] = (1, 8, 8)) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(count) + seed) % 3
    centres = torch.rand(3, *shape, generator=torch.Generator().manual_seed(7))
    return Examples(centres[labels] + 0.2 * torch.rand(count, *shape, generator=generator), labels)


FLEET = {"a": pictures(5, 0), "b": pictures(9, 1), "c": pictures(16, 2)}


@dataclass
class Played:
    """Rounds without any network.

    Attributes:
        state: The server's.
        devices: What each device kept.
        results: Of the last round.
        told: Of the last round.
        down: What went down in it.
    """

    state: State
    devices: dict[str, State]
    results: dict[str, Result] = field(default_factory=dict)
    told: dict[str, Assignment] = field(default_factory=dict)
    down: dict[str, Tree] = field(default_factory=dict)


def copied(tree: Mapping[str, Tensor]) -> Tree:
    return {key: leaf.clone() for key, leaf in tree.items()}


def play(  # noqa: PLR0913 - each test needs another of them
    algorithm: Algorithm,
    rounds: int = 1,
    *,
    spec: Spec = CNN,
    hyper: Hyper = HYPER,
    fleet: Mapping[str, Examples] = FLEET,
    values: Mapping[str, Mapping[str, Value]] | None = None,
    order: str = "abc",
) -> Played:
    """Play rounds; `values` are what an optimizer allocates."""
    played = Played(algorithm.init(initial(spec, SEED), SEED), {device: State() for device in fleet})
    for number in range(1, rounds + 1):
        cohort = Cohort(tuple(fleet), hyper, SEED, rounds)
        played.told = algorithm.assign(played.state, cohort, values or {}, number)
        for device, told in played.told.items():
            down = played.down[device] = copied(algorithm.broadcast(played.state, device, told))
            own = Own(fleet[device], told)
            after, result = algorithm.local(network(spec), played.devices[device], copied(down), own, told)
            if algorithm.check_update:
                algorithm.check_update(told, down, result.tree)
            played.devices[device], played.results[device] = after, result
        mean = Mean()
        for device in order:
            mean = algorithm.absorb(mean, device, played.told[device], played.results[device])
        played.state = algorithm.aggregate(played.state, mean)
    return played
