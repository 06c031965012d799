"""HCEF's P2 near its bound: knapsack over devices that change faces.

At the price lambda of the bound, another face costs a device r more and changes its joules by j. Such changes leave
d = E - J - sum j of E, and all other devices take it up along their faces. The best changes approximately minimise

    sum r + d^2 / (2 S),  S = sum_n drawn_n^2 / (2 bend_n) over the devices inside their faces

by dynamic programming over d; unspent joules cost at most lambda d. A device may also send at any level between its
faces, which pays for at most one device; its level is searched for at the end, unless the fleet is so large that one
device does not matter. Every point is solved exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef_faces import (
    Faces,
    PricedOptimum,
    add_level,
    level_faces,
    optimize_at_price,
    solve_on_faces,
)
from edge_server.allocation.optimizers.hcef_few import COLUMNS
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, objective_terms

DEVICES, LEVELS, BINS, TRIED = 20, 7, 200, 6
GOLDEN, NARROWINGS = (5**0.5 - 1) / 2, 18
FACES = 3
SAME, HOPELESS = 1e-12, 5


@dataclass(frozen=True)
class Start:
    """Where changes begin.

    Attributes:
        face: Of every device, as far as one price says.
        each: What devices do at the price.
        price: lambda.
        gap: How far above the bound the best point is.
    """

    face: NDArray[np.intp]
    each: PricedOptimum
    price: float
    gap: float


def change_faces(terms: HcefTerms, faces: Faces, start: Start, nearest: NDArray[np.intp]) -> Iterator[Point]:
    """Yield points in which few devices are on another face, or send at a level between their faces.

    Args:
        start: The faces to begin with.
        nearest: Devices, those first that are nearest to changing.
    """
    devices = nearest[:DEVICES]
    few = replace(terms, **{name: getattr(terms, name)[devices] for name in COLUMNS})
    levels = _levels_between_faces(few)
    between = level_faces(few, levels)
    alone = optimize_at_price(few, between, start.price)
    cost = np.vstack((start.each.cost[:, devices], alone.cost))
    face_joules = faces.still + faces.drawn * start.each.face_steps
    joules = np.vstack((face_joules[:, devices], between.still + between.drawn * alone.face_steps))
    current, rows = start.face[devices], np.arange(len(devices))
    joules_left = terms.energy_joules - float(face_joules[start.face, np.arange(len(start.face))].sum())
    for picks in _cheapest_choices(
        cost - cost[current, rows], joules - joules[current, rows], joules_left, _AbsorptionCost.of(faces, start)
    ):
        face, sent = start.face.copy(), np.full(len(start.face), terms.least[1])
        face[devices] = np.minimum(picks, FACES)
        is_between = picks >= FACES
        sent[devices[is_between]] = levels[picks[is_between] - FACES, rows[is_between]]
        if point := solve_on_faces(terms, add_level(terms, faces, sent), face):
            yield point


def _levels_between_faces(few: HcefTerms) -> Array:
    """Return what devices may send between their faces, of shape (levels, N)."""
    theta = few.least[1]
    with np.errstate(all="ignore"):
        most = np.where(few.send_s > 0, (few.deadline_s - few.least[0] * few.step_s) / few.send_s, 1.0)
    part = np.arange(1, LEVELS + 1)[:, None] / (LEVELS + 1)
    return np.asarray(theta + part * (np.clip(most, theta, 1.0) - theta))


@dataclass(frozen=True)
class _AbsorptionCost:
    """What it costs all others to take up some joules: about their square times `bend`, at most `price` of each."""

    bend: float
    price: float
    gap: float

    @classmethod
    def of(cls, faces: Faces, start: Start) -> _AbsorptionCost:
        face, rows = faces.only(start.face), np.arange(len(start.face))
        steps = start.each.face_steps[start.face, rows]
        inside = (steps > face.low) & (steps < face.high) & (face.bend > 0)
        give = float((face.drawn[inside] ** 2 / (2 * face.bend[inside])).sum())
        return cls(1 / (2 * give) if give > 0 else np.inf, start.price, max(start.gap, 0.0))

    def cost(self, joules_left: Array) -> Array:
        """Return it for joules that are left; for those that lack, below zero."""
        with np.errstate(invalid="ignore"):
            square = np.where(joules_left == 0, 0.0, self.bend * joules_left**2)
        return np.where(joules_left > 0, np.minimum(square, self.price * joules_left), square)

    @property
    def width(self) -> float:
        """Joules left or overdrawn that are worth looking at."""
        over = (self.gap / self.bend) ** 0.5 if self.bend < np.inf else 0.0
        return max(over, self.gap / self.price if self.price > 0 else 0.0)


def _cheapest_choices(
    cost: Array, joules: Array, joules_left: float, absorption: _AbsorptionCost
) -> Iterator[NDArray[np.intp]]:
    """Yield choices of an option for each device, the ones that cost about the least first.

    Args:
        cost: Of each option, of shape (options, N).
        joules: Of each option, likewise, beyond those of a device's own.
        joules_left: Joules that are left at its own.
        absorption: What joules that are left or lack cost.
    """
    unit = (2 * absorption.width + float(np.abs(joules).max(initial=0.0)) + abs(joules_left)) / BINS
    if not unit > 0:
        return
    least, stages = np.full(2 * BINS + 1, np.inf), []
    least[BINS + round(joules_left / unit)] = 0.0
    moves = np.rint(joules / unit).astype(int)
    places, edge = np.arange(len(least)), int(np.abs(moves).max(initial=0))
    for device in range(cost.shape[1]):
        reach = np.full(len(least) + 2 * edge, np.inf)  # no more can be left, or overdrawn, than the ends say
        reach[edge : edge + len(least)] = least
        totals = reach[places + edge + moves[:, device, None]] + cost[:, device, None]
        picks = totals.argmin(axis=0)
        stages.append(picks)
        least = totals[picks, places]
    total = least + absorption.cost(unit * np.arange(-BINS, BINS + 1, dtype=np.float64))
    chosen_before: set[bytes] = set()
    for end in np.argsort(total, kind="stable")[: 4 * TRIED]:
        if not np.isfinite(total[end]) or len(chosen_before) == TRIED:
            return
        at, chosen = int(end), np.zeros(cost.shape[1], np.intp)
        for device in reversed(range(cost.shape[1])):
            chosen[device] = stages[device][at]
            at += int(moves[chosen[device], device])
        if chosen.tobytes() not in chosen_before:
            chosen_before.add(chosen.tobytes())
            yield chosen


def search_level(
    terms: HcefTerms, faces: Faces, start: tuple[NDArray[np.intp], Array], *, device: int, worth: float
) -> Iterator[Point]:
    """Yield points with one device that sends at other levels, by golden section, while they may be worth less.

    Args:
        start: The face that each device is on, `FACES` for none of them, and what it sends then.
        worth: Objective of the best point that is known.
    """
    face, sent = start[0].copy(), start[1]
    face[device] = FACES
    apart_by = float(np.ptp(_levels_between_faces(terms)[:2, device]))
    low, high = max(terms.least[1], sent[device] - apart_by), min(1.0, sent[device] + apart_by)

    levels, wide = sent.copy(), add_level(terms, faces, sent)

    def at(level: float) -> tuple[float, Point | None]:
        levels[device] = level
        for line, new in zip(vars(wide).values(), vars(level_faces(terms, levels)).values(), strict=True):
            line[FACES] = new
        point = solve_on_faces(terms, wide, face)
        return (float(objective_terms(terms, point).sum()) if point else np.inf), point

    lower, upper = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_lower, at_upper = at(lower), at(upper)
    for step in range(NARROWINGS):
        least, most = sorted((at_lower[0], at_upper[0]))
        if most - least <= SAME * abs(least) or (step == HOPELESS and least > worth):
            break
        if at_lower[0] <= at_upper[0]:
            high, upper, at_upper = upper, lower, at_lower
            lower = high - GOLDEN * (high - low)
            at_lower = at(lower)
        else:
            low, lower, at_lower = lower, upper, at_upper
            upper = low + GOLDEN * (high - low)
            at_upper = at(upper)
    for _, point in (at_lower, at_upper):
        if point:
            yield point
