"""Fit a board's power model by least squares: watts over busy cores, clock and traffic.

The model is that of `device_agent.profile.schema.PowerModel`. Given the exponent it is linear in all else; the exponent
is searched for, and only where more than one clock was seen.
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
"""Clocks that differ by a smaller share tell nothing of the exponent."""
BUSY_CORES = 0.1
"""Fewer are none."""
SINGULAR = 3e-5
"""Least share of a direction of the figures in their widest one that is more than noise."""
HEADROOM = 1.1

Fit = TypeVar("Fit", PowerModel, SensorLine)


@dataclass(frozen=True)
class Observation:
    """Means over some seconds, observed together.

    Attributes:
        busy_cores: Mean number of cores that computed.
        sending: Share of the link's full rate.
        sensed_w: By the board's own sensor, where it has one.
    """

    watts: float
    busy_cores: float
    hertz: float
    sending: float = 0.0
    receiving: float = 0.0
    sensed_w: float | None = None


@dataclass(frozen=True)
class Quality:
    """Goodness of a fit: root mean square of its residuals, as watts and as a share of the mean; R squared."""

    residual_w: float
    residual_ratio: float
    r_squared: float


def fit_model(seen: Sequence[Observation], cores: int) -> tuple[PowerModel, Quality]:
    """Return the power model that leaves the least.

    Args:
        seen: At several loads; at several clocks where they can be set.
        cores: How many the board has; a model is clamped to what all of them can take.

    Raises:
        NoData: What was seen makes no model; says why.
    """
    most = max((one.busy_cores for one in seen), default=0.0)
    busy = [one.hertz for one in seen if one.busy_cores >= most / 2]
    if most < BUSY_CORES:
        raise NoData("no core was ever busy: there is nothing to fit to", lack="invalid")
    max_hertz = max(busy)
    exponents = EXPONENTS if min(busy) < (1 - SAME_CLOCK) * max_hertz else (USUAL_EXPONENT,)
    watts = [one.watts for one in seen]
    radio = [name for name in ("sending", "receiving") if any(getattr(one, name) > 0 for one in seen)]

    def rows(exponent: float) -> list[list[float]]:
        return [
            [1.0, one.busy_cores * (one.hertz / max_hertz) ** exponent, *(getattr(one, name) for name in radio)]
            for one in seen
        ]

    exponent = min(exponents, key=lambda tried: _squares_left(rows(tried), watts, least_squares(rows(tried), watts)))
    coefficients = least_squares(rows(exponent), watts)
    quality = judge(watts, predict(rows(exponent), coefficients))
    idle_w, core_w, *rest = coefficients
    if idle_w <= 0 or core_w <= 0:
        raise NoData(f"the fit says {idle_w:.2f} W idle and {core_w:.2f} W a core, which cannot be", lack="invalid")
    extra = dict(zip(radio, (max(0.0, one) for one in rest), strict=True))
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


def fit_line(seen: Sequence[Observation]) -> tuple[SensorLine, Quality]:
    """Return the line from what the board's own sensor sees to what the meter sees.

    Raises:
        NoData: What was seen makes no line; says why.
    """
    both = [(one.sensed_w, one.watts) for one in seen if one.sensed_w is not None]
    rows, watts = [[sensed, 1.0] for sensed, _ in both], [watts for _, watts in both]
    gain, offset_w = least_squares(rows, watts)
    quality = judge(watts, predict(rows, [gain, offset_w]))
    if gain <= 0:
        raise NoData(f"the meter falls when the board's own sensor rises (gain {gain:.2f})", lack="invalid")
    return SensorLine(gain=gain, offset_w=offset_w, uncertainty=quality.residual_ratio), quality


def add_meter_error(fit: Fit, meter: PowerSource) -> Fit:
    """Return a fit whose uncertainty includes the meter's own: an error that all its samples share stays in the fit."""
    share = math.hypot(fit.uncertainty, meter.provenance.uncertainty or 0.0)
    return msgspec.structs.replace(fit, uncertainty=share, uncertainty_w=meter.uncertainty_w)


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the x that leaves the least of `rows x = values`.

    Raises:
        NoData: The rows do not tell their columns apart.
    """
    import numpy as np  # noqa: PLC0415 - the agent, which imports what lies beside this, loads none

    if not rows:
        raise NoData("nothing was seen", lack="busy")
    matrix = np.asarray(rows, dtype=np.float64)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, np.asarray(values, dtype=np.float64), rcond=SINGULAR)
    if rank < matrix.shape[1]:
        raise NoData("the load hardly changed: there is nothing to fit to", lack="invalid")
    return [float(one) for one in solution / scale]


def predict(rows: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    """Return `rows x`."""
    return [math.fsum(one * other for one, other in zip(row, coefficients, strict=True)) for row in rows]


def judge(values: Sequence[float], fitted: Sequence[float]) -> Quality:
    """Compute the goodness of a fit.

    Raises:
        NoData: It explains less than nine tenths of what changed.
    """
    mean = math.fsum(values) / len(values)
    left = math.fsum((value - one) ** 2 for value, one in zip(values, fitted, strict=True))
    whole = math.fsum((value - mean) ** 2 for value in values)
    r_squared = 1 - left / whole if whole > 0 else 0.0
    if r_squared < MIN_R_SQUARED:
        raise NoData(
            f"the fit explains {r_squared:.0%} of what the meter saw, less than {MIN_R_SQUARED:.0%}: end what else "
            "runs on this board, see that the meter feeds it alone, or calibrate for longer",
            lack="invalid",
        )
    residual_w = math.sqrt(left / len(values))
    return Quality(residual_w, residual_w / mean, r_squared)


def _squares_left(rows: Sequence[Sequence[float]], values: Sequence[float], coefficients: Sequence[float]) -> float:
    return math.fsum((value - one) ** 2 for value, one in zip(values, predict(rows, coefficients), strict=True))
