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
    """Starting point of the changes.

    Attributes:
        face: Face of every device at the price.
        each: Optimum of every device at the price.
        price: lambda.
        gap: Objective of the best point minus the bound.
    """

    face: NDArray[np.intp]
    each: PricedOptimum
    price: float
    gap: float


def change_faces(terms: HcefTerms, faces: Faces, start: Start, nearest: NDArray[np.intp]) -> Iterator[Point]:
    """Yield points in which a few devices change faces, or send at a level between their faces.

    Args:
        nearest: Devices, nearest to changing first.
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
    cost, joules = cost - cost[current, rows], joules - joules[current, rows]
    for picks in _cheapest_choices(cost, joules, joules_left, _AbsorptionCost.of(faces, start)):
        face, sent = start.face.copy(), np.full(len(start.face), terms.least[1])
        face[devices] = np.minimum(picks, FACES)
        is_between = picks >= FACES
        sent[devices[is_between]] = levels[picks[is_between] - FACES, rows[is_between]]
        if point := solve_on_faces(terms, add_level(terms, faces, sent), face):
            yield point


def _levels_between_faces(few: HcefTerms) -> Array:
    """Return levels of theta between the faces, of shape (levels, N)."""
    theta = few.least[1]
    with np.errstate(all="ignore"):
        most = np.where(few.send_s > 0, (few.deadline_s - few.least[0] * few.step_s) / few.send_s, 1.0)
    part = np.arange(1, LEVELS + 1)[:, None] / (LEVELS + 1)
    return np.asarray(theta + part * (np.clip(most, theta, 1.0) - theta))


@dataclass(frozen=True)
class _AbsorptionCost:
    """Cost of joules that all other devices absorb: about `bend` joules^2, at most `price` per joule."""

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
        """Return the cost of remaining joules; negative amounts are overdrawn."""
        with np.errstate(invalid="ignore"):
            square = np.where(joules_left == 0, 0.0, self.bend * joules_left**2)
        return np.where(joules_left > 0, np.minimum(square, self.price * joules_left), square)

    @property
    def width(self) -> float:
        """Maximum joules, remaining or overdrawn, that are worth examining."""
        over = (self.gap / self.bend) ** 0.5 if self.bend < np.inf else 0.0
        return max(over, self.gap / self.price if self.price > 0 else 0.0)


def _cheapest_choices(
    cost: Array, joules: Array, joules_left: float, absorption: _AbsorptionCost
) -> Iterator[NDArray[np.intp]]:
    """Yield choices of one option per device, approximately cheapest first.

    Args:
        cost: Cost of each option, of shape (options, N).
        joules: Joules of each option beyond those of the current one, of shape (options, N).
        joules_left: Joules that remain with the current options.
    """
    unit = (2 * absorption.width + float(np.abs(joules).max(initial=0.0)) + abs(joules_left)) / BINS
    if not unit > 0:
        return
    least, stages = np.full(2 * BINS + 1, np.inf), []
    least[BINS + round(joules_left / unit)] = 0.0
    moves = np.rint(joules / unit).astype(int)
    places, edge = np.arange(len(least)), int(np.abs(moves).max(initial=0))
    for device in range(cost.shape[1]):
        reach = np.full(len(least) + 2 * edge, np.inf)  # clamps moves beyond the ends of the grid
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
    """Search the best level of one device by golden section; stop if it cannot beat the best point.

    Args:
        start: Face of each device, `FACES` for between its faces, and theta.
        worth: Objective of the best known point.
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
