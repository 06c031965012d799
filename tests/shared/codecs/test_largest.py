"""The largest magnitudes of many numbers: those that a sort finds, the first of equal ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codecs import largest
from shared.codecs.largest import find_largest


def sorted_positions(sizes: np.ndarray, count: int) -> list[int]:
    """Return what a stable sort puts first."""
    return sorted(np.argsort(-sizes.astype(np.float64), kind="stable")[:count].tolist())


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    data=st.data(), length=st.integers(0, 400), levels=st.sampled_from([1, 3, 50, 10_000]), seed=st.integers(0, 1000)
)
def test_it_is_what_a_stable_sort_finds(data, length, levels, seed):
    """With many equal ones and with few, of every width."""
    count = data.draw(st.integers(0, length))
    values = torch.randint(-levels, levels + 1, (length,), generator=torch.Generator().manual_seed(seed)) / levels
    for dtype, whole in ((torch.float32, torch.int32), (torch.float64, torch.int64), (torch.bfloat16, torch.int16)):
        found = find_largest(values.to(dtype).view(whole).numpy(), count)
        sizes = values.to(dtype).abs().double().numpy()
        assert found.tolist() == sorted_positions(sizes, count)


@pytest.mark.parametrize("count", [1, 1000, 70_000, 140_000, 199_999])
def test_more_numbers_than_are_worked_on_at_a_time(count):
    """Ties go over the borders of chunks."""
    assert largest.CHUNK < 100_000
    values = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    values[10_000:150_000] = 0.5
    assert find_largest(values.view(np.int32), count).tolist() == sorted_positions(np.abs(values), count)


def test_numbers_that_are_none_come_first():
    """NaN of either sign before infinity: whoever is sent them can refuse them."""
    values = torch.tensor([1.0, -torch.inf, 3e38, -torch.nan, torch.nan])
    assert [find_largest(values.view(torch.int32).numpy(), count).tolist() for count in (2, 3, 4)] == [
        [3, 4],
        [1, 3, 4],
        [1, 2, 3, 4],
    ]
