"""What of a device's word on its costs can be true."""

from __future__ import annotations

import math

from shared.protocol.measurements import Cost, Provenance

MAX_SOURCE = 64
MOST = 1e18
"""No task takes so many seconds, joules, cycles or bytes; and sums of them are numbers."""

_FIGURES = tuple(name for name in Cost.__struct_fields__ if name != "provenance")


def plausible(cost: Cost) -> Cost:
    """Return a cost without what cannot be true: figures below zero or beyond `MOST`, sources of figures it has not."""
    figures = {name: value for name in _FIGURES if _is_figure(value := getattr(cost, name))}
    provenance = {
        name: Provenance(source=one.source[:MAX_SOURCE], quality=one.quality, uncertainty=_share(one.uncertainty))
        for name, one in cost.provenance.items()
        if name in figures
    }
    return Cost(**figures, provenance=provenance)


def _is_figure(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and 0 <= value <= MOST


def _share(value: float | None) -> float | None:
    return value if value is not None and _is_figure(value) else None
