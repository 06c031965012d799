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
        on_device: Whether devices evaluate on their held-out examples: the devices of each round, and all of them after
            the last round.
        devices_every: All connected devices evaluate after every n-th round and the last; 0: never. With a method that
            trains personal models, each device evaluates its personal model. A split network is sent whole for this,
            including its top. With a method that trains without labels, only this key makes devices read the labels of
            their held-out examples, and they report only accuracy, loss and count.
        runtime: Runtime of tasks that only evaluate: `torch`, in the trainer; or `onnx`, ONNX Runtime without torch,
            which takes a quarter of the memory with a small network. Each device gets the graph once; the accuracy is
            the same to within one example. Not for methods with personal models. Absent: `torch`.
        statistics_batches: For networks with BatchNorm: number of batches over which running statistics are measured
            again, without training, before an evaluation and after the last round; over all devices of the round if the
            server evaluates, on each device if it evaluates a personal model. 0: the statistics of training are used;
            absent: 16.
        keep: Model that stays on disk in addition to the last ones: `best`, the most accurate on the server's test
            data; or `last`, no other.
    """

    every: int = 1
    on_device: bool = False
    devices_every: int = 0
    runtime: Literal["torch", "onnx"] | msgspec.UnsetType = msgspec.UNSET
    statistics_batches: int | msgspec.UnsetType = msgspec.UNSET  # UNSET: not written to records, as in older versions
    keep: Literal["best", "last"] = "best"

    def __post_init__(self) -> None:
        """Reject negative values."""
        if self.every < 0 or self.devices_every < 0 or self.measured_batches < 0:
            raise ValueError("statistics_batches, every and devices_every must be >= 0")

    @property
    def measured_batches(self) -> int:
        """Batches over which running statistics are measured; 0 in runs of versions without the key."""
        return self.statistics_batches if isinstance(self.statistics_batches, int) else 0

    def number(self, rounds: int, after: int) -> int:
        """Return the task number of the evaluation on all devices after a round, above all of `rounds`."""
        return rounds + 1 + (after if self.devices_every else 0)


class MeasurePlan(Section, frozen=True, kw_only=True):
    """Measurement on the devices before the first round.

    Attributes:
        seconds: Time for which every device times training steps; 0: no measurement. A 5 Hz sensor takes ten samples in
            two seconds.
    """

    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Reject a negative or excessive duration."""
        if not 0 <= self.seconds <= MAX_MEASURE_S:
            raise ValueError(f"seconds must be 0 to {MAX_MEASURE_S:g}")
