"""scikit-learn's digits, read without scikit-learn."""

from __future__ import annotations

import gzip
import importlib.util
import sys

import numpy as np
import pytest
import torch

from shared.data.load import load
from shared.data.sources import digits
from shared.data.spec import Data
from shared.runtime.extras import install_command


@pytest.fixture
def installed():
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is absent: make setup")


@pytest.mark.usefixtures("installed")
def test_the_real_digits():
    train, test = load(Data(source="digits")), load(Data(source="digits", split="test"))
    assert train.inputs.shape == (1438, 1, 8, 8)
    assert test.inputs.shape == (359, 1, 8, 8)
    assert (train.labels.unique().tolist(), test.labels.unique().tolist()) == (list(range(10)), list(range(10)))
    assert (float(train.inputs.min()), float(train.inputs.max())) == (0, 1)


@pytest.mark.usefixtures("installed")
def test_train_and_test_share_no_row_of_the_file():
    """The pictures are not all distinct, so the two halves together must have the counts of the file."""
    table = np.loadtxt(digits.find(), delimiter=",")
    both = [load(Data(source="digits", split=split)) for split in ("train", "test")]
    rows = torch.cat([torch.cat([half.inputs.flatten(1) * 16, half.labels[:, None]], dim=1) for half in both])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, table.tolist()))


def test_without_scikit_learn(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert install_command("demo") in refused(source="digits")


@pytest.mark.parametrize(
    "content",
    [b"plain", gzip.compress(b"1,2,x\n", mtime=0), gzip.compress(b"1,2,3\n" * 99, mtime=0)[:-12]],
    ids=["plain", "a word", "its end missing"],
)
def test_a_damaged_file(tmp_path, monkeypatch, refused, content):
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(content)
    monkeypatch.setattr(digits, "find", lambda: path)
    assert str(path) in refused(source="digits")


@pytest.mark.usefixtures("installed")
def test_scikit_learn_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    load(Data(source="digits"))
    assert "sklearn" not in sys.modules
