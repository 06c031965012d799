"""Small split networks and devices for the tests of FedSL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from shared.algorithms.base import Algorithm, Cohort
from shared.data.examples import Examples, batches
from shared.models.base import Model
from shared.models.build import seeded
from shared.models.small import cnn, mlp
from shared.protocol.messages import Assignment, Hyper
from shared.tensors.tree import Mean, State
from tests.shared.algorithms.sessions import Driven, drive

HYPER = Hyper(batch_size=4, learning_rate=0.1)
CLASSES = 3


def normed() -> Model:
    """Return convolutions with BatchNorm below the cut, one and a Dropout above it."""
    layers = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, CLASSES)),
    )
    return Model(layers, {1: 3, 2: 6}, (1, 6, 6))


def scaled() -> Model:
    """Return a network of the user's own that has no weights below its cut, only BatchNorm's."""
    return Model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES)), {1: 1}, (6,))


MAKERS = {
    "mlp": lambda: mlp(6, 5, CLASSES),
    "cnn": lambda: cnn(1, 4, 2, 5, CLASSES),
    "normed": normed,
    "scaled": scaled,
}


def make(name: str) -> tuple[Model, Model]:
    """Return a network with parameters and the same without storage."""
    with seeded(5):
        whole = MAKERS[name]()
    with torch.device("meta"):
        return whole, MAKERS[name]()


def examples(shape: tuple[int, ...], count: int, seed: int = 3) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    return Examples(torch.randn(count, *shape, generator=generator) + labels.view(-1, *[1] * len(shape)), labels)


@dataclass(frozen=True)
class Own:
    """A device's batches."""

    data: Examples
    told: Assignment

    @property
    def num_examples(self) -> int:
        return len(self.data)

    @property
    def validation(self) -> tuple[Tensor, Tensor]:
        return self.data.inputs[:0], self.data.labels[:0]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        hyper = self.told.hyper
        return batches(self.data, batch_size=hyper.batch_size, epochs=hyper.local_epochs, seed=self.told.seed)


@dataclass
class Fleet:
    """Devices with one algorithm and one network, round by round; the server's state and theirs in between."""

    algorithm: Algorithm
    name: str = "mlp"
    counts: tuple[int, ...] = (8, 8)
    hyper: Hyper = HYPER
    rounds: int = 4

    def __post_init__(self) -> None:
        self.whole, self.skeleton = make(self.name)
        self.state = self.algorithm.init(self.whole, 5)
        self.names = tuple("abcdefgh"[: len(self.counts)])
        self.data = {
            device: examples(self.whole.example, count, seed)
            for seed, (device, count) in enumerate(zip(self.names, self.counts, strict=True))
        }
        self.devices = dict.fromkeys(self.names, State())
        self.number = 0

    def told(self, number: int) -> dict[str, Assignment]:
        cohort = Cohort(self.names, self.hyper, seed=11, rounds=self.rounds)
        return self.algorithm.assign(self.state, cohort, {}, number)

    def own(self, told: Mapping[str, Assignment]) -> dict[str, Own]:
        return {device: Own(self.data[device], one) for device, one in told.items()}

    def play(self, **how) -> Driven:
        """Play a round and aggregate it; return what it came to, with the state before the average."""
        self.number += 1
        told = self.told(self.number)
        with seeded(self.number):
            driven = drive(self.algorithm, self.skeleton, self.state, told, self.own(told), before=self.devices, **how)
        mean = Mean()
        for device in self.names:
            mean = self.algorithm.absorb(mean, device, told[device], driven.results[device])
        self.devices, self.state = driven.devices, self.algorithm.aggregate(driven.state, mean)
        return driven


def short(told: Mapping[str, Assignment], steps: int) -> dict[str, Assignment]:
    """Return assignments of fewer steps, as if the round ended there."""
    return {device: msgspec.structs.replace(one, steps=steps) for device, one in told.items()}
