"""What `make bench NAME=gpu` calls the difference of two trainings, without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from shared.algorithms import ALGORITHMS
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import CPU


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    return importlib.import_module("gpu")


def test_a_difference_is_relative_to_the_change(bench):
    ones = {"a": torch.ones(4)}
    assert bench.difference(ones, {"a": 1.5 * torch.ones(4)}) == pytest.approx(0.5)
    assert isinstance(bench.difference(ones, {"a": torch.ones(5)}), str)


def test_a_method_that_sends_nothing_has_no_difference(bench):
    """It ended the benchmark with ZeroDivisionError."""
    assert isinstance(bench.difference({}, {}), str)
    method = build(ALGORITHMS, Spec(name="semifl"), "algorithm")
    taken = bench.train_once(method, bench.QUICK, CPU)
    assert isinstance(bench.difference(taken.tree, taken.tree), str)


def test_what_is_compared_is_the_change_and_not_the_parameters(bench):
    """Of whole parameters, which a step hardly moves, every difference looked like none."""
    method = build(ALGORITHMS, Spec(name="fedavg"), "algorithm")
    one = bench.train_once(method, bench.QUICK, CPU)
    other = {key: leaf + 0.01 * leaf.abs() for key, leaf in one.tree.items()}
    assert bench.difference(one.tree, other) == pytest.approx(0.01, rel=1e-3)
