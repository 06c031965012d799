"""Any value of a message type, so that a field added tomorrow is tested the day it is added; virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec.inspect as shape
import pytest
from hypothesis import strategies as st

from shared.protocol.messages import Assignment, Hyper, Report
from shared.runtime.clock import VirtualLoop

T = TypeVar("T")

_HYPERS = st.builds(
    Hyper,
    local_epochs=st.integers(0, 100),
    batch_size=st.integers(1, 1 << 20),
    learning_rate=st.floats(1e-6, 10),
    momentum=st.floats(0, 0.99),
    weight_decay=st.floats(0, 1),
)
_MAKERS: dict[type, Callable[..., st.SearchStrategy[object]]] = {
    shape.NoneType: lambda _: st.none(),
    shape.BoolType: lambda _: st.booleans(),
    shape.IntType: lambda _: st.integers(-(1 << 63), (1 << 64) - 1),
    shape.FloatType: lambda _: st.floats(allow_nan=False),  # NaN differs from itself, so equality cannot be asked
    shape.StrType: lambda _: st.text(max_size=20),
    shape.BytesType: lambda _: st.binary(max_size=40),
    shape.LiteralType: lambda kind: st.sampled_from(kind.values),
    shape.StructType: lambda kind: _structs(kind.cls),
    shape.UnionType: lambda kind: st.one_of([_values(one) for one in kind.types]),
    shape.ListType: lambda kind: st.lists(_values(kind.item_type), max_size=4),
    shape.TupleType: lambda kind: st.tuples(*map(_values, kind.item_types)),
    shape.DictType: lambda kind: st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=4),
}


def _values(kind: shape.Type) -> st.SearchStrategy[object]:
    """Return what may stand in a field of this type."""
    return _MAKERS[type(kind)](kind)


def _structs(cls: type) -> st.SearchStrategy[object]:
    if cls is Hyper:
        return _HYPERS
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


@pytest.fixture(scope="session")
def virtually() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine in virtual time: seconds cost nothing and are exact."""

    def run(routine: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(routine)

    return run
