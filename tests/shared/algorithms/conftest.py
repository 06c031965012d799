"""Devices with a few examples each, and a round of an algorithm without any network between its halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch

from shared.algorithms.base import Algorithm, Cohort
from shared.data.examples import Examples, batches
from shared.models.build import blank, initial
from shared.protocol.messages import Hyper, Spec
from shared.tensors.tree import State
from tests.shared.algorithms.sessions import drive

MODEL = Spec(name="mlp", options={"features": 6, "hidden": 5, "classes": 3})
HYPER = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1)


@dataclass(frozen=True)
class Own:
    """A device's examples in the order that its seed gives, as the trainer makes them."""

    data: Examples
    hyper: Hyper
    seed: int

    @property
    def num_examples(self) -> int:
        return len(self.data)

    @property
    def validation(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data.inputs[:0], self.data.labels[:0]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return batches(self.data, batch_size=self.hyper.batch_size, epochs=self.hyper.local_epochs, seed=self.seed)


@pytest.fixture(autouse=True, scope="module")
def one_thread(one_thread: None) -> None:
    """Have every test here compute on one thread."""


@pytest.fixture(scope="session")
def fleet() -> dict[str, Examples]:
    """Return three devices with 5, 9 and 16 examples of three classes that a line can part."""
    generator = torch.Generator().manual_seed(3)
    centres = 2 * torch.randn(3, 6, generator=generator)
    made = {}
    for device, count in (("a", 5), ("b", 9), ("c", 16)):
        labels = torch.arange(count) % 3
        made[device] = Examples(centres[labels] + torch.randn(count, 6, generator=generator), labels)
    return made


@pytest.fixture(scope="session")
def model() -> Callable[[], object]:
    """Return a maker of the same model."""
    return lambda: initial(MODEL, 5)


@pytest.fixture(scope="session")
def hyper() -> Hyper:
    return HYPER


@pytest.fixture(scope="session")
def own() -> type[Own]:
    return Own


@pytest.fixture(scope="session")
def play() -> Callable[..., State]:
    """Return a function that plays rounds: assign, broadcast, local, absorb in device order, aggregate."""

    def rounds(
        algorithm: Algorithm,
        fleet: Mapping[str, Examples],
        number: int = 1,
        hyper: Hyper = HYPER,
        order: str = "",
        kept: dict[str, State] | None = None,
    ) -> State:
        state, devices = algorithm.init(initial(MODEL, 5), 5), {device: State() for device in fleet}
        cohort = Cohort(tuple(fleet), hyper, seed=11, rounds=number)
        for round_number in range(1, number + 1):
            mean = algorithm.empty(state)
            told = algorithm.assign(state, cohort, {}, round_number)
            batches_of = {device: Own(fleet[device], one.hyper, one.seed) for device, one in told.items()}
            if algorithm.split:
                driven = drive(algorithm, blank(MODEL), state, told, batches_of, before=devices)
                state, devices, results = driven.state, driven.devices, driven.results
            else:
                results = {}
                for device, one in told.items():
                    start = algorithm.broadcast(state, device, one)
                    outcome = algorithm.local(initial(MODEL, 6), devices[device], start, batches_of[device], one)
                    assert isinstance(outcome, tuple)
                    devices[device], results[device] = outcome
            for device in order or sorted(fleet):
                mean = algorithm.absorb(mean, device, told[device], results[device])
            state = algorithm.aggregate(state, mean)
        if kept is not None:
            kept |= devices
        return state

    return rounds
