"""Marks and biases beside the weights: what is called feasible was checked, at any rho_max."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.allocation.optimizers.bandwidth_marks import Upload, solve_with_marks
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth
from edge_server.allocation.optimizers.base import Bound
from tests.edge_server.allocation.optimizers.instances import BANDWIDTHS, bandwidth

COUNTS = (2, 3, 7, 20, 50)


def seconds(problem: Bandwidth, upload: Upload, found) -> np.ndarray:
    """Return (28) of those who are served, by what goes up byte for byte."""
    served = (found.share > 0) & (found.pruned < 1)
    kept = (1 - found.pruned)[served]
    before, compute = (problem.personal_s + problem.warm_up_s)[served], problem.compute_s[served]
    return before + kept * compute + upload.bits(kept) / (found.share * problem.up_bits_per_s)[served]


def asked(seed: int, most_pruned: float) -> tuple[Bandwidth, Upload]:
    rng = np.random.default_rng(seed)
    problem = bandwidth(BANDWIDTHS[seed % len(BANDWIDTHS)], COUNTS[seed % len(COUNTS)], seed)
    weights = problem.upload_bits / 32
    own = {**vars(problem), "most_pruned": most_pruned}
    return Bandwidth(**own), Upload(weights, 32.0, 10 ** rng.uniform(-4, -1) * 32 * weights)


@pytest.mark.parametrize("most_pruned", [1.0, 0.95])
def test_nobody_is_over_the_threshold_whether_or_not_the_marks_settle(most_pruned):
    for seed in range(150):
        problem, upload = asked(seed, most_pruned)
        _, found = solve_with_marks(problem, upload)
        took = seconds(problem, upload, found)
        assert np.all(took <= problem.threshold_s * (1 + 1e-9)), seed
        assert found.share.sum() <= 1 + 1e-9
        assert found.objective == pytest.approx(found.pruned.sum())
        able = ~np.isin(found.bound, (Bound.OUT, Bound.UNKNOWN))
        if found.feasible:
            assert np.all(found.pruned[able] <= most_pruned + 1e-9), seed


def test_what_is_called_enough_is():
    """Where not everybody's floor fits with its marks, the threshold that is named does."""
    tried = 0
    for seed in range(150):
        problem, upload = asked(seed, 0.95)
        _, found = solve_with_marks(problem, upload)
        if found.feasible or not np.isfinite(found.enough_s):
            continue
        tried += 1
        longer = Bandwidth(**{**vars(problem), "threshold_s": found.enough_s * (1 + 1e-6)})
        assert solve_with_marks(longer, upload)[1].feasible, seed
    assert tried > 10
