"""HCEF's P2 solved jointly in rho and theta with a certified gap.

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
from edge_server.allocation.optimizers.hcef import alternate, halfway
from edge_server.allocation.optimizers.hcef_changes import FACES, Start, by_changes, search_level
from edge_server.allocation.optimizers.hcef_faces import (
    NEAR,
    ROUNDING,
    Apart,
    Faces,
    apart,
    build_faces,
    closest,
    on_faces,
    on_line,
    price_at,
)
from edge_server.allocation.optimizers.hcef_few import bound_by_cells, narrowed, shared_out, within
from edge_server.allocation.optimizers.hcef_problem import (
    Control,
    Hcef,
    HcefTerms,
    Point,
    control,
    joules,
    steps_cap,
    terms,
    value,
)

FEW = 24
MANY, CELLS, CERTAIN = 256, (500, 2000, 6000), 9e-4
SEARCHED = 1000
NARROWINGS, WIDENINGS = 80, 200
CLOSE, ENOUGH = 1e-10, 1e-6
STARTS = 16


def solve(problem: Hcef) -> Control:
    """Return a feasible allocation with its certified gap; where there is room for floors alone, the floors."""
    given = terms(problem)
    floors = np.full(len(given.step_s), given.least[0]), np.full(len(given.step_s), given.least[1])
    if given.floor_joules >= given.energy_joules * (1 - ROUNDING):
        spent = floors[0] * given.step_joules + floors[1] * given.send_joules
        free = given.on_time & ~given.dear & ((given.step_joules == 0) | (given.send_joules == 0))
        best = within(given, spent[:, None])
        point = np.where(free, best[0][:, 0], floors[0]), np.where(free, best[1][:, 0], floors[1])
        return control(given, point, 0.0, least_objective=_total(given, point))
    faces = build_faces(given)
    under, over = _bracket(given, faces)
    best, bound = floors, max(under[1].bound, over[1].bound)
    for point in _candidates(given, faces, under, over):
        best = _better(given, best, point)
        if _total(given, best) - bound <= ENOUGH * abs(bound):
            break
    else:
        best = _alternated(given, faces, (under[1], over[1]), best)
        best, bound = _by_cells(given, faces, under[0], (best, bound))
        best = _better(given, best, _ended(given, best[0]))
        if len(best[0]) <= FEW:
            best = _scattered(given, best)
    return control(given, best, under[0], least_objective=bound)


def _ended(given: HcefTerms, steps: Array) -> Point:
    """Return where alternation from these steps ends."""
    last = alternate(given, steps)
    return last.steps, last.sent


def _scattered(given: HcefTerms, best: Point) -> Point:
    """Return the best of where alternation ends from scattered steps: a few devices share joules in many ways."""
    cap = steps_cap(given, np.full(len(best[0]), given.least[1]))
    for drawn in np.random.default_rng(0).random((STARTS, len(best[0]))):
        found = _ended(given, np.clip(drawn, given.least[0], cap))
        if joules(given, found) <= given.energy_joules * (1 + ROUNDING):
            best = _better(given, best, found)
    return best


def _alternated(given: HcefTerms, faces: Faces, sides: tuple[Apart, Apart], best: Point) -> Point:
    """Return the best of where alternation ends, with the best level of the one device that it left between its faces.

    From what devices do on either side of the bound's price, and from halfway between that and the best point so far.
    """
    under, over = (side.steps for side in sides)
    for steps in (under, over, (under + best[0]) / 2):
        found = _ended(given, steps)
        if joules(given, found) <= given.energy_joules * (1 + ROUNDING):
            best = _better(given, best, found)
    face = closest(faces, best)
    one = faces.only(face)
    between = np.flatnonzero(np.abs(best[1] - (one.x - one.y * best[0])) > NEAR)
    face[between] = FACES
    for device in between[:1] if len(face) <= SEARCHED else ():
        for found in search_level(given, faces, (face, best[1]), device=int(device), worth=_total(given, best)):
            best = _better(given, best, found)
    return best


def _by_cells(given: HcefTerms, faces: Faces, price: float, known: tuple[Point, float]) -> tuple[Point, float]:
    """Close in on the optimum of few devices from both sides, with finer and finer cells of joules."""
    best, bound = known
    if len(given.step_s) > MANY:
        return best, bound
    for count in CELLS:
        total = _total(given, best)
        if total - bound <= CERTAIN * abs(total):
            break
        for dear in (price_at(faces, best, price), price):
            each = apart(given, faces, dear)
            spent = faces.still + faces.drawn * each.on_faces
            found = bound_by_cells(given, (spent, each.cost + given.bend - dear * spent), dear, total, count)
            bound = max(bound, found.bound)
            if found.joules is not None:
                for point in _near(given, faces, found.joules, (given.energy_joules - given.floor_joules) / count):
                    best = _better(given, best, point)
    return best, bound


def _near(given: HcefTerms, faces: Faces, spent: Array, unit: float) -> Iterator[Point]:
    """Yield points in which devices spend about these joules: just those, and on the faces that those lie on."""
    steps, sent = within(given, spent[:, None])
    yield steps[:, 0], sent[:, 0]
    if len(spent) <= FEW:
        yield from narrowed(given, spent, unit)
    for more in (0.0, unit / 2):
        steps, sent = within(given, (spent + more)[:, None])
        found = on_faces(given, faces, closest(faces, (steps[:, 0], sent[:, 0])))
        if found:
            yield found


def _total(given: HcefTerms, point: Point) -> float:
    return float(value(given, point).sum())


def _better(given: HcefTerms, one: Point, other: Point) -> Point:
    return other if _total(given, other) < _total(given, one) else one


def _bracket(given: HcefTerms, faces: Faces) -> tuple[tuple[float, Apart], tuple[float, Apart]]:
    """Return two neighbouring multipliers: all keep to E at the one, not at the other; both zero if they need not."""
    energy = given.energy_joules
    over = 0.0, apart(given, faces, 0.0)
    if over[1].joules <= energy:
        return over, over
    price = (given.noise or 1.0) * len(given.step_s) / over[1].joules
    under = price, apart(given, faces, price)
    for _ in range(WIDENINGS):
        if under[1].joules <= energy:
            break
        over, price = under, 4 * price
        under = price, apart(given, faces, price)
    for step in range(1, NARROWINGS + 1):
        (high, right), (low, left) = under, over
        excess, spare = left.joules - energy, energy - right.joules
        if excess + spare <= 0:  # apart from rounding, no price changes what all spend
            break
        meet = low + (right.bound - left.bound + spare * (high - low)) / (excess + spare)  # of both tangents
        top = left.bound + excess * (meet - low)
        if top - max(left.bound, right.bound) <= CLOSE * abs(top):
            break
        middle = meet if low < meet < high and step % 3 else (low + high) / 2
        found = middle, apart(given, faces, middle)
        under, over = (found, over) if found[1].joules <= energy else (under, found)
    return under, over


def _candidates(
    given: HcefTerms, faces: Faces, under: tuple[float, Apart], over: tuple[float, Apart]
) -> Iterator[Point]:
    """Yield feasible points: the faces of both sides, then those with one device after the other on another face."""
    if under[0] == 0:  # energy is no limit
        yield on_line(faces.only(under[1].face), under[1].steps, given)
        return
    best, least = under[1].face, np.inf
    for face in _splits(given, faces, under[1], over[1]):
        found = on_faces(given, faces, face)
        if found and (worth := _total(given, found)) < least:
            best, least, point = face, worth, found
            yield found
    start = alternate(given, halfway(given, 0.5))
    yield start.steps, start.sent
    nearest = _nearest(under[1].cost, best)
    bound = max(under[1].bound, over[1].bound)
    for found in by_changes(given, faces, Start(best, under[1], under[0], least - bound), nearest):
        if (worth := _total(given, found)) < least:
            least, point = worth, found
            yield found
    if np.isfinite(least) and len(nearest) <= FEW:
        yield from shared_out(given, point, nearest)


def _splits(given: HcefTerms, faces: Faces, under: Apart, over: Apart) -> Iterator[NDArray[np.intp]]:
    """Yield faces between those on both sides: of the devices that change theirs, so many as there are joules for.

    Equal devices change theirs at one price, all of them. How many should is a convex question, so that the best whole
    number is beside the share of them with which all joules are spent. What a device spends on a face is read at the
    price of that side: the two prices lie far apart where one side stays at its floors over a range of prices.
    """
    moves = np.flatnonzero(under.face != over.face)
    ranked = np.sort(under.cost, axis=0)
    moves = moves[np.argsort((ranked[1] - ranked[0])[moves], kind="stable")]
    low, high = (faces.still + faces.drawn * side.on_faces for side in (under, over))
    more = np.cumsum(high[over.face[moves], moves] - low[under.face[moves], moves])
    fits = int(np.searchsorted(np.maximum.accumulate(more), given.energy_joules - under.joules, side="right"))
    for count in sorted({0, len(moves), *(min(max(0, fits + off), len(moves)) for off in (-1, 0, 1, 2))}):
        face = under.face.copy()
        face[moves[:count]] = over.face[moves[:count]]
        yield face


def _nearest(cost: Array, face: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the devices, those nearest to changing faces first, but of devices that are equal only one at a time."""
    ranked = np.sort(cost, axis=0)
    gap = ranked[1] - ranked[0]
    order = np.lexsort((face, gap))
    is_first = np.append(True, (np.diff(gap[order]) != 0) | (np.diff(face[order]) != 0))[: len(order)]
    place = np.arange(len(order))
    again = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return order[np.argsort(again, kind="stable")]
