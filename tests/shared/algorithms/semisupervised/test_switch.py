"""Labeller switch: divergence from the uniform distribution, and threshold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from shared.algorithms.semisupervised.switch import divergence_from_uniform, use_teacher

SHARES = st.lists(st.floats(0, 1, width=32), min_size=2, max_size=64).filter(lambda shares: sum(shares) > 1e-3)


@pytest.mark.parametrize("classes", [2, 3, 10, 49, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_shares_diverge_by_nothing_and_a_single_class_by_all(classes, dtype):
    assert divergence_from_uniform(torch.full((classes,), 1 / classes, dtype=dtype)) == pytest.approx(0, abs=1e-12)
    single = functional.one_hot(torch.tensor(1), classes).to(dtype)
    assert divergence_from_uniform(single) == pytest.approx(math.log(classes))


@given(SHARES)
def test_it_is_torchs_divergence_within_its_bounds(shares):
    """`kl_div` has the distribution first that is compared with, as logarithms."""
    mean = torch.tensor(shares, dtype=torch.float64)
    equal = torch.full_like(mean, -math.log(len(shares)))
    expected = functional.kl_div(equal, mean / mean.sum(), reduction="sum").item()
    found = divergence_from_uniform(mean.float())
    assert found == pytest.approx(expected, abs=1e-5)
    assert 0 <= found <= math.log(len(shares)) + 1e-9


@given(SHARES, st.randoms(use_true_random=False))
def test_names_of_classes_do_not_matter(shares, random):
    mixed = random.sample(shares, len(shares))
    assert divergence_from_uniform(torch.tensor(mixed)) == pytest.approx(divergence_from_uniform(torch.tensor(shares)))


def test_the_teacher_labels_below_the_threshold_alone():
    """Shares of 0.7, 0.2 and 0.1 diverge by log 3 - 0.8018 = 0.2968."""
    mean = torch.tensor([0.7, 0.2, 0.1])
    assert use_teacher(mean, 0.3)
    assert not use_teacher(mean, 0.29)
    single = torch.tensor([0.0, 1.0, 0.0])
    assert use_teacher(single, math.inf)
    assert not use_teacher(torch.ones(3) / 3, 0.0), "0 is never"
