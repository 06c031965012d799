"""A server with labelled pictures and devices with unlabelled ones, round by round, and no network in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shared.algorithms.base import Algorithm, Cohort, Result
from shared.codecs.dense import dense
from shared.data.examples import Examples
from shared.models.build import seeded
from shared.protocol.messages import Assignment, Hyper
from shared.tensors.tree import State, Tree
from tests.shared.algorithms.sessions import Own, make

HYPER = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=0.01)


def pictures(shape: tuple[int, ...], count: int, seed: int) -> Examples:
    """Return pictures of three classes, the higher the brighter."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return Examples((torch.rand(count, *shape, generator=generator) + labels.view(-1, 1, 1, 1) / 3) / 2, labels)


def payload_bytes(tree: Tree) -> int:
    """Return the bytes of a tree's tensors as they travel where nothing is coded."""
    return dense().encode(tree, None)[0].num_bytes


@dataclass
class Fleet:
    """Devices a, b, ... of one method.

    Attributes:
        algorithm: The method.
        names: A letter each.
        name: Of the network.
        count: Examples of a device.
        hyper: The plan's.
        results: Of the last round.
        sent: What went down in it.
        told: With what it went down.
    """

    algorithm: Algorithm
    names: str = "ab"
    name: str = "normed"
    count: int = 8
    hyper: Hyper = HYPER
    results: dict[str, Result] = field(default_factory=dict)
    sent: dict[str, Tree] = field(default_factory=dict)
    told: dict[str, Assignment] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.whole, self.skeleton = make(self.name)
        self.state = self.algorithm.init(self.whole, 5)
        self.labelled = pictures(self.whole.example, 12, 99)
        self.data = {
            device: pictures(self.whole.example, self.count, seed).without_labels()
            for seed, device in enumerate(self.names)
        }
        self.devices = {device: State() for device in self.names}

    @property
    def cohort(self) -> Cohort:
        return Cohort(tuple(self.names), self.hyper, seed=11, rounds=10)

    def begin(self) -> State:
        """Take the server's steps of the next round; return what it sends from."""
        self.number += 1
        self.told = self.algorithm.assign(self.state, self.cohort, {}, self.number)
        with seeded(self.number):
            batch = self.labelled.inputs, self.labelled.labels
            return self.algorithm.server.train(self.skeleton, self.state, batch, self.cohort, self.number)

    def train(self, begun: State, device: str) -> Result:
        """Have a device do its task."""
        told = self.told[device]
        down = self.sent[device] = dict(self.algorithm.broadcast(begun, device, told))
        with seeded(told.seed):
            outcome = self.algorithm.local(self.whole, self.devices[device], down, Own(self.data[device], told), told)
        self.algorithm.check_update(told, down, outcome[1].tree)
        self.devices[device], self.results[device] = outcome
        return outcome[1]

    def play(self, rounds: int = 1) -> State:
        """Play rounds; return the state that the last of them sent from."""
        for _ in range(rounds):
            begun = self.begin()
            mean = self.algorithm.empty(begun)
            for device in self.names:
                mean = self.algorithm.absorb(mean, device, self.told[device], self.train(begun, device))
            self.state = self.algorithm.aggregate(begun, mean)
        return begun
