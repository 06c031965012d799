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
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, total_joules
from edge_server.allocation.optimizers.water_filling import Ramps, fill

NEAR, ROUNDING = 1e-9, 1e-12


@dataclass(frozen=True)
class Faces:
    """Three faces per device, columns of shape (3, N): theta = x - y rho for rho in [low, high].

    Attributes:
        x, y: Coefficients of the line.
        low, high: Range of rho. A missing face is the point of the device's floors.
        linear, bend: The objective is B + linear rho + bend rho^2.
        still, drawn: The joules are still + drawn rho.
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
        """Select one face per device, columns of shape (N,)."""
        at = face * len(face) + np.arange(len(face))
        return Faces(*(column.ravel().take(at) for column in vars(self).values()))


@dataclass(frozen=True)
class PricedOptimum:
    """Each device's own optimum at a price of a joule; `cost` and `face_steps` have shape (3, N), one row per face."""

    face: NDArray[np.intp]
    steps: Array
    joules: float
    bound: float
    cost: Array
    face_steps: Array


def build_faces(terms: HcefTerms) -> Faces:
    """Return the faces of all devices."""
    rho, theta = terms.least
    with np.errstate(all="ignore"):
        full = (terms.deadline_s - terms.send_s) / terms.step_s  # steps in time if theta = 1
        most = (terms.deadline_s - theta * terms.send_s) / terms.step_s
        most = np.where(terms.step_s > 0, most, 1.0)
        full = np.where(terms.step_s > 0, full, np.where(terms.deadline_s >= terms.send_s, np.inf, -np.inf))
        x, y = terms.deadline_s / terms.send_s, terms.step_s / terms.send_s
    count = len(full)
    low = np.stack((np.full(count, rho), np.full(count, rho), np.maximum(rho, full)))
    high = np.clip(np.stack((most, full, most)), -np.inf, 1.0)
    x, y = np.stack((np.full(count, theta), np.ones(count), x)), np.stack((np.zeros(count), np.zeros(count), y))
    exists = (low <= high) & np.isfinite(x) & np.isfinite(y)
    return _build_lines(
        terms,
        (np.where(exists, x, theta), np.where(exists, y, 0.0)),
        np.where(exists, low, rho),
        np.where(exists, high, rho),
    )


def add_level(terms: HcefTerms, faces: Faces, sent: Array) -> Faces:
    """Append one face per device with constant theta.

    Args:
        sent: theta, in time with the fewest steps.
    """
    added = vars(level_faces(terms, sent)).values()
    return Faces(*(np.vstack((old, new)) for old, new in zip(vars(faces).values(), added, strict=True)))


def level_faces(terms: HcefTerms, sent: Array) -> Faces:
    """Build faces with constant theta, of shape (N,) or (levels, N)."""
    with np.errstate(all="ignore"):
        most = np.where(terms.step_s > 0, (terms.deadline_s - sent * terms.send_s) / terms.step_s, 1.0)
    low = np.full(sent.shape, terms.least[0])
    return _build_lines(terms, (sent, np.zeros(sent.shape)), low, np.clip(most, terms.least[0], 1.0))


def _build_lines(terms: HcefTerms, line: tuple[Array, Array], low: Array, high: Array) -> Faces:
    x, y = line
    linear, bend = (2 - x) * terms.noise - 2 * terms.bend, terms.bend + y * terms.noise
    still, drawn = terms.send_joules * x, terms.step_joules - terms.send_joules * y
    drawn = np.where(np.abs(drawn) > ROUNDING * (terms.step_joules + terms.send_joules * y), drawn, 0.0)
    return Faces(x, y, low, high, linear, bend, still, drawn)


def optimize_at_price(terms: HcefTerms, faces: Faces, multiplier: float) -> PricedOptimum:
    """Optimize every device separately at a price of a joule (Lagrangian relaxation)."""
    slope = faces.linear + multiplier * faces.drawn
    with np.errstate(all="ignore"):
        steps = np.where(faces.bend > 0, -slope / (2 * faces.bend), np.where(slope > 0, -np.inf, np.inf))
    steps = np.minimum(np.maximum(steps, faces.low), faces.high)
    cost = (faces.bend * steps + slope) * steps + multiplier * faces.still
    face = np.where(cost[0] <= cost[1], 0, 1)
    face = np.where(cost[2] < np.minimum(cost[0], cost[1]), 2, face)
    at = face, np.arange(len(face))
    joules = float((faces.still[at] + faces.drawn[at] * steps[at]).sum())
    paid = multiplier * terms.energy_joules if multiplier else 0.0  # E may be infinite at price zero
    least = float(cost[at].sum()) + terms.bend * len(face) - paid
    return PricedOptimum(face, steps[at], joules, least, cost, steps)


def solve_on_faces(terms: HcefTerms, faces: Faces, face: NDArray[np.intp]) -> Point | None:
    """Return the best point with each device on a given face; None if the fewest joules there exceed E.

    Args:
        face: Face number of each device.
    """
    lines = faces.only(face)
    low, high, linear, bend, still, drawn = lines.low, lines.high, lines.linear, lines.bend, lines.still, lines.drawn
    free = drawn == 0
    first, last = np.where(drawn < 0, high, low), np.where(drawn < 0, low, high)
    with np.errstate(all="ignore"):
        start = np.where(free, 0.0, (2 * bend * first + linear) / drawn)
        end = np.where(free, 0.0, (2 * bend * last + linear) / drawn)
        alone = np.where(bend > 0, -linear / (2 * bend), np.where(linear > 0, low, high))
    least, most = still + drawn * first, still + drawn * last
    filled = fill(
        Ramps(start, np.maximum(start, end), least, np.where(free, least, most)), terms.energy_joules, most=0.0
    )
    if not filled.fits:
        return None
    with np.errstate(all="ignore"):
        steps = np.where(free, alone, (filled.amount - still) / drawn)
    point = point_on_face(lines, np.clip(steps, low, high), terms)
    return point if total_joules(terms, point) <= terms.energy_joules * (1 + ROUNDING) else None


def point_on_face(lines: Faces, steps: Array, terms: HcefTerms) -> Point:
    """Return the point with the given rho on one face per device, columns of shape (N,)."""
    return steps, np.clip(lines.x - lines.y * steps, terms.least[1], 1.0)


def nearest_faces(faces: Faces, point: Point) -> NDArray[np.intp]:
    """Return the face nearest to each device's point."""
    steps, sent = point
    off = np.abs(sent - (faces.x - faces.y * steps)) + np.abs(steps - np.clip(steps, faces.low, faces.high))
    nearest: NDArray[np.intp] = np.argmin(off, axis=0)
    return nearest


def estimate_price(faces: Faces, point: Point, otherwise: float) -> float:
    """Estimate the price of a joule at a point: median over devices inside their faces.

    Args:
        otherwise: Result if there is no such device.
    """
    steps, sent = point
    lines = faces.only(nearest_faces(faces, point))
    inside = (steps > lines.low * (1 + NEAR)) & (steps < lines.high * (1 - NEAR)) & (lines.drawn != 0)
    inside &= np.abs(sent - (lines.x - lines.y * steps)) <= NEAR
    if not inside.any():
        return otherwise
    slope = -(lines.linear + 2 * lines.bend * steps)[inside] / lines.drawn[inside]
    return float(np.clip(np.median(slope), 0.0, None))
