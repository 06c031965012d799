"""What a user's function may return as a data set, and how other things are refused."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shared.data.classes import class_names
from shared.data.inputs import read_preparation
from shared.data.load import load
from shared.data.sources.arrays import Arrays
from shared.data.spec import Data
from shared.protocol.inputs import Inputs
from shared.registry import allow, allowed_entries
from tests.naming import names_all

INPUTS = np.arange(12.0).reshape(6, 2)
CLASSES = np.arange(6) % 3


@pytest.fixture
def function(tmp_path, monkeypatch):
    """Make `field:read` return what a test gives it, in a process that allows it."""
    before = allowed_entries()
    (tmp_path / "field.py").write_text("def read(data, **options):\n    return result(data, **options)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "field", raising=False)
    allow(["field:read"])

    def use(result):
        import field  # noqa: PLC0415 - written above

        monkeypatch.setattr(field, "result", result if callable(result) else lambda _: result, raising=False)

    yield use
    allow(before)
    sys.modules.pop("field", None)


@pytest.mark.parametrize(
    "result",
    [
        (INPUTS, CLASSES),
        Arrays(np.float32(INPUTS), CLASSES),
        TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(CLASSES)),
        list(zip(INPUTS.tolist(), CLASSES.tolist(), strict=True)),
        lambda _: ((row, number) for row, number in zip(INPUTS, CLASSES, strict=True)),
    ],
)
def test_arrays_and_data_sets_of_pairs(function, result):
    function(result)
    examples = load(Data(source="field:read"))
    assert (examples.inputs.tolist(), examples.labels.tolist()) == (INPUTS.tolist(), CLASSES.tolist())


def test_an_endless_stream_is_read_up_to_the_limit(function):
    function(lambda _: ((np.float32([number]), number % 2) for number in itertools.count()))
    assert load(Data(source="field:read", limit=5)).inputs.flatten().tolist() == [0, 1, 2, 3, 4]


def test_options_path_and_numbers(function):
    function(lambda data, scale: (INPUTS * scale, INPUTS[:, 0] + len(data.path)))
    spec = Data(source="field:read", path="four", options={"scale": 2}, targets="values")
    examples = load(spec)
    assert examples.inputs.tolist() == (INPUTS * 2).tolist()
    assert examples.labels.tolist() == [[value + 4] for value in INPUTS[:, 0].tolist()]
    assert (class_names(spec), read_preparation(spec)) == (None, Inputs())


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (None, ["NoneType"]),
        ([], ["no example"]),
        ([1, 2], ["int", "(input, target)"]),
        ((INPUTS, INPUTS), ["float64", "(6, 2)", "data.targets"]),
        ((INPUTS, CLASSES[:4]), ["6 inputs", "4 targets"]),
        ([([1.0], 0), ([1.0, 2.0], 1)], ["input 1", "(2,)", "(1,)"]),
        (lambda _: {}["absent"], ["KeyError", "absent"]),
        (lambda _: (INPUTS * np.nan, CLASSES), ["example 0", "NaN"]),
    ],
)
def test_other_results_are_refused(function, refused, result, named):
    function(result)
    assert names_all(refused(source="field:read"), "field:read", *named)
