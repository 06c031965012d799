"""A shelf gives every device what `load` gives it, and reads nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.data.cache import DataCache
from shared.data.load import load
from shared.data.spec import Client, Data, Dirichlet, Even, Shards
from shared.errors import ConfigError
from tests.naming import naming


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "examples.npz"
    who = np.array([f"w{number // 50}" for number in range(100)])
    np.savez(path, x=np.arange(100.0)[:, None], y=np.arange(100) % 5, who=who)
    return path


PARTITIONS = {
    "none": lambda _: None,
    "even": lambda k: Even(parts=4, index=k, seed=3),
    "shards": lambda k: Shards(parts=4, index=k, seed=3),
    "dirichlet": lambda k: Dirichlet(alpha=1.0, parts=4, index=k, min_examples=2),
    "client": lambda k: Client(client=f"w{k % 2}"),
}


@pytest.mark.parametrize("kind", PARTITIONS)
def test_every_share_is_that_of_load_and_the_file_is_read_once(path, kind):
    """Also with a limit and a holdout; the file is gone after the first share."""
    specs = [
        Data(source="npz", path=str(path), limit=90, holdout=0.2, client_column="who", partition=PARTITIONS[kind](k))
        for k in range(4)
    ]
    expected = [load(spec) for spec in specs]
    shelf = DataCache()
    shelf.load(specs[0])
    path.unlink()
    for spec, examples in zip(specs, expected, strict=True):
        found = shelf.load(spec)
        assert torch.equal(found.inputs, examples.inputs)
        assert torch.equal(found.labels, examples.labels)
        assert found.clients == examples.clients
        assert shelf.count(spec) == len(examples)
    assert shelf.example(specs[0]).shape == (1,)


def test_two_partitions_of_one_set_are_kept_apart(path):
    """Whatever differs but the device's own place."""
    shelf = DataCache()
    parts = [
        shelf.load(Data(source="npz", path=str(path), partition=Even(parts=parts, index=1, seed=seed)))
        for parts, seed in ((4, 0), (4, 1), (5, 0))
    ]
    assert [len(one) for one in parts] == [25, 25, 20]
    assert not torch.equal(parts[0].inputs, parts[1].inputs)


def test_an_unknown_client_is_named_with_those_there_are(path):
    """As `load` does, the first time and later."""
    shelf = DataCache()
    for name in ("w0", "w7"):
        spec = Data(source="npz", path=str(path), client_column="who", partition=Client(client=name))
        if name == "w0":
            assert shelf.count(spec) == 50
        else:
            with pytest.raises(ConfigError, match=naming("'w7'", "w0, w1")):
                shelf.load(spec)
