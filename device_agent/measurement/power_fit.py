"""Fit a board's power model by least squares.

The model is `device_agent.profile.schema.PowerModel`: watts over busy cores, clock and traffic. It is linear for a
given exponent, which is searched on a grid if more than one clock was observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from device_agent.measurement.calibration_file import SensorLine
from device_agent.probes.power.source import PowerSource
from device_agent.profile.schema import PowerModel
from shared.errors import NoData

MIN_R_SQUARED = 0.9
EXPONENTS = tuple(0.5 + 0.05 * step for step in range(61))
USUAL_EXPONENT = 1.7
SAME_CLOCK = 0.05
"""Clocks that differ by less than this fraction do not determine the exponent."""
BUSY_CORES = 0.1
"""Fewer busy cores count as idle."""
SINGULAR = 3e-5
"""Singular values below this fraction of the largest are treated as noise."""
HEADROOM = 1.1

Fit = TypeVar("Fit", PowerModel, SensorLine)


@dataclass(frozen=True)
class Observation:
    """Means over one window of a few seconds.

    Attributes:
        sending: Fraction of the link's full rate, as is `receiving`.
        sensed_w: Reading of the board's own sensor; None without one.
    """

    watts: float
    busy_cores: float
    hertz: float
    sending: float = 0.0
    receiving: float = 0.0
    sensed_w: float | None = None


@dataclass(frozen=True)
class FitQuality:
    """Goodness of a fit: root mean square of the residuals, in watts and relative to the mean, and R squared."""

    residual_w: float
    residual_ratio: float
    r_squared: float


def fit_power_model(observations: Sequence[Observation], cores: int) -> tuple[PowerModel, FitQuality]:
    """Fit the power model with the smallest residuals.

    Args:
        observations: At several loads, and at several clocks if these can be set.
        cores: Number of cores; the model is clamped to the power of all of them.

    Raises:
        NoData: The observations do not determine a valid model; the message says why.
    """
    most = max((window.busy_cores for window in observations), default=0.0)
    busy = [window.hertz for window in observations if window.busy_cores >= most / 2]
    if most < BUSY_CORES:
        raise NoData("no core was busy: a fit needs load", lack="invalid")
    max_hertz = max(busy)
    exponents = EXPONENTS if min(busy) < (1 - SAME_CLOCK) * max_hertz else (USUAL_EXPONENT,)
    watts = [window.watts for window in observations]
    radio = [name for name in ("sending", "receiving") if any(getattr(window, name) > 0 for window in observations)]

    def rows(exponent: float) -> list[list[float]]:
        return [
            [
                1.0,
                window.busy_cores * (window.hertz / max_hertz) ** exponent,
                *(getattr(window, name) for name in radio),
            ]
            for window in observations
        ]

    exponent = min(exponents, key=lambda tried: _sum_squares(rows(tried), watts, least_squares(rows(tried), watts)))
    coefficients = least_squares(rows(exponent), watts)
    quality = assess_fit(watts, predict(rows(exponent), coefficients))
    idle_w, core_w, *radio_w = coefficients
    if idle_w <= 0 or core_w <= 0:
        raise NoData(f"impossible fit: {idle_w:.2f} W idle and {core_w:.2f} W per core", lack="invalid")
    extra = dict(zip(radio, (max(0.0, value) for value in radio_w), strict=True))
    model = PowerModel(
        idle_w=idle_w,
        max_w=HEADROOM * max(*watts, idle_w + cores * core_w + sum(extra.values())),
        core_joules_per_cycle=core_w / max_hertz,
        max_hertz=max_hertz,
        exponent=exponent,
        tx_w=extra.get("sending", 0.0),
        rx_w=extra.get("receiving", 0.0),
        uncertainty=quality.residual_ratio,
    )
    return model, quality


def fit_sensor_line(observations: Sequence[Observation]) -> tuple[SensorLine, FitQuality]:
    """Fit the line from the board's own sensor to the meter.

    Raises:
        NoData: The observations do not determine a valid line; the message says why.
    """
    both = [(window.sensed_w, window.watts) for window in observations if window.sensed_w is not None]
    rows, watts = [[sensed, 1.0] for sensed, _ in both], [watts for _, watts in both]
    gain, offset_w = least_squares(rows, watts)
    quality = assess_fit(watts, predict(rows, [gain, offset_w]))
    if gain <= 0:
        raise NoData(f"the meter falls when the board's own sensor rises (gain {gain:.2f})", lack="invalid")
    return SensorLine(gain=gain, offset_w=offset_w, uncertainty=quality.residual_ratio), quality


def add_meter_uncertainty(fit: Fit, meter: PowerSource) -> Fit:
    """Add the meter's own uncertainty to a fit: an error common to all samples stays in the fit."""
    share = math.hypot(fit.uncertainty, meter.provenance.uncertainty or 0.0)
    return msgspec.structs.replace(fit, uncertainty=share, uncertainty_w=meter.uncertainty_w)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the least-squares solution x of `rows x = values`.

    Raises:
        NoData: The columns are linearly dependent.
    """
    import numpy as np  # noqa: PLC0415 - the agent imports this module and must stay small

    if not rows:
        raise NoData("there are no observations", lack="busy")
    matrix = np.asarray(rows, dtype=np.float64)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, np.asarray(values, dtype=np.float64), rcond=SINGULAR)
    if rank < matrix.shape[1]:
        raise NoData("the load hardly changed: a fit needs different loads", lack="invalid")
    return [float(value) for value in solution / scale]


def predict(rows: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    """Return the matrix product `rows x`."""
    return [math.fsum(value * factor for value, factor in zip(row, coefficients, strict=True)) for row in rows]


def assess_fit(values: Sequence[float], predictions: Sequence[float]) -> FitQuality:
    """Return the goodness of a fit.

    Raises:
        NoData: R squared is below `MIN_R_SQUARED`.
    """
    mean = math.fsum(values) / len(values)
    residual = math.fsum((value - prediction) ** 2 for value, prediction in zip(values, predictions, strict=True))
    total = math.fsum((value - mean) ** 2 for value in values)
    r_squared = 1 - residual / total if total > 0 else 0.0
    if r_squared < MIN_R_SQUARED:
        raise NoData(
            f"the fit explains {r_squared:.0%} of the measured variance, less than {MIN_R_SQUARED:.0%}: stop other "
            "programs on this board, connect nothing else to the meter, or calibrate for longer",
            lack="invalid",
        )
    residual_w = math.sqrt(residual / len(values))
    return FitQuality(residual_w, residual_w / mean, r_squared)


def _sum_squares(rows: Sequence[Sequence[float]], values: Sequence[float], coefficients: Sequence[float]) -> float:
    return math.fsum(
        (value - prediction) ** 2 for value, prediction in zip(values, predict(rows, coefficients), strict=True)
    )
