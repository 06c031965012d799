"""Faces of HCEF's P2: edges of a device's feasible set that contain its optimum.

At any price of a joule, a device's optimum lies on one of the lines theta = x - y rho: theta_min, one, and the
deadline. On each, the objective is a convex parabola in rho and the joules are a straight line, so that P2 with every
device on a given face is one water-filling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, joules
from edge_server.allocation.optimizers.water_filling import Ramps, fill

NEAR, ROUNDING = 1e-9, 1e-12


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
        at = face * len(face) + np.arange(len(face))
        return Faces(*(one.ravel().take(at) for one in vars(self).values()))


@dataclass(frozen=True)
class Apart:
    """What the devices do at a multiplier, each what is best for itself; `cost` and `on_faces` are of all its faces."""

    face: NDArray[np.intp]
    steps: Array
    joules: float
    bound: float
    cost: Array
    on_faces: Array


def build_faces(given: HcefTerms) -> Faces:
    """Return the faces of all devices."""
    rho, theta = given.least
    with np.errstate(all="ignore"):
        full = (given.deadline_s - given.send_s) / given.step_s  # steps in time when all is sent
        most = (given.deadline_s - theta * given.send_s) / given.step_s
        most = np.where(given.step_s > 0, most, 1.0)
        full = np.where(given.step_s > 0, full, np.where(given.deadline_s >= given.send_s, np.inf, -np.inf))
        x, y = given.deadline_s / given.send_s, given.step_s / given.send_s
    count = len(full)
    low = np.stack((np.full(count, rho), np.full(count, rho), np.maximum(rho, full)))
    high = np.clip(np.stack((most, full, most)), -np.inf, 1.0)
    x, y = np.stack((np.full(count, theta), np.ones(count), x)), np.stack((np.zeros(count), np.zeros(count), y))
    there = (low <= high) & np.isfinite(x) & np.isfinite(y)
    return _lines(
        given,
        (np.where(there, x, theta), np.where(there, y, 0.0)),
        np.where(there, low, rho),
        np.where(there, high, rho),
    )


def add_level(given: HcefTerms, faces: Faces, sent: Array) -> Faces:
    """Return the faces and behind them one more a device: that it sends so much, as no face of its own does.

    Args:
        sent: theta of each device, in time with its fewest steps.
    """
    own = vars(level_faces(given, sent)).values()
    return Faces(*(np.vstack((old, new)) for old, new in zip(vars(faces).values(), own, strict=True)))


def level_faces(given: HcefTerms, sent: Array) -> Faces:
    """Return faces on which devices send so much, of shape (N,) or (levels, N)."""
    with np.errstate(all="ignore"):
        most = np.where(given.step_s > 0, (given.deadline_s - sent * given.send_s) / given.step_s, 1.0)
    low = np.full(sent.shape, given.least[0])
    return _lines(given, (sent, np.zeros(sent.shape)), low, np.clip(most, given.least[0], 1.0))


def _lines(given: HcefTerms, line: tuple[Array, Array], low: Array, high: Array) -> Faces:
    x, y = line
    linear, bend = (2 - x) * given.noise - 2 * given.bend, given.bend + y * given.noise
    still, drawn = given.send_joules * x, given.step_joules - given.send_joules * y
    drawn = np.where(np.abs(drawn) > ROUNDING * (given.step_joules + given.send_joules * y), drawn, 0.0)
    return Faces(x, y, low, high, linear, bend, still, drawn)


def apart(given: HcefTerms, faces: Faces, multiplier: float) -> Apart:
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
    paid = multiplier * given.energy_joules if multiplier else 0.0  # at no price, there may be no limit
    least = float(cost[at].sum()) + given.bend * len(face) - paid
    return Apart(face, steps[at], spent, least, cost, steps)


def on_faces(given: HcefTerms, faces: Faces, face: NDArray[np.intp]) -> Point | None:
    """Return the best point with every device on its face, None where even the least joules on them exceed E.

    Args:
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
    point = on_line(one, np.clip(steps, low, high), given)
    return point if joules(given, point) <= given.energy_joules * (1 + ROUNDING) else None


def on_line(one: Faces, steps: Array, given: HcefTerms) -> Point:
    """Return the point with these steps on one face a device.

    Args:
        one: The faces, columns of shape (N,).
        steps: rho.
    """
    return steps, np.clip(one.x - one.y * steps, given.least[1], 1.0)


def closest(faces: Faces, point: Point) -> NDArray[np.intp]:
    """Return the face that each device's point is nearest to."""
    steps, sent = point
    off = np.abs(sent - (faces.x - faces.y * steps)) + np.abs(steps - np.clip(steps, faces.low, faces.high))
    found: NDArray[np.intp] = np.argmin(off, axis=0)
    return found


def price_at(faces: Faces, point: Point, otherwise: float) -> float:
    """Return what one more joule takes off the objective where devices are free to use it; their median.

    Args:
        point: rho and theta.
        otherwise: Where no device is free to.
    """
    steps, sent = point
    one = faces.only(closest(faces, point))
    inside = (steps > one.low * (1 + NEAR)) & (steps < one.high * (1 - NEAR)) & (one.drawn != 0)
    inside &= np.abs(sent - (one.x - one.y * steps)) <= NEAR
    if not inside.any():
        return otherwise
    slope = -(one.linear + 2 * one.bend * steps)[inside] / one.drawn[inside]
    return float(np.clip(np.median(slope), 0.0, None))
