"""Result of an evaluation on a device's held-out examples, as its update carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "eval_"
"""Prefix of metrics of held-out examples among those of an update."""


@dataclass(frozen=True)
class HeldOutScore:
    """Metrics of an update, and the sums behind them.

    Attributes:
        metrics: `eval_loss`, `eval_examples`, `eval_accuracy` of a classification, and the objective's other metrics.
        sums: Sums of the objective's metrics, which add over devices; empty for the default objective.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, list[float]] = field(default_factory=dict)


def build_score(
    *,
    examples: int,
    loss: float | None,
    accuracy: float | None,
    metrics: Mapping[str, float],
    sums: Mapping[str, list[float]],
) -> HeldOutScore:
    """Return the score under the names of an update's metrics; figures that are None are left out."""
    figures = {"accuracy": accuracy, "loss": loss, "examples": float(examples)}
    own_figures = {f"{PREFIX}{name}": value for name, value in figures.items() if value is not None}
    return HeldOutScore({f"{PREFIX}{name}": value for name, value in metrics.items()} | own_figures, dict(sums))
