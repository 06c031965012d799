"""Examples held out by hash: the share, no move with growth, blocks of time."""

from __future__ import annotations

import numpy as np
import pytest

from shared.data.cache import DataCache
from shared.data.examples import split_holdout
from shared.data.formats import Window
from shared.data.identity import hash_texts, is_held_out
from shared.data.load import load
from shared.data.sources.arrays import select_held_out
from shared.data.sources.read import read_held_out, read_share
from shared.data.spec import Data, Even

START = np.datetime64("2024-01-01T00:00")


def rows(first, last):
    return "".join(f"{START + np.timedelta64(hour, 'h')},{hour},{hour}\n" for hour in range(first, last))


def sides(spec):
    """Return the first values of the examples to train on, held out and reserved for validation."""
    remaining, held_out = split_holdout(load(spec), spec.holdout, seed=0)
    train, validation = split_holdout(remaining, spec.validation, seed=1)
    return tuple({float(row.flatten()[0]) for row in part.inputs} for part in (train, held_out, validation))


def test_shares_are_those_asked_for_and_independent():
    """Within five standard deviations of the binomial distribution."""
    identities = hash_texts(map(str, range(100_000)))
    first, second = (is_held_out(identities, 0.2, seed) for seed in (0, 1))
    bound = 5 * np.sqrt(0.2 * 0.8 / len(identities))
    assert abs(first.mean() - 0.2) < bound
    assert abs(second.mean() - 0.2) < bound
    assert abs((first & second).mean() - 0.04) < bound
    assert not is_held_out(identities, 0.0, 0).any()


@pytest.mark.parametrize("keys", [{}, {"time_column": "time"}, {"skip_columns": ("time",)}])
def test_growth_moves_no_row_to_another_side(tmp_path, keys):
    """By content, or by time."""
    path = tmp_path / "a.csv"
    path.write_text("time,v,y\n" + rows(0, 300))
    keys = keys or {"skip_columns": ("time",), "recent": 200}
    spec = Data(source="csv", path=str(path), target_columns=("y",), growing=True, holdout=0.2, validation=0.2, **keys)
    before = sides(spec)
    with path.open("a") as file:
        file.write(rows(300, 400))
    after = sides(spec)
    assert all(map(len, before))
    for side, (old, new) in enumerate(zip(before, after, strict=True)):
        others = set().union(*(after[:side] + after[side + 1 :]))
        assert not old & others
        assert new - old
    assert len(set().union(*after)) == keys.get("recent", 400)


def test_blocks_of_time_keep_windows_of_both_sides_apart(tmp_path):
    """No row of a window to train on is a row of one held out, and growth moves no window."""
    path = tmp_path / "a.csv"
    path.write_text("time,v,y\n" + rows(0, 24 * 30))
    window = Window(length=5, horizon=2)
    keys = {"time_column": "time", "target_columns": ("y",), "window": window, "holdout_by": "hash", "holdout": 0.3}
    spec = Data(source="csv", path=str(path), **keys)
    train, held_out, _ = sides(spec)
    span = window.length + window.horizon
    seen = {start + at for start in train for at in range(span)}
    assert not seen & {start + at for start in held_out for at in range(span)}
    assert 0.1 < len(held_out) / len(train | held_out) < 0.6
    with path.open("a") as file:
        file.write(rows(24 * 30, 24 * 40))
    grown_train, grown_held_out, _ = sides(spec)
    assert train <= grown_train
    assert held_out <= grown_held_out


def test_a_device_without_torch_and_the_replay_hold_out_the_same(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(200.0)[:, None], y=np.arange(200) % 3)
    spec = Data(
        source="npz",
        path=str(path),
        holdout_by="hash",
        holdout=0.25,
        validation=0.1,
        partition=Even(parts=2, index=1),
    )
    train, held_out, _ = sides(spec)
    assert {float(value.item()) for value in read_held_out(spec).inputs} == held_out
    assert {float(value.item()) for value in select_held_out(read_share(spec), spec.holdout).inputs} == held_out
    assert DataCache().count_sides(spec) == (len(held_out), len(train))
