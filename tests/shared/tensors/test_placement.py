"""Where tensors are computed with, as far as it shows without a GPU."""

from __future__ import annotations

import torch

from shared.tensors.placement import is_broken, shared_fraction


def test_memory_that_cpu_and_gpu_share_counts_once():
    """Of a limit of 6 GB on a board of 8 GB, a process that holds 2 GB leaves its GPU half of the board."""
    gb = 10**9
    assert shared_fraction(6 * gb, 2 * gb, 8 * gb) == 0.5
    assert shared_fraction(6 * gb, 7 * gb, 8 * gb) == 0.0
    assert shared_fraction(20 * gb, 0, 8 * gb) == 1.0


def test_a_torch_without_accelerator_errors_breaks_nothing(monkeypatch):
    """Such as 2.5.1, which Raspberry Pis 3 and 4 are given: any failing task asks."""
    monkeypatch.delattr(torch, "AcceleratorError", raising=False)
    assert not is_broken(ValueError("a task failed"))
    assert not is_broken(RuntimeError("CUDA error: out of memory"))
