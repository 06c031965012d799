"""Plan tables `[evaluation]` and `[measure]`."""

from __future__ import annotations

from typing import Literal

import msgspec

from edge_server.plan.sections import Section

MAX_MEASURE_S = 600.0


class EvaluationPlan(Section, frozen=True, kw_only=True):
    """When models are evaluated.

    Attributes:
        every: The server evaluates on its test data after every n-th round and the last; 0: never.
        on_device: Whether devices evaluate on their held-out examples: those of each round, and after the last round.
        devices_every: All connected devices evaluate after every n-th round and the last; 0: never. With a method that
            gives devices models of their own, each evaluates its own. A split network goes down whole for it, its top
            too. With a method that trains without labels this alone has devices that have some read them, of what they
            hold back, and only accuracy, loss and count go up.
        runtime: What devices compute it with where a task of theirs is to evaluate alone: `torch`, in the trainer; or
            `onnx`, ONNX Runtime, without torch: of a small network in a quarter of the memory. The graph goes to each
            device once; the accuracy is the same within an example. Not for methods that give devices models of their
            own. Absent: `torch`.
        statistics_batches: Of a network with BatchNorm: batches over which running statistics are measured anew,
            without training, before it is evaluated and after the last round; of all devices of the round together
            where the server evaluates, of each device where it evaluates a model of its own. 0: those that training
            left are used; absent: 16.
        keep: Which model stays on disk beside the last ones: `best`, the most accurate on the server's test data; or
            `last`, no other.
    """

    every: int = 1
    on_device: bool = False
    devices_every: int = 0
    runtime: Literal["torch", "onnx"] | msgspec.UnsetType = msgspec.UNSET  # likewise
    statistics_batches: int | msgspec.UnsetType = msgspec.UNSET  # records of plans without it are those of before
    keep: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        """Refuse a step backwards."""
        if self.every < 0 or self.devices_every < 0 or self.measured_batches < 0:
            raise ValueError("statistics_batches, every and devices_every must be >= 0")

    @property
    def measured_batches(self) -> int:
        """Batches over which running statistics are measured; 0: they are not, as in runs of before."""
        return self.statistics_batches if isinstance(self.statistics_batches, int) else 0

    def number(self, rounds: int, after: int) -> int:
        """Return the number of the tasks by which all devices evaluate after a round; it is beyond all `rounds`."""
        return rounds + 1 + (after if self.devices_every else 0)


class MeasurePlan(Section, frozen=True, kw_only=True):
    """What is measured on the devices before the first round.

    Attributes:
        seconds: Time for which every device times training steps; 0: nothing is measured. Two seconds give a sensor of
            5 Hz ten samples.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a measurement that has no end."""
        if not 0 <= self.seconds <= MAX_MEASURE_S:
            raise ValueError(f"seconds must be 0 to {MAX_MEASURE_S:g}")
