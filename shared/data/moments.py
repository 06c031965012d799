"""Federated mean and standard deviation, from each device's sums of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.errors import WireError

COUNT, SUM, SQUARES = "input_count", "input_sum", "input_squares"
INPUT_NAMES = (COUNT, SUM, SQUARES)
"""Names in `Update.sums`."""
CHUNK_VALUES = 1 << 20
ROUNDING = 1e-13
"""Variance in squares of the mean that rounding alone may give a constant channel."""


def sum_moments(inputs: NDArray[np.float32]) -> dict[str, list[float]]:
    """Return the count of values, their sum and the sum of their squares for each channel.

    Args:
        inputs: Of shape (N, channels, ...); channels of a table are its columns.
    """
    axes = (0, *range(2, inputs.ndim))
    rows = max(1, CHUNK_VALUES // max(1, inputs[0].size)) if len(inputs) else 1
    total, squares = np.zeros((2, inputs.shape[1]))
    for begin in range(0, len(inputs), rows):
        chunk = inputs[begin : begin + rows].astype(np.float64)
        total += chunk.sum(axis=axes)
        squares += np.square(chunk).sum(axis=axes)
    count = float(inputs.size / inputs.shape[1])
    return {COUNT: [count], SUM: total.tolist(), SQUARES: squares.tolist()}


def require_moments(sums: Mapping[str, Sequence[float]]) -> None:
    """Refuse figures that no data set has.

    Raises:
        WireError: One is missing, not finite or out of range.
    """
    count, total, squares = (np.asarray(sums.get(name, ()), dtype=np.float64) for name in INPUT_NAMES)
    if count.shape != (1,) or not total.size or total.shape != squares.shape:
        raise WireError("sums of inputs are missing or differ in length", reason="sums")
    if not np.isfinite([count[0], *total, *squares]).all() or count[0] < 1 or squares.min() < 0:
        raise WireError("a sum of inputs is NaN, infinite or negative", reason="sums")
    if (total**2 > count[0] * squares * (1 + 1e-6)).any():  # contradicts the Cauchy-Schwarz inequality
        raise WireError("sums of inputs are larger than their squares allow", reason="sums")


def find_mean_and_std(several: Iterable[Mapping[str, Sequence[float]]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over all devices; a constant channel has the deviation 1."""
    devices = list(several)
    counts, totals, squares = (np.sum([sums[name] for sums in devices], axis=0) for name in INPUT_NAMES)
    mean = totals / counts[0]
    variance = np.maximum(0.0, squares / counts[0] - mean**2)
    is_constant = variance <= ROUNDING * mean**2
    std = np.where(is_constant, 1.0, np.sqrt(np.where(is_constant, 1.0, variance)))
    return tuple(mean.tolist()), tuple(std.tolist())
