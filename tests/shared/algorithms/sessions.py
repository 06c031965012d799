"""Rounds driven by hand, device by device and step by step, and no network between the halves.

Split sessions of several devices; small networks of convolutions and linear layers, devices with pictures, rounds that
keep what devices keep; a server with labelled pictures and devices with unlabelled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn

from shared.algorithms.base import Algorithm, Batches, Cohort, Result, Session
from shared.codecs.dense import dense
from shared.data.examples import Examples, batches
from shared.models.base import Model
from shared.models.build import build_initial
from shared.models.cnn import cnn
from shared.models.mlp import mlp
from shared.protocol.messages import Assignment, Hyper, Missed, Spec, Value
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State, Tree


@dataclass
class Driven:
    """What a round of sessions came to.

    Attributes:
        state: The server's, after the last step.
        devices: States of the devices.
        ups: What went up, step by step.
    """

    state: State
    results: dict[str, Result] = field(default_factory=dict)
    devices: dict[str, State] = field(default_factory=dict)
    ups: list[dict[str, Tree]] = field(default_factory=list)
    downs: list[dict[str, Tree]] = field(default_factory=list)


def drive(  # noqa: PLR0913 - a round has so many sides
    algorithm: Algorithm,
    model: Model,
    state: State,
    told: Mapping[str, Assignment],
    batches: Mapping[str, Batches],
    *,
    before: Mapping[str, State] | None = None,
    misses: Callable[[int, str], bool] = lambda _step, _device: False,
    spoil: Callable[[int, str, Tree], None] = lambda _step, _device, _up: None,
) -> Driven:
    """Run the sessions of a round side by side, in order of device.

    Args:
        algorithm: A split one.
        state: The server's before the round; not changed.
        before: States of the devices.
        misses: Whether a step goes on without a device.
        spoil: Changes what a device sends.
    """
    done = Driven(State({key: leaf.clone() for key, leaf in state.tree.items()}, state.facts))
    sessions: dict[str, Session] = {}
    for device in sorted(told):
        start = {key: leaf.clone() for key, leaf in algorithm.broadcast(state, device, told[device]).items()}
        own = (before or {}).get(device, State())
        sessions[device] = algorithm.local(model, own, start, batches[device], told[device])
    ups = {device: next(session) for device, session in sessions.items()}
    for step in range(1, max(one.steps for one in told.values()) + 1):
        here = {device: up for device, up in ups.items() if not misses(step, device)}
        for device, up in here.items():
            spoil(step, device, up)
            algorithm.split.check_features(model, done.state, told[device], up)
        downs = {}
        if here:
            done.state, downs = algorithm.split.serve(model, done.state, told, here)
        done.ups.append(here)
        done.downs.append(downs)
        for device, session in sessions.items():
            try:
                ups[device] = session.send(downs.get(device, Missed(1)))
            except StopIteration as ended:
                done.devices[device], done.results[device] = ended.value
    return done


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
    with seed_torch(5):
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

    def inputs_at(self, places: Tensor) -> Tensor:
        return self.data.inputs[places]

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
        with seed_torch(self.number):
            driven = drive(self.algorithm, self.skeleton, self.state, told, self.own(told), before=self.devices, **how)
        mean = Mean()
        for device in self.names:
            mean = self.algorithm.absorb(mean, device, told[device], driven.results[device])
        self.devices, self.state = driven.devices, self.algorithm.aggregate(driven.state, mean)
        return driven


def short(told: Mapping[str, Assignment], steps: int) -> dict[str, Assignment]:
    """Return assignments of fewer steps, as if the round ended there."""
    return {device: msgspec.structs.replace(one, steps=steps) for device, one in told.items()}


MLP = Spec(name="mlp", options={"features": 6, "hidden": 5, "classes": 3})
CNN = Spec(name="cnn", options={"side": 8, "width": 4, "hidden": 9, "classes": 3})
NORMED = Spec(name="vgg13", options={"width": 0.04, "classes": 3})

SEED = 5


def network(spec: Spec = CNN, seed: int = 9) -> Model:
    """Return a device's network; its parameters are whatever came before."""
    return build_initial(spec, seed)


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
    played = Played(algorithm.init(build_initial(spec, SEED), SEED), {device: State() for device in fleet})
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


LABELLED_HYPER = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=0.01)


def bright(shape: tuple[int, ...], count: int, seed: int) -> Examples:
    """Return bright of three classes, the higher the brighter."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return Examples((torch.rand(count, *shape, generator=generator) + labels.view(-1, 1, 1, 1) / 3) / 2, labels)


def payload_bytes(tree: Tree) -> int:
    """Return the bytes of a tree's tensors as they travel where nothing is coded."""
    return dense().encode(tree, None)[0].num_bytes


@dataclass
class LabelledFleet:
    """Devices a, b, ... of one method.

    Attributes:
        names: A letter each.
        count: Examples of a device.
        results: Of the last round.
        sent: What went down in it.
        told: With what it went down.
    """

    algorithm: Algorithm
    names: str = "ab"
    name: str = "normed"
    count: int = 8
    hyper: Hyper = LABELLED_HYPER
    results: dict[str, Result] = field(default_factory=dict)
    sent: dict[str, Tree] = field(default_factory=dict)
    told: dict[str, Assignment] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.whole, self.skeleton = make(self.name)
        self.state = self.algorithm.init(self.whole, 5)
        self.labelled = bright(self.whole.example, 12, 99)
        self.data = {
            device: bright(self.whole.example, self.count, seed).without_labels()
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
        with seed_torch(self.number):
            batch = self.labelled.inputs, self.labelled.labels
            return self.algorithm.server.train(self.skeleton, self.state, batch, self.cohort, self.number)

    def train(self, begun: State, device: str) -> Result:
        """Have a device do its task."""
        told = self.told[device]
        down = self.sent[device] = dict(self.algorithm.broadcast(begun, device, told))
        with seed_torch(told.seed):
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
