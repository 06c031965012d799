"""Base classes of the options in the plan table `[optimizer]`."""

from __future__ import annotations

import math

from edge_server.plan.sections import Section


class Options(Section, frozen=True, kw_only=True):
    """Base of the options of each optimizer."""

    def require(self, *, below: float = math.inf, **figures: float | None) -> None:
        """Refuse figures that are not above 0 and at most `below`; None is none."""
        for name, figure in figures.items():
            if figure is not None and not (0 < figure <= below and math.isfinite(figure)):
                most = "finite" if below == math.inf else f"<= {below:g}"
                raise ValueError(f"options.{name} must be > 0 and {most}")


class MeasuringOptions(Options, frozen=True, kw_only=True):
    """What optimizers that decide from measurements have in common.

    Attributes:
        deadline_s: Time within which a task is to be done; T_th of paper 004. Absent: the deadline of `[round]`.
        smoothing: Weight of the last figure beside a new measurement; 0 takes each as it is.
        jump: By how much a measurement may differ from the last good one in one round; the rest waits for the next.
        stale_s: Age after which a reading is the last good one and no measurement.
        calibrated: Whether predictions are put right by the errors of earlier ones.
        up_bits_per_s: Uplink of a device that has measured nothing.
        down_bits_per_s: Downlink of a device that has measured nothing.
    """

    deadline_s: float | None = None
    smoothing: float = 0.0
    jump: float = 8.0
    stale_s: float = 3600.0
    calibrated: bool = True
    up_bits_per_s: float = 1e6
    down_bits_per_s: float = 1e7

    def __post_init__(self) -> None:
        self.require(deadline_s=self.deadline_s, stale_s=self.stale_s)
        self.require(up_bits_per_s=self.up_bits_per_s, down_bits_per_s=self.down_bits_per_s)
        if not 0 <= self.smoothing < 1 or not 1 < self.jump < math.inf:
            raise ValueError("options.smoothing must be in [0, 1), options.jump > 1 and finite")


def parse_ratios(text: str) -> list[float]:
    """Return the numbers of a text with commas between them.

    Raises:
        ValueError: One is none, or not in (0, 1].
    """
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = []
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise ValueError('options.keep must be ratios in (0, 1] with commas between, such as "0.2,0.6,1"')
    return ratios
