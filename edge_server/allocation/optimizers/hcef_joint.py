"""Optimise HCEF's local steps and compression jointly, with a certified gap.

P2 is not convex, and alternating between its blocks stops wherever both are at their limits. The energy row is its only
coupling, so that the devices separate given its multiplier lambda:

    bound(lambda) = sum_n min_{rho, theta} [(2 - theta) rho A + B (1 - rho)^2 + lambda (rho a_n + theta e_n)] - lambda E
    A = sigma^2 + G^2,  B = w G^2,  a_n = tau alpha_n,  e_n = p_n nu_n

A device's term is linear in theta, so that its minimum lies on one of three faces theta = x - y rho: theta_min, one,
and its deadline; on each it is a convex parabola in rho. No allocation is below max bound(lambda), which is concave:
tangents from both sides close in on it. At this lambda some devices are about to change faces. With the faces of all
devices fixed, P2 is convex and one water-filling. The candidates are, in order:

1. the faces on both sides of lambda; of equal devices, which all change at once, as many as there are joules for;
2. those with another face for one of the devices that are nearest to changing;
3. the joules of these devices, or of all where they are at most `FEW`, redistributed by dynamic programming, since one
   of few devices matters to the whole. Where there are up to `MANY` and the bound of lambda is too far, the same over
   cells of joules bounds P2 from below;
4. alternation, from the best point and from both sides of lambda, where it gives the joules that no whole change of
   faces takes to one device between its faces.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef import alternate, start_steps
from edge_server.allocation.optimizers.hcef_changes import FACES, Start, change_faces, search_level
from edge_server.allocation.optimizers.hcef_faces import (
    NEAR,
    ROUNDING,
    Faces,
    PricedOptimum,
    build_faces,
    estimate_price,
    nearest_faces,
    optimize_at_price,
    point_on_face,
    solve_on_faces,
)
from edge_server.allocation.optimizers.hcef_few import best_within, bound_by_cells, redistribute_joules, refine_around
from edge_server.allocation.optimizers.hcef_problem import (
    Control,
    Hcef,
    HcefTerms,
    Point,
    build_control,
    derive_terms,
    objective_terms,
    steps_cap,
    total_joules,
)

FEW = 24
MANY, CELLS, CERTAIN = 256, (500, 2000, 6000), 9e-4
SEARCHED = 1000
NARROWINGS, WIDENINGS = 80, 200
CLOSE, ENOUGH = 1e-10, 1e-6
STARTS = 16


def solve(problem: Hcef) -> Control:
    """Return a feasible allocation with a certified gap; only the floors if there is no room for more."""
    terms = derive_terms(problem)
    floors = np.full(len(terms.step_s), terms.least[0]), np.full(len(terms.step_s), terms.least[1])
    if terms.floor_joules >= terms.energy_joules * (1 - ROUNDING):
        floor_joules = floors[0] * terms.step_joules + floors[1] * terms.send_joules
        free = terms.on_time & ~terms.dear & ((terms.step_joules == 0) | (terms.send_joules == 0))
        best = best_within(terms, floor_joules[:, None])
        point = np.where(free, best[0][:, 0], floors[0]), np.where(free, best[1][:, 0], floors[1])
        return build_control(terms, point, 0.0, least_objective=_objective(terms, point))
    faces = build_faces(terms)
    under, over = _bracket_price(terms, faces)
    best, bound = floors, max(under[1].bound, over[1].bound)
    for point in _candidates(terms, faces, under, over):
        best = _better(terms, best, point)
        if _objective(terms, best) - bound <= ENOUGH * abs(bound):
            break
    else:
        best = _improve_by_alternation(terms, faces, (under[1], over[1]), best)
        best, bound = _close_gap_by_cells(terms, faces, under[0], (best, bound))
        best = _better(terms, best, _alternate_from(terms, best[0]))
        if len(best[0]) <= FEW:
            best = _try_random_starts(terms, best)
    return build_control(terms, best, under[0], least_objective=bound)


def _alternate_from(terms: HcefTerms, steps: Array) -> Point:
    """Return the point where alternation from given steps ends."""
    last = alternate(terms, steps)
    return last.steps, last.sent


def _try_random_starts(terms: HcefTerms, best: Point) -> Point:
    """Return the best end point of alternation from random steps: few devices have many local optima."""
    cap = steps_cap(terms, np.full(len(best[0]), terms.least[1]))
    for drawn in np.random.default_rng(0).random((STARTS, len(best[0]))):
        point = _alternate_from(terms, np.clip(drawn, terms.least[0], cap))
        if total_joules(terms, point) <= terms.energy_joules * (1 + ROUNDING):
            best = _better(terms, best, point)
    return best


def _improve_by_alternation(
    terms: HcefTerms, faces: Faces, sides: tuple[PricedOptimum, PricedOptimum], best: Point
) -> Point:
    """Return the best end point of alternation, with the level of its one device between faces optimized.

    Starts from the optima on both sides of the bound's price, and halfway between them and the best point so far.
    """
    under, over = (side.steps for side in sides)
    for steps in (under, over, (under + best[0]) / 2):
        point = _alternate_from(terms, steps)
        if total_joules(terms, point) <= terms.energy_joules * (1 + ROUNDING):
            best = _better(terms, best, point)
    face = nearest_faces(faces, best)
    lines = faces.only(face)
    between = np.flatnonzero(np.abs(best[1] - (lines.x - lines.y * best[0])) > NEAR)
    face[between] = FACES
    for device in between[:1] if len(face) <= SEARCHED else ():
        for point in search_level(terms, faces, (face, best[1]), device=int(device), worth=_objective(terms, best)):
            best = _better(terms, best, point)
    return best


def _close_gap_by_cells(
    terms: HcefTerms, faces: Faces, price: float, start: tuple[Point, float]
) -> tuple[Point, float]:
    """Improve the best point and the bound of few devices, with increasingly fine cells of joules."""
    best, bound = start
    if len(terms.step_s) > MANY:
        return best, bound
    for count in CELLS:
        total = _objective(terms, best)
        if total - bound <= CERTAIN * abs(total):
            break
        for dear in (estimate_price(faces, best, price), price):
            each = optimize_at_price(terms, faces, dear)
            face_joules = faces.still + faces.drawn * each.face_steps
            face_optima = face_joules, each.cost + terms.bend - dear * face_joules
            cells = bound_by_cells(terms, face_optima, dear, total, count)
            bound = max(bound, cells.bound)
            if cells.joules is not None:
                unit = (terms.energy_joules - terms.floor_joules) / count
                for point in _points_near(terms, faces, cells.joules, unit):
                    best = _better(terms, best, point)
    return best, bound


def _points_near(terms: HcefTerms, faces: Faces, joules: Array, unit: float) -> Iterator[Point]:
    """Yield points at about the given joules: exactly these, and on their nearest faces."""
    steps, sent = best_within(terms, joules[:, None])
    yield steps[:, 0], sent[:, 0]
    if len(joules) <= FEW:
        yield from refine_around(terms, joules, unit)
    for more in (0.0, unit / 2):
        steps, sent = best_within(terms, (joules + more)[:, None])
        point = solve_on_faces(terms, faces, nearest_faces(faces, (steps[:, 0], sent[:, 0])))
        if point:
            yield point


def _objective(terms: HcefTerms, point: Point) -> float:
    return float(objective_terms(terms, point).sum())


def _better(terms: HcefTerms, point: Point, candidate: Point) -> Point:
    return candidate if _objective(terms, candidate) < _objective(terms, point) else point


def _bracket_price(terms: HcefTerms, faces: Faces) -> tuple[tuple[float, PricedOptimum], tuple[float, PricedOptimum]]:
    """Return two neighbouring prices, the first within E, the second beyond; both zero if E does not bind."""
    energy = terms.energy_joules
    over = 0.0, optimize_at_price(terms, faces, 0.0)
    if over[1].joules <= energy:
        return over, over
    price = (terms.noise or 1.0) * len(terms.step_s) / over[1].joules
    under = price, optimize_at_price(terms, faces, price)
    for _ in range(WIDENINGS):
        if under[1].joules <= energy:
            break
        over, price = under, 4 * price
        under = price, optimize_at_price(terms, faces, price)
    for step in range(1, NARROWINGS + 1):
        (high, under_side), (low, over_side) = under, over
        excess, spare = over_side.joules - energy, energy - under_side.joules
        if excess + spare <= 0:  # except for rounding, no price changes the joules
            break
        # The tangents of both sides meet here.
        meet = low + (under_side.bound - over_side.bound + spare * (high - low)) / (excess + spare)
        top = over_side.bound + excess * (meet - low)
        if top - max(over_side.bound, under_side.bound) <= CLOSE * abs(top):
            break
        middle = meet if low < meet < high and step % 3 else (low + high) / 2
        side = middle, optimize_at_price(terms, faces, middle)
        under, over = (side, over) if side[1].joules <= energy else (under, side)
    return under, over


def _candidates(
    terms: HcefTerms, faces: Faces, under: tuple[float, PricedOptimum], over: tuple[float, PricedOptimum]
) -> Iterator[Point]:
    """Yield feasible points: the faces of both sides, then changes of single devices."""
    if under[0] == 0:  # E does not bind
        yield point_on_face(faces.only(under[1].face), under[1].steps, terms)
        return
    best, least = under[1].face, np.inf
    for face in _split_changing_devices(terms, faces, under[1], over[1]):
        candidate = solve_on_faces(terms, faces, face)
        if candidate and (worth := _objective(terms, candidate)) < least:
            best, least, point = face, worth, candidate
            yield candidate
    start = alternate(terms, start_steps(terms, 0.5))
    yield start.steps, start.sent
    nearest = _order_by_gap(under[1].cost, best)
    bound = max(under[1].bound, over[1].bound)
    for candidate in change_faces(terms, faces, Start(best, under[1], under[0], least - bound), nearest):
        if (worth := _objective(terms, candidate)) < least:
            least, point = worth, candidate
            yield candidate
    if np.isfinite(least) and len(nearest) <= FEW:
        yield from redistribute_joules(terms, point, nearest)


def _split_changing_devices(
    terms: HcefTerms, faces: Faces, under: PricedOptimum, over: PricedOptimum
) -> Iterator[NDArray[np.intp]]:
    """Yield faces between both sides: as many devices change theirs as there are joules for.

    Equal devices all change faces at the same price. The objective is convex in the number that changes, so that the
    best number is next to the fraction that spends all joules. The joules of a device on a face are taken at the price
    of that side: the two prices differ much if one side stays at its floors over a range of prices.
    """
    moves = np.flatnonzero(under.face != over.face)
    ranked = np.sort(under.cost, axis=0)
    moves = moves[np.argsort((ranked[1] - ranked[0])[moves], kind="stable")]
    low, high = (faces.still + faces.drawn * side.face_steps for side in (under, over))
    more = np.cumsum(high[over.face[moves], moves] - low[under.face[moves], moves])
    fits = int(np.searchsorted(np.maximum.accumulate(more), terms.energy_joules - under.joules, side="right"))
    for count in sorted({0, len(moves), *(min(max(0, fits + off), len(moves)) for off in (-1, 0, 1, 2))}):
        face = under.face.copy()
        face[moves[:count]] = over.face[moves[:count]]
        yield face


def _order_by_gap(cost: Array, face: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the devices by the gap to their second-best face, with equal devices spread out."""
    ranked = np.sort(cost, axis=0)
    gap = ranked[1] - ranked[0]
    order = np.lexsort((face, gap))
    is_first = np.append(True, (np.diff(gap[order]) != 0) | (np.diff(face[order]) != 0))[: len(order)]
    place = np.arange(len(order))
    again = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return order[np.argsort(again, kind="stable")]
