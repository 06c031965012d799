"""What-if of `bandwidth`: what each device would keep with other figures.

Deciding again for every device would take time quadratic in the fleet size. The shares of the other devices at every
water level are known already, so `refill` moves one ramp at a time. This is exact except for marks: it updates only
those of the changed device. In small fleets the marks of the others matter, and the whole case is decided again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from edge_server.allocation.allocators.bandwidth_decision import (
    Columns,
    decide,
    round_columns,
    solve_columns,
    task_joules,
)
from edge_server.allocation.allocators.bandwidth_figures import BandwidthOptions
from edge_server.allocation.allocators.bandwidth_joules import hold_to_joules
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth import allocation, ramps
from edge_server.allocation.optimizers.bandwidth_marks import CLOSE, TURNS, Upload
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, BandwidthTerms, terms
from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.refilling import refill
from edge_server.journal.decision import keep_ratio

FEW = 24


def kept_alone(options: BandwidthOptions, case: Case, changed: Case) -> dict[str, float]:
    """Return for each device the share of the shared weights that it would keep with its figures of another case.

    Args:
        case: What was decided from.
        changed: The same devices and limits; the figures that each of them would have.
    """
    if not case.names:
        return {}
    other = round_columns(options, changed)
    if options.equal == "latency":  # nobody's figures are another's
        return {device: keep_ratio(one.values) for device, one in decide(options, "numpy", changed).devices.items()}
    if options.marks and len(case.names) <= FEW:
        return {device: _decided_again(options, case, changed, place) for place, device in enumerate(case.names)}
    asked, shares = solve_columns(options, "numpy", case, round_columns(options, case))
    kept = _refilled(options.upload(changed.limits), asked, other)
    if most := case.limits.get("joules"):  # at the share that each has
        spent, alone = partial(task_joules, options, changed, other, shares), replace(shares, pruned=1 - kept)
        kept = 1 - hold_to_joules(alone, spent, most, options.most_pruned)[0].pruned
    return dict(zip(case.names, kept.tolist(), strict=True))


def _decided_again(options: BandwidthOptions, case: Case, changed: Case, place: int) -> float:
    """Return what one device would keep, by deciding once more."""
    device = case.names[place]
    case = replace(case, figures={**case.figures, device: changed.figures.get(device, {})})
    return keep_ratio(decide(options, "numpy", case).devices[device].values)


def _refilled(upload: Upload, asked: Columns, other: Columns) -> Array:
    given = terms(asked.problem)
    others, bits, before = ramps(given), np.asarray(asked.problem.upload_bits), np.full(len(asked.rate), np.nan)
    for _ in range(1 + TURNS * upload.marked):
        moved = _with_floors(given, replace(other.problem, upload_bits=bits))
        kept: Array = 1 - allocation(moved, refill(others, ramps(moved), 1.0), 0.0).pruned
        if np.abs(kept - before).max() < CLOSE:
            break
        bits, before = upload.bits_per_model(kept), kept
    return kept


def _with_floors(given: BandwidthTerms, problem: Bandwidth) -> BandwidthTerms:
    """Return the terms of each device's other figures, with its floor where those of the others leave room for it."""
    moved = terms(problem)
    fits = given.floor.sum() - given.floor + moved.wanted <= 1.0
    is_easier = (moved.wanted < given.wanted) | (given.wanted == 0)
    has_floor = (given.floor > 0) | (is_easier & fits)
    return replace(moved, floor=np.where(has_floor, moved.wanted, 0.0))
