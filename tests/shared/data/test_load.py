"""A spec becomes this device's examples: source, then limit, then partition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.data.load import load
from shared.data.partition import split_evenly
from shared.data.sources.read import SOURCES
from shared.data.spec import SOURCE_NAMES, Client, Data, Even
from tests.naming import names_all


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "examples.npz"
    np.savez(path, x=np.arange(100.0)[:, None], y=np.arange(100) % 5, who=np.arange(100) // 50)
    return str(path)


def values(examples):
    return examples.inputs[:, 0].tolist()


def test_every_source_that_may_be_written_is_registered():
    assert set(SOURCES) == set(SOURCE_NAMES)


def test_limit_draws_the_same_examples_every_time(path):
    few = load(Data(source="npz", path=path, limit=20))
    assert values(few) == values(load(Data(source="npz", path=path, limit=20)))
    assert len(set(values(few))) == 20
    assert values(few) == sorted(values(few))
    assert max(values(few)) > 50
    assert set(values(few)) < set(values(load(Data(source="npz", path=path, limit=30))))
    assert len(load(Data(source="npz", path=path, limit=1000))) == 100


def test_limit_comes_before_the_partition(path):
    few = load(Data(source="npz", path=path, limit=20))
    parts = [load(Data(source="npz", path=path, limit=20, partition=Even(parts=4, index=i))) for i in range(4)]
    assert [values(part) for part in parts] == [
        values(few.subset(torch.from_numpy(i))) for i in split_evenly(few.labels.numpy(), parts=4, seed=0)
    ]


def test_a_clients_share(path):
    mine = load(Data(source="npz", path=path, client_column="who", partition=Client(client="1")))
    assert values(mine) == list(range(50, 100))


def test_a_part_that_cannot_be(path, refused):
    assert names_all(refused(source="npz", path=path, partition=Even(parts=101, index=0)), 100, 1, 101, "parts")
    assert "client_column" in refused(source="npz", path=path, partition=Client(client="1"))
