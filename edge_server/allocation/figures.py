"""Choose each device figure: plausible measurement, last good, plan's, or default.

Reported figures are not trusted. An implausible figure is ignored. One that differs from the last good figure by
more than a factor `jump` moves it by that factor only, and must be reported again to move it further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.decision import Figure
from shared.protocol.plausible import is_plausible


@dataclass(frozen=True)
class Estimate:
    """Candidate values of one figure.

    Attributes:
        measured: None if not measured.
        is_stale: Whether the measurement is too old.
        profile: Value from the plan.
        default: Used if nothing else is known; None for a figure that may be absent.
    """

    measured: float | None = None
    is_stale: bool = False
    profile: float | None = None
    default: float | None = None


def choose_figure(
    name: str, estimate: Estimate, last: Figure | None, *, jump: float, smoothing: float
) -> Figure | None:
    """Choose the figure to use; None if nothing is known and there is no default.

    Args:
        last: Figure of the previous decision.
        jump: Largest factor between a measurement and the last good figure.
        smoothing: Weight of the last good figure, in [0, 1).
    """
    good = last if last and last.source in ("measured", "last_good") else None
    if (now := _plausible_value(name, estimate.measured)) is not None:
        if estimate.is_stale:
            return Figure(good.value if good else now, "last_good")
        if good and good.value > 0:
            now = (1 - smoothing) * min(max(now, good.value / jump), good.value * jump) + smoothing * good.value
        return Figure(now, "measured")
    if good:
        return Figure(good.value, "last_good")
    if (planned := _plausible_value(name, estimate.profile)) is not None:
        return Figure(planned, "profile")
    return None if estimate.default is None else Figure(estimate.default, "default")


def _plausible_value(name: str, value: float | None) -> float | None:
    return value if is_plausible(name, value) else None


def choose_figures(
    estimates: Mapping[str, Estimate], last: Mapping[str, Figure], options: MeasuringOptions
) -> dict[str, Figure]:
    """Choose the figures to use, by name; unknown ones are left out."""
    figures = {}
    for name, estimate in estimates.items():
        is_error = name.endswith("_error")  # already smoothed, and not bound to an earlier round
        smoothing = 0.0 if is_error else options.smoothing
        figure = choose_figure(
            name, estimate, None if is_error else last.get(name), jump=options.jump, smoothing=smoothing
        )
        if figure:
            figures[name] = figure
    return figures
