"""Every journal record can be read back: each field type, and values beyond JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from edge_server.journal import sqlite
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, RoundClosed, RunClosed
from edge_server.journal.rollouts.file import BoardReported, RolloutJournal
from edge_server.journal.stream import decode_row, row_mark
from shared.errors import Unrecordable, WireError
from shared.protocol.clip import clip_releases
from shared.protocol.inference.rollout import ModelStatus, Releases
from tests.fuzz import journals

RECORDS = [decode_row((1, line, row_mark(line, 0), 0)) for line in journals.seeds()]
POISON = [math.nan, math.inf, -math.inf, 1 << 64, -(1 << 63) - 1, True, 1.5, "\ud800", None]
FINE = [0.0, -0.0, 5e-324, -1.7e308, 1 << 63, (1 << 64) - 1, -(1 << 63)]


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every value below a record that holds no others, and where it is."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from leaves(getattr(value, name), (*place, name))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, (*place, key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from leaves(one, (*place, index))
    else:
        yield place, value


def replaced(value: Any, place: tuple[Any, ...], leaf: Any) -> Any:
    """Return a record with another leaf; raises ValueError where its own type refuses that."""
    if not place:
        return leaf
    key, *rest = place
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{key: replaced(getattr(value, key), tuple(rest), leaf)})
    if isinstance(value, dict):
        return value | {key: replaced(value[key], tuple(rest), leaf)}
    found = [replaced(one, tuple(rest), leaf) if index == key else one for index, one in enumerate(value)]
    return type(value)(found)


def is_alike(one: Any, other: Any) -> bool:
    """Tell whether two values are the same but for a list in place of a tuple, and an integer's last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return not isinstance(other, bool | str | None) and math.isclose(one, other, rel_tol=1e-15)
    return one == other and type(one) is type(other)


def test_every_kind_of_record_has_an_example():
    kinds = {kind for one in get_args(AnyRecord) for kind in (get_args(one) or (one,))}
    assert {type(record) for record in RECORDS} == kinds


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_what_is_taken_is_read_back_with_every_figure(record):
    """Whatever stands in a field: it is refused by its name, or read back as it was."""
    refused = 0
    for place, _ in leaves(record):
        for leaf in [*POISON, *FINE]:
            try:
                odd = replaced(record, place, leaf)
            except (ValueError, TypeError, AttributeError):
                continue
            try:
                body = sqlite.encode(odd)
            except Unrecordable:
                refused += 1
                continue
            again = decode_row((1, body, row_mark(body, 0), 0))
            assert is_alike(msgspec.to_builtins(again), msgspec.to_builtins(odd)), (place, leaf)
            assert not isinstance(leaf, float) or math.isfinite(leaf), (place, leaf)
    assert refused > 0


def test_a_journal_that_refused_a_record_goes_on_and_is_read_by_the_next_process(tmp_path):
    """Alone or in a batch, of which nothing is written then."""
    store = SqliteStore(tmp_path / "run", durable=False)
    whole = RoundClosed(round=1, outcome="missed", arrived=(), seconds=1.0)
    store.append(whole)
    for seconds in (math.nan, math.inf):
        with pytest.raises(Unrecordable, match="seconds"):
            store.append(msgspec.structs.replace(whole, seconds=seconds))
        with pytest.raises(Unrecordable):
            store.extend([whole, msgspec.structs.replace(whole, loss=seconds)])
    assert list(store.records()) == [whole]
    store.append(RunClosed(outcome="finished"))
    store.close()
    again = SqliteStore(tmp_path / "run", durable=False)
    assert list(again.records()) == [whole, RunClosed(outcome="finished")]
    assert list((tmp_path / "run").glob("*corrupt*")) == []
    again.close()


def test_it_is_a_refusal_of_what_came():
    """Whoever takes messages drops what a record cannot be made of, and goes on."""
    assert issubclass(Unrecordable, WireError)
    assert Unrecordable("x").reason == "unrecordable"


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf])
def test_a_boards_figure_that_is_none_spoils_no_journal_of_a_rollout(tmp_path, figure):
    status = ModelStatus(name="net", committed=1, figures={"p95_s": figure, "requests": 3.0})
    with pytest.raises(Unrecordable, match="p95_s"):
        RolloutJournal(tmp_path, "0001").append(BoardReported(at="now", device="a", status=status))
    [clipped] = clip_releases(Releases(device="a", models=(status,))).models
    assert clipped.figures == {"requests": 3.0}
    record = BoardReported(at="now", device="a", status=clipped)
    RolloutJournal(tmp_path, "0001").append(record)
    assert RolloutJournal(tmp_path, "0001").news() == [record]
