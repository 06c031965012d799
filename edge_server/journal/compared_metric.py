"""Metric by which the models of a run are compared: name, direction, format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shared.protocol.objective import LOSS


class ComparedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """Metric of a run, as its record names it.

    Attributes:
        name: Of the metric; `loss` for the loss.
        direction: Whether larger or smaller values are better.
    """

    name: str = "accuracy"
    direction: Literal["max", "min"] = "max"

    def rank(self, value: float) -> float:
        """Return a number that is larger for better values."""
        return value if self.direction == "max" else -value

    def reaches(self, value: float, target: float) -> bool:
        """Check whether a value is at least as good as a target."""
        return self.rank(value) >= self.rank(target)

    def value_of(
        self,
        metrics: Mapping[str, float] | msgspec.UnsetType,
        *,
        accuracy: float | None,
        loss: float | None = None,
    ) -> float | None:
        """Return its value among those of a record; None if the record has none.

        Args:
            metrics: By name; unset in runs that are compared by the accuracy.
            accuracy: None unless the task is a classification.
        """
        measured: Mapping[str, float] = {} if metrics is msgspec.UNSET else metrics
        if self.name in measured:
            return measured[self.name]
        return {"accuracy": accuracy, LOSS: loss}.get(self.name)

    def format(self, value: float | None) -> str:
        """Return a value for a line of text: an accuracy with four decimals, others with four digits; `-` for None."""
        if value is None:
            return "-"
        return f"{value:.4f}" if self == ACCURACY else f"{value:.4g}"


ACCURACY = ComparedMetric()
"""Metric of runs that record none: classifications without a table `[task]`, and runs of versions before it."""
