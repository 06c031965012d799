"""Fixtures: message strategies, virtual time, recorded data, rounds without a network.

A message's values follow from its type, so that a field added tomorrow is tested the day it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import msgspec.inspect as shape
import pytest
import torch
from hypothesis import strategies as st

from shared.algorithms.base import Algorithm, Cohort
from shared.data.examples import Examples
from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.models.build import build_blank, build_initial
from shared.protocol.adaptation import Lora
from shared.protocol.inputs import Inputs
from shared.protocol.messages import Assignment, Hyper, Report, StepOptions
from shared.protocol.objective import ObjectiveSpec, Target
from shared.tensors.tree import State
from tests.shared.algorithms.sessions import MLP, Own, drive

T = TypeVar("T")

ROUND = Hyper(local_epochs=2, batch_size=4, learning_rate=0.1)
_HYPERS = st.builds(
    Hyper,
    local_epochs=st.integers(0, 100),
    batch_size=st.integers(1, 1 << 20),
    learning_rate=st.floats(1e-6, 10),
    momentum=st.floats(0, 0.99),
    weight_decay=st.floats(0, 1),
    step_options=st.just(msgspec.UNSET)
    | st.builds(
        StepOptions,
        optimizer=st.sampled_from(["sgd", "adam", "adamw"]),
        beta1=st.floats(0, 0.99),
        beta2=st.floats(0, 0.99),
        eps=st.floats(1e-9, 1),
        clip_norm=st.floats(0, 100),
        precision=st.sampled_from(["float32", "bfloat16", "float16"]),
    ),
)
_INPUTS = st.builds(
    Inputs,
    scale=st.none() | st.floats(1e-6, 1e6),
    mean=st.lists(st.floats(-10, 10), max_size=3).map(tuple),
    std=st.lists(st.floats(1e-6, 10), max_size=3).map(tuple),
    shape=st.lists(st.integers(1, 1 << 20), max_size=3).map(tuple),
    features=st.lists(st.text(max_size=20), max_size=4).map(tuple),
)
_OBJECTIVES = st.builds(
    ObjectiveSpec,
    kind=st.sampled_from(("regression", "classification", "anomaly")),
    loss=st.text(max_size=20),
    loss_options=st.dictionaries(st.text(max_size=20), st.booleans() | st.floats(allow_nan=False), max_size=3),
    metrics=st.lists(st.text(max_size=20), max_size=4, unique=True).map(tuple),
    target=st.builds(
        Target, metric=st.text(max_size=9), direction=st.sampled_from(("max", "min")), value=st.floats(-1e9, 1e9)
    ),
)
_ADAPTERS = st.builds(
    Lora,
    rank=st.integers(1, 64),
    alpha=st.floats(1e-3, 1e3),
    layers=st.lists(st.text(max_size=20), min_size=1, max_size=4).map(tuple),
    train=st.lists(st.text(max_size=20), max_size=4).map(tuple),
)
_WITHIN_BOUNDS: dict[type, st.SearchStrategy[object]] = {
    Hyper: _HYPERS,
    Inputs: _INPUTS,
    Lora: _ADAPTERS,
    ObjectiveSpec: _OBJECTIVES,
}
_MAKERS: dict[type, Callable[..., st.SearchStrategy[object]]] = {
    shape.NoneType: lambda _: st.none(),
    shape.BoolType: lambda _: st.booleans(),
    shape.IntType: lambda kind: st.integers(_given(kind.ge, -(1 << 63)), _given(kind.le, (1 << 64) - 1)),
    shape.FloatType: lambda kind: st.floats(kind.ge, kind.le, allow_nan=False),  # NaN differs from itself
    shape.StrType: lambda kind: st.from_regex(kind.pattern) if kind.pattern else st.text(max_size=20),
    shape.BytesType: lambda kind: st.binary(
        min_size=kind.min_length or 0, max_size=min(40, _given(kind.max_length, 40))
    ),
    shape.LiteralType: lambda kind: st.sampled_from(kind.values),
    shape.StructType: lambda kind: _structs(kind.cls),
    shape.UnionType: lambda kind: st.one_of([_values(one) for one in kind.types]),
    shape.ListType: lambda kind: st.lists(_values(kind.item_type), max_size=4),
    shape.VarTupleType: lambda kind: st.lists(_values(kind.item_type), max_size=4).map(tuple),
    shape.TupleType: lambda kind: st.tuples(*map(_values, kind.item_types)),
    shape.DictType: lambda kind: st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=4),
}


def _given(bound: int | None, otherwise: int) -> int:
    return otherwise if bound is None else int(bound)


def _values(kind: shape.Type) -> st.SearchStrategy[object]:
    """Return what may stand in a field of this type."""
    return _MAKERS[type(kind)](kind)


def _structs(cls: type) -> st.SearchStrategy[object]:
    if cls in _WITHIN_BOUNDS:
        return _WITHIN_BOUNDS[cls]
    described = shape.type_info(cls)
    assert isinstance(described, shape.StructType)
    made = {field.name: _values(field.type) for field in described.fields}
    if cls is Assignment:
        made["steps"] = st.integers(0, (1 << 64) - 1)
    if cls is Report:
        made["at"] = st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(cls, **made)


@pytest.fixture(scope="session")
def any_of() -> Callable[[type], st.SearchStrategy[object]]:
    """Return the strategy that makes any value of a struct."""
    return _structs


@pytest.fixture(scope="session")
def same() -> Callable[[object, object], bool]:
    """Compare two messages by type as well: 1 and 1.0 and True are equal to Python, not to a reader."""

    def equal(a: object, b: object) -> bool:
        return a == b and repr(a) == repr(b)

    return equal


@pytest.fixture
def recorded(data_root: Path) -> Callable[[str], str]:
    """Return the path of a recorded data set's file or folder, or skip the test."""

    def find(name: str) -> str:
        path = data_root / name
        if not path.exists():
            pytest.skip(f"{path} is absent; set FIELDFLEET_DATA to the folder of data sets")
        return str(path)

    return find


@pytest.fixture
def refused() -> Callable[..., str]:
    """Return the message with which `load` refuses a spec."""

    def message(**fields: object) -> str:
        with pytest.raises(ConfigError) as caught:
            load(Data(**fields))
        return str(caught.value)

    return message


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
    return lambda: build_initial(MLP, 5)


@pytest.fixture(scope="session")
def hyper() -> Hyper:
    return ROUND


@pytest.fixture(scope="session")
def own() -> Callable[[Examples, Hyper, int], Own]:
    """Return a maker of a device's batches, in the order that a seed gives."""
    return lambda data, hyper, seed: Own(data, Assignment(seed=seed, hyper=hyper))


@pytest.fixture(scope="session")
def play() -> Callable[..., State]:
    """Return a function that plays rounds: assign, broadcast, local, absorb in device order, aggregate.

    A server that trains itself has labels of all the fleet's examples.
    """

    def rounds(
        algorithm: Algorithm,
        fleet: Mapping[str, Examples],
        number: int = 1,
        hyper: Hyper = ROUND,
        order: str = "",
        kept: dict[str, State] | None = None,
    ) -> State:
        state, devices = algorithm.init(build_initial(MLP, 5), 5), {device: State() for device in fleet}
        cohort = Cohort(tuple(fleet), hyper, seed=11, rounds=number)
        labelled = (
            torch.cat([one.inputs for one in fleet.values()]),
            torch.cat([one.labels for one in fleet.values()]),
        )
        for round_number in range(1, number + 1):
            if algorithm.server:
                state = algorithm.server.train(build_blank(MLP), state, labelled, cohort, round_number)
            mean = algorithm.empty(state)
            told = algorithm.assign(state, cohort, {}, round_number)
            batches_of = {device: Own(fleet[device], one) for device, one in told.items()}
            if algorithm.split:
                driven = drive(algorithm, build_blank(MLP), state, told, batches_of, before=devices)
                state, devices, results = driven.state, driven.devices, driven.results
            else:
                results = {}
                for device, one in told.items():
                    start = algorithm.broadcast(state, device, one)
                    outcome = algorithm.local(build_initial(MLP, 6), devices[device], start, batches_of[device], one)
                    assert isinstance(outcome, tuple)
                    devices[device], results[device] = outcome
            for device in order or sorted(fleet):
                mean = algorithm.absorb(mean, device, told[device], results[device])
            state = algorithm.aggregate(state, mean)
        if kept is not None:
            kept |= devices
        return state

    return rounds
