"""What a run looks at beside its training."""

from __future__ import annotations

from edge_server.plan.sections import Section

MAX_MEASURE_S = 600.0


class EvaluationPlan(Section, frozen=True, kw_only=True):
    """When models are evaluated.

    Attributes:
        every: On the server's test data, after every n-th round and the last; 0 never.
        on_device: On the devices' held-out examples: by the devices of each round, and after the last round.
        devices_every: Likewise by all devices that are there, each of them, after every n-th round and the last; 0 for
            what `on_device` says. Of a personal method, each tries its own model.
    """

    every: int = 1
    on_device: bool = False
    devices_every: int = 0

    def __post_init__(self) -> None:
        """Refuse a step backwards."""
        if self.every < 0 or self.devices_every < 0:
            raise ValueError("every and devices_every must be >= 0")

    def number(self, rounds: int, after: int) -> int:
        """Return the number of the tasks by which all devices evaluate after a round; it is beyond all `rounds`."""
        return rounds + 1 + (after if self.devices_every else 0)


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
