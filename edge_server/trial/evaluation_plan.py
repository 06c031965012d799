"""What a run looks at beside its training."""

from __future__ import annotations

from edge_server.trial.section import Section

MAX_MEASURE_S = 600.0


class EvaluationPlan(Section, frozen=True, kw_only=True):
    """When the model is evaluated: every n-th round on the server (0 never), and on the devices' held-out examples."""

    every: int = 1
    on_device: bool = False

    def __post_init__(self) -> None:
        """Refuse a step backwards."""
        if self.every < 0:
            raise ValueError("every must be >= 0")


class MeasurePlan(Section, frozen=True, kw_only=True):
    """What is measured on the devices before the first round.

    Attributes:
        seconds: Of training steps that every device times; 0 to measure nothing. Two give a sensor of 5 Hz ten samples.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a measurement that has no end."""
        if not 0 <= self.seconds <= MAX_MEASURE_S:
            raise ValueError(f"seconds must be 0 to {MAX_MEASURE_S:g}")
