"""The fit of a power model: recovers what made the figures, and refuses what makes no model."""

from __future__ import annotations

from random import Random

import pytest

from device_agent.measurement.power_fit import (
    MIN_R_SQUARED,
    Observation,
    fit_power_model,
    fit_sensor_line,
    least_squares,
)
from device_agent.probes.power.model import compute_watts
from device_agent.profile.schema import PowerModel
from shared.errors import NoData
from tests.naming import naming

TRUE = PowerModel(idle_w=2.7, max_w=20.0, core_joules_per_cycle=5e-10, max_hertz=2.4e9, exponent=1.8)
CLOCKS = (1.5e9, 1.95e9, 2.4e9)


def board(
    noise_w: float = 0.0, clocks: tuple[float, ...] = CLOCKS, tx_w: float = 0.0, seed: int = 1
) -> list[Observation]:
    """Return what would be seen of four cores at rest and at 1, 2 and 4 threads."""
    random, made = Random(seed), TRUE
    seen = [(0.05, clocks[0], 0.0)] * 3 + [(n, f, 0.0) for f in clocks for n in (1.0, 1.9, 3.8) for _ in range(3)]
    seen += [(0.2, clocks[0], 1.0)] * 2 if tx_w else []
    return [
        Observation(compute_watts(made, busy_cores=n, hertz=f) + tx_w * up + random.gauss(0, noise_w), n, f, sending=up)
        for n, f, up in seen
    ]


def test_without_noise_the_parameters_are_those_that_made_it():
    model, quality = fit_power_model(board(), cores=4)
    assert model.idle_w == pytest.approx(TRUE.idle_w, rel=1e-3)
    assert model.core_joules_per_cycle == pytest.approx(TRUE.core_joules_per_cycle, rel=1e-3)
    assert (model.exponent, model.max_hertz) == (pytest.approx(1.8), 2.4e9)
    assert quality.r_squared == pytest.approx(1.0)
    assert model.max_w == pytest.approx(1.1 * (2.7 + 4 * 1.2), rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_with_noise_the_residual_is_the_noise_and_is_what_the_model_carries(seed):
    """0.1 W of noise on 2.7 to 7.3 W: parameters within a few percent, the residual near 0.1 W."""
    model, quality = fit_power_model(board(noise_w=0.1, seed=seed), cores=4)
    assert model.idle_w == pytest.approx(TRUE.idle_w, rel=0.08)
    assert model.core_joules_per_cycle == pytest.approx(TRUE.core_joules_per_cycle, rel=0.08)
    assert model.exponent == pytest.approx(1.8, abs=0.35)
    assert 0.05 < quality.residual_w < 0.15
    assert model.uncertainty == pytest.approx(quality.residual_ratio)


def test_at_one_clock_the_exponent_is_the_usual_one():
    """Nothing was seen that could tell it; idle and busy watts are right all the same."""
    model, _ = fit_power_model(board(clocks=(2.4e9,)), cores=4)
    assert model.exponent == 1.7
    assert model.core_joules_per_cycle == pytest.approx(TRUE.core_joules_per_cycle, rel=1e-6)


def test_what_sending_takes_is_found_where_something_was_sent():
    model, _ = fit_power_model(board(tx_w=0.8), cores=4)
    assert (model.tx_w, model.rx_w) == (pytest.approx(0.8, rel=0.01), 0.0)


def test_figures_that_make_no_model_are_refused_with_the_reason():
    """Noise as large as the load, a load that never was, watts that fall with the load, and nothing at all."""
    with pytest.raises(NoData, match=f"{MIN_R_SQUARED:.0%}"):
        fit_power_model(board(noise_w=3.0), cores=4)
    with pytest.raises(NoData, match="core"):
        fit_power_model([Observation(3.0, 0.02, 1e9), Observation(3.0, 0.03, 1e9)], cores=4)
    with pytest.raises(NoData, match=naming("-1.00 W")):
        fit_power_model([Observation(9.0 - n, float(n), 1e9) for n in range(4)], cores=4)
    with pytest.raises(NoData, match="load"):
        fit_power_model([Observation(3.0, 2.0, 1e9)] * 5, cores=4)
    with pytest.raises(NoData, match="core"):
        fit_power_model([], cores=4)


def test_the_line_of_a_sensor_that_sees_a_part_is_found():
    """The meter reads 1.1451 times what the sensor says and 0.5879 W: both are found, the residual is nothing."""
    seen = [Observation(1.1451 * w + 0.5879, 1.0, 1e9, sensed_w=w) for w in (2.7, 3.9, 5.1, 7.2)] + [
        Observation(9.0, 1.0, 1e9)
    ]
    line, quality = fit_sensor_line(seen)
    assert (line.gain, line.offset_w) == (pytest.approx(1.1451), pytest.approx(0.5879))
    assert quality.residual_w == pytest.approx(0.0, abs=1e-9)


def test_a_meter_that_feeds_something_else_makes_no_line():
    random = Random(3)
    with pytest.raises(NoData, match=f"{MIN_R_SQUARED:.0%}"):
        fit_sensor_line([Observation(random.uniform(3, 9), 1.0, 1e9, sensed_w=random.uniform(3, 9)) for _ in range(20)])
    with pytest.raises(NoData, match=naming("-1.00")):
        fit_sensor_line([Observation(9.0 - w, 1.0, 1e9, sensed_w=w) for w in (2.0, 3.0, 4.0)])


def test_least_squares_is_the_normal_equations():
    """y = 1, 2, 4 at x = 0, 1, 2: slope 3/2, intercept 5/6."""
    assert least_squares([[0, 1], [1, 1], [2, 1]], [1, 2, 4]) == pytest.approx([1.5, 5 / 6])
