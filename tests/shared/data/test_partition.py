"""Every partition gives each example to exactly one part, the same one for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.data.partition import split_dirichlet, split_evenly, split_shards, take_share
from shared.data.sources.arrays import Arrays
from shared.data.spec import Client, Dirichlet, Even, Shards
from shared.errors import ConfigError
from tests.naming import naming

LABELS = st.lists(st.integers(0, 5), min_size=8, max_size=120).map(np.array)
PARTS = st.integers(1, 4)
SEEDS = st.integers(0, 2**63 - 1)
CLASSES, EACH = 10, 60
TEN_CLASSES = np.tile(np.arange(CLASSES), EACH)


def require_exact_cover(parts, count):
    assert np.sort(np.concatenate(parts)).tolist() == list(range(count))
    assert all(part.dtype == np.int64 and part.tolist() == sorted(part.tolist()) for part in parts)


def as_lists(parts):
    return [part.tolist() for part in parts]


def shares(labels, parts):
    """Return how many examples of each class each part has, of shape (parts, classes)."""
    return np.stack([np.bincount(labels[part], minlength=CLASSES) for part in parts])


@given(LABELS, PARTS, SEEDS, st.floats(0.01, 1000))
def test_dirichlet_gives_each_example_once(labels, parts, seed, alpha):
    got = split_dirichlet(labels, alpha=alpha, parts=parts, seed=seed)
    require_exact_cover(got, len(labels))
    assert len(got) == parts
    assert as_lists(split_dirichlet(labels, alpha=alpha, parts=parts, seed=seed)) == as_lists(got)


@given(LABELS, PARTS, SEEDS, st.integers(1, 2))
def test_shards_give_each_example_once(labels, parts, seed, several):
    got = split_shards(labels, parts=parts, shards_per_device=several, seed=seed)
    require_exact_cover(got, len(labels))
    assert len(got) == parts
    assert as_lists(split_shards(labels, parts=parts, shards_per_device=several, seed=seed)) == as_lists(got)


@given(LABELS, PARTS, SEEDS)
def test_even_gives_each_example_once_and_equal_sizes(labels, parts, seed):
    got = split_evenly(labels, parts=parts, seed=seed)
    require_exact_cover(got, len(labels))
    assert {len(part) for part in got} <= {len(labels) // parts, -(-len(labels) // parts)}
    assert as_lists(split_evenly(labels, parts=parts, seed=seed)) == as_lists(got)


def test_seeds_give_other_splits():
    for split in (
        lambda seed: split_dirichlet(TEN_CLASSES, alpha=1.0, parts=5, seed=seed),
        lambda seed: split_shards(TEN_CLASSES, parts=5, seed=seed),
        lambda seed: split_evenly(TEN_CLASSES, parts=5, seed=seed),
    ):
        assert as_lists(split(0)) != as_lists(split(1))


def test_a_large_alpha_is_nearly_even_and_a_small_one_is_not():
    """With 5 parts each class of 60 has 12 in each; at alpha 0.05 most of it lies in one part."""
    level = shares(TEN_CLASSES, split_dirichlet(TEN_CLASSES, alpha=1e6, parts=5, seed=0))
    assert np.abs(level - EACH // 5).max() <= 1
    steep = shares(TEN_CLASSES, split_dirichlet(TEN_CLASSES, alpha=0.05, parts=5, seed=0))
    assert steep.max(axis=0).mean() > 0.7 * EACH


def test_dirichlet_draws_again_until_all_have_enough():
    loose = split_dirichlet(TEN_CLASSES, alpha=0.3, parts=10, seed=1, min_examples=0)
    tight = split_dirichlet(TEN_CLASSES, alpha=0.3, parts=10, seed=1, min_examples=30)
    assert min(map(len, loose)) < 30 <= min(map(len, tight))
    require_exact_cover(tight, len(TEN_CLASSES))


def test_dirichlet_gives_up_with_the_remedy():
    with pytest.raises(ConfigError, match=naming("alpha 0.001", 20, "min_examples 30")):
        split_dirichlet(TEN_CLASSES, alpha=1e-3, parts=20, seed=0, min_examples=30)
    with pytest.raises(ConfigError, match=naming(100, 8, "parts")):
        split_dirichlet(TEN_CLASSES, alpha=1.0, parts=100, seed=0, min_examples=8)
    for alpha in (0.0, -1.0, float("inf"), float("nan"), 1.7e308):
        with pytest.raises(ConfigError, match="alpha"):
            split_dirichlet(TEN_CLASSES, alpha=alpha, parts=3, seed=0)


def test_shards_are_runs_of_one_class():
    """10 classes of 60 in 20 shards of 30: no shard straddles classes, so each device has at most 2."""
    parts = split_shards(TEN_CLASSES, parts=10, shards_per_device=2, seed=0)
    assert all(len(part) == 60 and len(np.unique(TEN_CLASSES[part])) <= 2 for part in parts)


def test_more_parts_than_examples():
    few = np.zeros(3, dtype=np.int64)
    for split in (
        lambda: split_evenly(few, parts=4, seed=0),
        lambda: split_shards(few, parts=2, shards_per_device=2, seed=0),
        lambda: split_shards(few, parts=2, shards_per_device=0, seed=0),
        lambda: split_evenly(few, parts=0, seed=0),
        lambda: split_dirichlet(few, alpha=1.0, parts=10**12, seed=0),
    ):
        with pytest.raises(ConfigError):
            split()


def ten_classes(clients=None):
    return Arrays(np.arange(len(TEN_CLASSES), dtype=np.float32)[:, None], TEN_CLASSES, clients)


@pytest.mark.parametrize(
    "build",
    [
        lambda index: Dirichlet(alpha=0.5, parts=4, index=index, seed=3),
        lambda index: Shards(parts=4, index=index, seed=3),
        lambda index: Even(parts=4, index=index, seed=3),
    ],
)
def test_devices_take_disjoint_parts_of_all(build):
    taken = [take_share(ten_classes(), build(index)) for index in range(4)]
    assert sorted(np.concatenate([part.inputs[:, 0] for part in taken]).tolist()) == list(range(len(TEN_CLASSES)))
    with pytest.raises(ValueError, match="index"):
        build(4)


class Unchecked(Even, frozen=True):
    """A partition that was not validated."""

    def __post_init__(self): ...


@pytest.mark.parametrize("index", [-1, 2, 10**9])
def test_an_index_out_of_range(index):
    with pytest.raises(ConfigError, match=naming(f"index {index}", 1)):
        take_share(ten_classes(), Unchecked(parts=2, index=index))


def test_the_draws_are_those_of_other_devices():
    """Devices with other versions of numpy must share alike: these numbers change only if numpy's generator does."""
    assert split_evenly(TEN_CLASSES, parts=5, seed=0)[0][:6].tolist() == [5, 12, 18, 20, 26, 36]
    assert [len(part) for part in split_dirichlet(TEN_CLASSES, alpha=0.5, parts=5, seed=0)] == [92, 114, 120, 161, 113]
    assert split_shards(TEN_CLASSES, parts=5, seed=0)[0][:3].tolist() == [4, 6, 14]


def test_an_empty_part_is_refused():
    """Six examples of one class at alpha 1e-9 all fall to one of two parts."""
    one_class = Arrays(np.zeros((6, 1), dtype=np.float32), np.zeros(6, dtype=np.int64))
    parts = [Dirichlet(alpha=1e-9, parts=2, index=index, min_examples=0) for index in range(2)]
    sizes = [len(part) for part in split_dirichlet(one_class.labels, alpha=1e-9, parts=2, seed=0)]
    assert sorted(sizes) == [0, 6]
    assert len(take_share(one_class, parts[sizes.index(6)])) == 6
    with pytest.raises(ConfigError, match=naming(f"part {sizes.index(0)}", 2)):
        take_share(one_class, parts[sizes.index(0)])


def test_a_client_has_its_own_examples():
    clients = tuple(f"w{number % 20}" for number in range(len(TEN_CLASSES)))
    mine = take_share(ten_classes(clients), Client(client="w7"))
    assert set(mine.clients) == {"w7"}
    assert len(mine) == len(TEN_CLASSES) // 20
    with pytest.raises(ConfigError, match=r"'nobody'.* w0, .*\.\.\."):
        take_share(ten_classes(clients), Client(client="nobody"))
    with pytest.raises(ConfigError, match="client_column"):
        take_share(ten_classes(), Client(client="w7"))
