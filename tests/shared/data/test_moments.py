"""Federated mean and deviation against those of the pooled inputs."""

from __future__ import annotations

import numpy as np
import pytest

from shared.data.assigned import with_moments
from shared.data.moments import COUNT, SQUARES, SUM, find_mean_and_std, require_moments, sum_moments
from shared.data.spec import Data
from shared.errors import ConfigError, WireError
from tests.naming import naming


@pytest.mark.parametrize("shape", [(5,), (3, 8, 6), (4, 50)])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_federated_statistics_equal_the_central_ones(shape, offset):
    """To 1e-6, for devices of very unequal size and means."""
    generator = np.random.default_rng(1)
    scale = 10.0 ** generator.uniform(-3, 3, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    devices = [
        (generator.standard_normal((count, *shape)) * scale + offset * scale * number).astype(np.float32)
        for number, count in enumerate((1, 400, 37, 3000))
    ]
    pooled = np.concatenate(devices).astype(np.float64)
    axes = (0, *range(2, pooled.ndim))
    mean, std = find_mean_and_std(map(sum_moments, devices))
    np.testing.assert_allclose(mean, pooled.mean(axis=axes), rtol=1e-6, atol=1e-6 * pooled.std(axis=axes).min())
    np.testing.assert_allclose(std, pooled.std(axis=axes), rtol=1e-6)


def test_a_constant_channel_is_left_at_its_scale():
    inputs = np.full((1000, 2), 0.1, dtype=np.float32)
    inputs[:, 1] = np.arange(1000)
    mean, std = find_mean_and_std([sum_moments(inputs[:300]), sum_moments(inputs[300:])])
    assert std[0] == 1.0
    assert mean[0] == pytest.approx(np.float32(0.1))
    assert std[1] == pytest.approx(np.arange(1000).std())


@pytest.mark.parametrize(
    "sums",
    [
        {},
        {COUNT: [2.0], SUM: [1.0], SQUARES: []},
        {COUNT: [0.0], SUM: [1.0], SQUARES: [1.0]},
        {COUNT: [2.0], SUM: [np.nan], SQUARES: [1.0]},
        {COUNT: [2.0], SUM: [1.0], SQUARES: [-1.0]},
        {COUNT: [2.0], SUM: [10.0], SQUARES: [1.0]},
    ],
)
def test_sums_that_no_data_have_are_refused(sums):
    with pytest.raises(WireError) as error:
        require_moments(sums)
    assert error.value.reason == "sums"


def test_a_device_with_its_own_mean_takes_no_other():
    data = Data(source="digits", mean=(0.5,))
    assert with_moments(data, (), ()) is data
    assert with_moments(Data(source="digits", normalise="federated"), (0.1,), (2.0,)).std == (2.0,)
    with pytest.raises(ConfigError, match=naming("digits", "normalise")):
        with_moments(data, (0.1,), (2.0,))
    with pytest.raises(ValueError, match="normalise"):
        Data(source="digits", mean=(0.5,), normalise="federated")
