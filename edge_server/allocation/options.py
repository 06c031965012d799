"""Base classes of the options in the plan table `[optimizer]`."""

from __future__ import annotations

import math

from edge_server.plan.sections import Section


class Options(Section, frozen=True, kw_only=True):
    """Base class of optimizer options."""

    def require(self, *, below: float = math.inf, **figures: float | None) -> None:
        """Reject figures that are not above 0 and at most `below`; None is accepted."""
        for name, figure in figures.items():
            if figure is not None and not (0 < figure <= below and math.isfinite(figure)):
                most = "finite" if below == math.inf else f"<= {below:g}"
                raise ValueError(f"options.{name} must be > 0 and {most}")


class MeasuringOptions(Options, frozen=True, kw_only=True):
    """Options of optimizers that use measurements.

    Attributes:
        deadline_s: Time limit of a task; T_th in arXiv 2309.01816. Absent: the deadline of `[round]`.
        smoothing: Weight of the last figure against a new measurement; 0 uses each measurement unchanged.
        jump: Largest factor by which a figure may change in one round; larger changes take several rounds.
        calibrated: Whether predictions are corrected by the errors of earlier ones.
        up_bits_per_s: Assumed uplink of a device without measurement.
        down_bits_per_s: Assumed downlink of a device without measurement.
    """

    deadline_s: float | None = None
    smoothing: float = 0.0
    jump: float = 8.0
    calibrated: bool = True
    up_bits_per_s: float = 1e6
    down_bits_per_s: float = 1e7

    def __post_init__(self) -> None:
        self.require(deadline_s=self.deadline_s)
        self.require(up_bits_per_s=self.up_bits_per_s, down_bits_per_s=self.down_bits_per_s)
        if not 0 <= self.smoothing < 1 or not 1 < self.jump < math.inf:
            raise ValueError("options.smoothing must be in [0, 1), options.jump > 1 and finite")


def parse_ratios(text: str) -> list[float]:
    """Parse comma-separated ratios.

    Raises:
        ValueError: One is not a number in (0, 1].
    """
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise ValueError('options.keep must be comma-separated ratios in (0, 1], such as "0.2,0.6,1"')
    return ratios
