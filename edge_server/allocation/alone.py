"""What each device would keep if its own figures alone were others, and all else as it is: bandwidth, for each at once.

Deciding once more for every device takes time that grows with the square of the fleet. What the others would do is
known beforehand, though: how much of the uplink they take at every level of the water. That is exact but for marks, of
which only a device's own follow what it keeps. Of few devices those of the others matter; then all is decided again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_server.allocation.bandwidth import (
    CLOSE,
    TURNS,
    Asked,
    asked_for,
    kept_at_equal_shares,
    solved,
    with_marks,
)
from edge_server.allocation.case import Case
from edge_server.allocation.optimizers.bandwidth import Bandwidth, Terms, allocation, ramps, terms
from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.refilling import refill
from edge_server.plan.optimizer import BandwidthOptions

FEW = 24


def kept_alone(options: BandwidthOptions, case: Case, changed: Case) -> dict[str, float]:
    """Return for each device the share of the shared weights that it would keep with its figures of another case.

    Args:
        options: Of the optimizer.
        case: What was decided from.
        changed: The same devices and limits; the figures that each of them would have.
    """
    if not case.names:
        return {}
    other = asked_for(options, changed)
    if options.equal == "latency":
        return _named(case, kept_at_equal_shares(options, changed, other)[0])
    if options.marks and len(case.names) <= FEW:
        return {device: _again(options, case, changed, place) for place, device in enumerate(case.names)}
    asked, _ = solved(options, "numpy", case, asked_for(options, case))
    return _named(case, _kept(options, changed, asked, other))


def _again(options: BandwidthOptions, case: Case, changed: Case, place: int) -> float:
    """Return what one device would keep, by deciding once more."""
    device = case.names[place]
    case = replace(case, figures={**case.figures, device: changed.figures.get(device, {})})
    _, shares = solved(options, "numpy", case, asked_for(options, case))
    return 1 - float(shares.pruned[place])


def _kept(options: BandwidthOptions, changed: Case, asked: Asked, other: Asked) -> Array:
    given = terms(asked.problem)
    others, bits, before = ramps(given), np.asarray(asked.problem.upload_bits), np.full(len(asked.rate), np.nan)
    for _ in range(1 + TURNS * options.marks):
        moved = _with_floors(given, replace(other.problem, upload_bits=bits))
        kept: Array = 1 - allocation(moved, refill(others, ramps(moved), 1.0), 0.0).pruned
        if np.abs(kept - before).max() < CLOSE:
            break
        bits, before = with_marks(options, changed, kept), kept
    return kept


def _with_floors(given: Terms, problem: Bandwidth) -> Terms:
    """Return the terms of each device's other figures, with its floor where those of the others leave room for it."""
    moved = terms(problem)
    fits = given.floor.sum() - given.floor + moved.wanted <= 1.0
    is_easier = (moved.wanted < given.wanted) | (given.wanted == 0)
    has_floor = (given.floor > 0) | (is_easier & fits)
    return replace(moved, floor=np.where(has_floor, moved.wanted, 0.0))


def _named(case: Case, kept: Array) -> dict[str, float]:
    return dict(zip(case.names, kept.tolist(), strict=True))
