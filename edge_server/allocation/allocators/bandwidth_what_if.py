"""Single-device what-if of `bandwidth`: keep ratios with other figures.

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
from edge_server.allocation.allocators.bandwidth_joules import limit_joules
from edge_server.allocation.inputs import Case
from edge_server.allocation.optimizers.bandwidth import build_shares, ramps
from edge_server.allocation.optimizers.bandwidth_marks import CLOSE, TURNS, Upload
from edge_server.allocation.optimizers.bandwidth_problem import Bandwidth, BandwidthTerms, derive_terms
from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.refilling import refill
from edge_server.journal.decision import keep_ratio

FEW = 24


def keep_with_changed_figures(options: BandwidthOptions, case: Case, changed: Case) -> dict[str, float]:
    """Return the keep ratio of each device if only its own figures were those of `changed`.

    Args:
        case: Case of the decision.
        changed: The same devices and limits with other figures.
    """
    if not case.names:
        return {}
    changed_columns = round_columns(options, changed)
    if options.equal == "latency":  # the figures of one device do not affect another
        return {
            device: keep_ratio(decision.values)
            for device, decision in decide(options, "numpy", changed).devices.items()
        }
    if options.marks and len(case.names) <= FEW:
        return {device: _decide_again(options, case, changed, place) for place, device in enumerate(case.names)}
    columns, shares = solve_columns(options, "numpy", case, round_columns(options, case))
    keep = _refill_with_marks(options.upload(changed.limits), columns, changed_columns)
    if most := case.limits.get("joules"):  # with unchanged shares
        joules_of_keep, alone = (
            partial(task_joules, options, changed, changed_columns, shares),
            replace(shares, pruned=1 - keep),
        )
        keep = 1 - limit_joules(alone, joules_of_keep, most, options.most_pruned)[0].pruned
    return dict(zip(case.names, keep.tolist(), strict=True))


def _decide_again(options: BandwidthOptions, case: Case, changed: Case, place: int) -> float:
    """Return one device's keep ratio by deciding the case with its changed figures."""
    device = case.names[place]
    case = replace(case, figures={**case.figures, device: changed.figures.get(device, {})})
    return keep_ratio(decide(options, "numpy", case).devices[device].values)


def _refill_with_marks(upload: Upload, columns: Columns, changed_columns: Columns) -> Array:
    terms = derive_terms(columns.problem)
    others, bits, before = ramps(terms), np.asarray(columns.problem.upload_bits), np.full(len(columns.rate), np.nan)
    for _ in range(1 + TURNS * upload.marked):
        changed_terms = _terms_with_floors(terms, replace(changed_columns.problem, upload_bits=bits))
        keep: Array = 1 - build_shares(changed_terms, refill(others, ramps(changed_terms), 1.0), 0.0).pruned
        if np.abs(keep - before).max() < CLOSE:
            break
        bits, before = upload.bits_per_model(keep), keep
    return keep


def _terms_with_floors(terms: BandwidthTerms, problem: Bandwidth) -> BandwidthTerms:
    """Return the terms of the changed figures, with each device's floor if those of the others leave room for it."""
    changed = derive_terms(problem)
    fits = terms.floor.sum() - terms.floor + changed.full_floor <= 1.0
    is_easier = (changed.full_floor < terms.full_floor) | (terms.full_floor == 0)
    has_floor = (terms.floor > 0) | (is_easier & fits)
    return replace(changed, floor=np.where(has_floor, changed.full_floor, 0.0))
