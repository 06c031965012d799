"""HCEF's P2 in steps and in what is sent at once, with a bound that certifies how far from the optimum it can be.

P2 is not convex, and alternating between its blocks stops wherever both are at their limits. Its one coupling is the
energy row, so that with its multiplier lambda the devices fall apart:

    bound(lambda) = sum_n min_{rho, theta} [(2 - theta) rho A + B (1 - rho)^2 + lambda (rho a_n + theta e_n)] - lambda E
    A = sigma^2 + G^2,  B = w G^2,  a_n = tau alpha_n,  e_n = p_n nu_n

A device's term is linear in theta, so that its minimum lies on one of three faces theta = x - y rho: theta_min, one,
and its deadline; on each it is a convex parabola in rho. No allocation is below max bound(lambda), which is concave:
its tangents on both sides close in on it. There some devices are about to change faces. With the faces of all devices
fixed, P2 is convex and one water-filling: the faces on both sides of lambda are tried, then those with another face for
one of the devices that are nearest to changing. These, or all where they are no more than `FEW`, then share their
joules out anew by dynamic programming, as one of few devices matters to the whole. Alternation ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef import alternate, halfway
from edge_server.allocation.optimizers.hcef_few import shared_out
from edge_server.allocation.optimizers.hcef_problem import (
    Control,
    Hcef,
    HcefTerms,
    Point,
    control,
    joules,
    terms,
    value,
)
from edge_server.allocation.optimizers.water_filling import Ramps, fill

FEW, PART, FLIPS = 24, 12, 10
NARROWINGS, WIDENINGS = 80, 200
CLOSE, ENOUGH, ROUNDING = 1e-10, 1e-6, 1e-12


@dataclass(frozen=True)
class Faces:
    """Three faces a device, columns of shape (3, N): theta = x - y rho for rho in [low, high].

    Attributes:
        x, y: Of the face.
        low, high: Of rho. A face that a device has not is the point of its floors.
        linear, bend: The objective on it is B + linear rho + bend rho^2.
        still, drawn: The joules on it are still + drawn rho.
    """

    x: Array
    y: Array
    low: Array
    high: Array
    linear: Array
    bend: Array
    still: Array
    drawn: Array

    def only(self, face: NDArray[np.intp]) -> Faces:
        """Return one face a device, columns of shape (N,)."""
        rows = np.arange(len(face))
        return Faces(*(one[face, rows] for one in vars(self).values()))


@dataclass(frozen=True)
class Apart:
    """What the devices do at a multiplier, each what is best for itself; `cost` is of all its faces."""

    face: NDArray[np.intp]
    steps: Array
    joules: float
    bound: float
    cost: Array


def solve(problem: Hcef) -> Control:
    """Return a feasible allocation with its certified gap; where there is room for floors alone, the floors."""
    given = terms(problem)
    floors = np.full(len(given.step_s), given.least[0]), np.full(len(given.step_s), given.least[1])
    if given.floor_joules >= given.energy_joules:
        return control(given, floors, 0.0, least_objective=_total(given, floors))
    faces = _faces(given)
    under, over = _bracket(given, faces)
    best, multiplier, bound = floors, under[0], max(under[1].bound, over[1].bound)
    for point in _candidates(given, faces, under, over):
        best = _better(given, best, point)
        if _total(given, best) - bound <= ENOUGH * abs(bound):
            break
    else:
        last = alternate(given, best[0])
        best = _better(given, best, (last.steps, last.sent))
    return control(given, best, multiplier, least_objective=bound)


def _total(given: HcefTerms, point: Point) -> float:
    return float(value(given, point).sum())


def _better(given: HcefTerms, one: Point, other: Point) -> Point:
    return other if _total(given, other) < _total(given, one) else one


def _faces(given: HcefTerms) -> Faces:
    """Return the faces of all devices."""
    rho, theta = given.least
    with np.errstate(all="ignore"):
        full = (given.deadline_s - given.send_s) / given.step_s  # steps in time when all is sent
        most = (given.deadline_s - theta * given.send_s) / given.step_s
        most = np.where(given.step_s > 0, most, 1.0)
        full = np.where(given.step_s > 0, full, np.where(given.deadline_s >= given.send_s, 1.0, -1.0))
        x, y = given.deadline_s / given.send_s, given.step_s / given.send_s
    count = len(full)
    low = np.stack((np.full(count, rho), np.full(count, rho), np.maximum(rho, full)))
    high = np.clip(np.stack((most, full, most)), -np.inf, 1.0)
    x, y = np.stack((np.full(count, theta), np.ones(count), x)), np.stack((np.zeros(count), np.zeros(count), y))
    there = (low <= high) & np.isfinite(x) & np.isfinite(y)
    x, y = np.where(there, x, theta), np.where(there, y, 0.0)
    low, high = np.where(there, low, rho), np.where(there, high, rho)
    linear, bend = (2 - x) * given.noise - 2 * given.bend, given.bend + y * given.noise
    still, drawn = given.send_joules * x, given.step_joules - given.send_joules * y
    drawn = np.where(np.abs(drawn) > ROUNDING * (given.step_joules + given.send_joules * y), drawn, 0.0)
    return Faces(x, y, low, high, linear, bend, still, drawn)


def _apart(given: HcefTerms, faces: Faces, multiplier: float) -> Apart:
    """Let every device do what is best for it at this price of a joule."""
    slope = faces.linear + multiplier * faces.drawn
    with np.errstate(all="ignore"):
        steps = np.where(faces.bend > 0, -slope / (2 * faces.bend), np.where(slope > 0, -np.inf, np.inf))
    steps = np.minimum(np.maximum(steps, faces.low), faces.high)
    cost = (faces.bend * steps + slope) * steps + multiplier * faces.still
    face = np.where(cost[0] <= cost[1], 0, 1)
    face = np.where(cost[2] < np.minimum(cost[0], cost[1]), 2, face)
    at = face, np.arange(len(face))
    spent = float((faces.still[at] + faces.drawn[at] * steps[at]).sum())
    least = float(cost[at].sum()) + given.bend * len(face) - multiplier * given.energy_joules
    return Apart(face, steps[at], spent, least, cost)


def _bracket(given: HcefTerms, faces: Faces) -> tuple[tuple[float, Apart], tuple[float, Apart]]:
    """Return two neighbouring multipliers: all keep to E at the one, not at the other; both zero if they need not."""
    energy = given.energy_joules
    over = 0.0, _apart(given, faces, 0.0)
    if over[1].joules <= energy:
        return over, over
    price = (given.noise or 1.0) * len(given.step_s) / over[1].joules
    under = price, _apart(given, faces, price)
    for _ in range(WIDENINGS):
        if under[1].joules <= energy:
            break
        over, price = under, 4 * price
        under = price, _apart(given, faces, price)
    for step in range(1, NARROWINGS + 1):
        (high, right), (low, left) = under, over
        excess, spare = left.joules - energy, energy - right.joules
        meet = low + (right.bound - left.bound + spare * (high - low)) / (excess + spare)  # of both tangents
        top = left.bound + excess * (meet - low)
        if top - max(left.bound, right.bound) <= CLOSE * abs(top):
            break
        middle = meet if low < meet < high and step % 3 else (low + high) / 2
        found = middle, _apart(given, faces, middle)
        under, over = (found, over) if found[1].joules <= energy else (under, found)
    return under, over


def _candidates(
    given: HcefTerms, faces: Faces, under: tuple[float, Apart], over: tuple[float, Apart]
) -> Iterator[Point]:
    """Yield feasible points: the faces of both sides, then those with one device after the other on another face."""
    if under[0] == 0:  # energy is no limit
        yield _point(faces.only(under[1].face), under[1].steps, given)
        return
    best, least = under[1].face, np.inf
    for face in (under[1].face, over[1].face):
        found = on_faces(given, faces, face)
        if found and (worth := _total(given, found)) < least:
            best, least, point = face, worth, found
            yield found
    start = alternate(given, halfway(given, 0.5))
    yield start.steps, start.sent
    ranked = np.sort(under[1].cost, axis=0)
    second = np.argsort(under[1].cost, axis=0)[1]
    nearest = np.argsort(ranked[1] - ranked[0])
    for device in nearest[:FLIPS]:
        face = best.copy()
        face[device] = second[device] if face[device] == under[1].face[device] else under[1].face[device]
        found = on_faces(given, faces, face)
        if found and (worth := _total(given, found)) < least:
            best, least, point = face, worth, found
            yield found
    if np.isfinite(least):
        yield from shared_out(given, point, nearest if len(nearest) <= FEW else nearest[:PART])


def on_faces(given: HcefTerms, faces: Faces, face: NDArray[np.intp]) -> Point | None:
    """Return the best point with every device on its face, None where even the least joules on them exceed E.

    Args:
        given: The problem's terms.
        faces: Of every device.
        face: Number of the face that each device is on.
    """
    one = faces.only(face)
    low, high, linear, bend, still, drawn = one.low, one.high, one.linear, one.bend, one.still, one.drawn
    free = drawn == 0
    first, last = np.where(drawn < 0, high, low), np.where(drawn < 0, low, high)
    with np.errstate(all="ignore"):
        start = np.where(free, 0.0, (2 * bend * first + linear) / drawn)
        end = np.where(free, 0.0, (2 * bend * last + linear) / drawn)
        alone = np.where(bend > 0, -linear / (2 * bend), np.where(linear > 0, low, high))
    least, most = still + drawn * first, still + drawn * last
    filled = fill(
        Ramps(start, np.maximum(start, end), least, np.where(free, least, most)), given.energy_joules, most=0.0
    )
    if not filled.fits:
        return None
    with np.errstate(all="ignore"):
        steps = np.where(free, alone, (filled.amount - still) / drawn)
    point = _point(one, np.clip(steps, low, high), given)
    return point if joules(given, point) <= given.energy_joules * (1 + ROUNDING) else None


def _point(one: Faces, steps: Array, given: HcefTerms) -> Point:
    return steps, np.clip(one.x - one.y * steps, given.least[1], 1.0)
