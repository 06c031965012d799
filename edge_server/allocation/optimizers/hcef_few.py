"""HCEF's P2 for few devices: dynamic programming over a grid of joules.

Given its joules, each device is solved exactly:

    phi_n(J) = min (2 - theta) rho A + B (1 - rho)^2,  rho a_n + theta e_n <= J, and in time: convex in rho
    minimise sum_n phi_n(J_n),  sum_n J_n <= E

The same with cells in place of levels bounds P2 from below. For device n, c_n is the number of whole units u by which
its joules exceed those of its floors, so that sum_n c_n <= (E - sum_n floors_n) / u. At a price lambda of a joule,

    least of P2  >=  min sum_n r_n(c_n) - lambda min(E, sum_n floors_n + u sum_n (c_n + 1))
    r_n(c) = min of phi_n(J) + lambda J in the cell c

where phi_n + lambda J is least at an end of the cell or on a face (`hcef_joint`) within it. The rounding error falls
with the square of u at the price of the optimum; a bound at lambda alone misses the loss of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, objective_terms, total_joules

LEVELS, OF_EACH = 129, 10
NARROWER, TIMES = 4, 6
NEAR = 1e-9
COLUMNS = ("step_s", "send_s", "step_joules", "send_joules", "deadline_s")


def redistribute_joules(terms: HcefTerms, point: Point, devices: NDArray[np.intp]) -> Iterator[Point]:
    """Redistribute the joules of some devices at a point; yields improving points.

    Starts with a grid of all their joules beyond the floors, followed by finer grids around the result.

    Args:
        devices: Devices among which joules are redistributed.
    """
    few = replace(terms, **{name: getattr(terms, name)[devices] for name in COLUMNS})
    floors = few.least[0] * few.step_joules + few.least[1] * few.send_joules
    energy = (
        terms.energy_joules - total_joules(terms, point) + total_joules(few, (point[0][devices], point[1][devices]))
    )
    room = max(LEVELS, OF_EACH * len(devices))
    unit = max(0.0, energy - float(floors.sum())) / room
    for steps, sent in _refine(few, energy, (floors, unit), np.arange(room + 1)):
        all_steps, all_sent = point[0].copy(), point[1].copy()
        all_steps[devices], all_sent[devices] = steps, sent
        yield all_steps, all_sent


def refine_around(terms: HcefTerms, joules: Array, unit: float) -> Iterator[Point]:
    """Redistribute the joules of all devices near an approximate solution; yields improving points.

    Args:
        joules: Approximate joules of each device.
        unit: Step of the first grid, in joules.
    """
    yield from _refine(terms, terms.energy_joules, (joules, unit), np.arange(-2 * NARROWER, 2 * NARROWER + 1))


def _refine(few: HcefTerms, energy: float, start: tuple[Array, float], options: NDArray[np.intp]) -> Iterator[Point]:
    """Yield the best point on a grid around the start, then on finer grids around each result."""
    floors = few.least[0] * few.step_joules + few.least[1] * few.send_joules
    (joules, unit), rows = start, np.arange(len(floors))
    for _ in range(TIMES):
        offered = joules[:, None] + unit * options
        steps, sent = best_within(few, offered)
        allowed = offered >= floors[:, None] * (1 - 1e-12)
        joules_left = energy - float(joules.sum()) + unit * abs(int(options[0])) * len(floors)
        picks = _pick_options(
            np.where(allowed, objective_terms(few, (steps, sent)), np.inf),
            int(joules_left / unit + NEAR) if unit > 0 else 0,
        )
        yield steps[rows, picks], sent[rows, picks]
        joules, unit = offered[rows, picks], unit / NARROWER
        options = np.arange(-2 * NARROWER, 2 * NARROWER + 1)


@dataclass(frozen=True)
class Cells:
    """Lower bound by cells of joules.

    Attributes:
        bound: Lower bound of the objective.
        joules: Lower end of each device's cell in the choice that attains the bound; None if no choice can beat the
            known allocation.
    """

    bound: float
    joules: Array | None = None


def bound_by_cells(terms: HcefTerms, faces: tuple[Array, Array], price: float, most: float, count: int) -> Cells:
    """Compute a lower bound of P2.

    Args:
        faces: Joules and objective of each device's optimum on each face at the price, of shape (3, N).
        price: lambda, price of a joule.
        most: Objective of a known allocation; worse choices are pruned.
        count: Number of cells into which the joules beyond the floors are divided.
    """
    floors = terms.least[0] * terms.step_joules + terms.least[1] * terms.send_joules
    room = terms.energy_joules - float(floors.sum())
    unit, most_of_one = room / count, float(np.max(terms.step_joules + terms.send_joules - floors, initial=0.0))
    levels = floors[:, None] + unit * np.arange(1 + max(1, min(count, int(most_of_one / unit) + 1)))
    worth = objective_terms(terms, best_within(terms, levels)) + price * levels
    worth = np.minimum(worth[:, :-1], worth[:, 1:])
    face_joules, least = faces[0], faces[1] + price * faces[0]
    places, rows = (face_joules - floors) / unit, np.arange(len(floors))
    for off in (-NEAR, NEAR):  # a point between two cells belongs to both
        cell = np.clip(np.floor(places + off), 0, worth.shape[1] - 1).astype(np.intp)
        for face in range(len(cell)):
            worth[rows, cell[face]] = np.minimum(worth[rows, cell[face]], least[face])
    paid = price * terms.energy_joules
    lowest = worth.min(axis=1)
    spare = most + paid - float(lowest.sum())
    unspent = price * np.maximum(0.0, room - unit * (np.arange(count + 1) + len(floors)))
    cheapest = _least_sum([costs - low for costs, low in zip(worth, lowest, strict=True)], spare, unspent)
    if cheapest is None:
        return Cells(most)
    total, cells = cheapest
    return Cells(min(most, float(lowest.sum()) + total - paid), floors + unit * cells)


def _least_sum(rows: list[Array], spare: float, besides: Array) -> tuple[float, NDArray[np.intp]] | None:
    """Pick one number per row with the least sum, including the cost of the sum of their indices.

    Args:
        rows: Non-negative numbers.
        spare: Upper limit of the sum; None is returned above it.
        besides: Cost of each sum of indices; its length limits that sum.
    """
    room = len(besides) - 1
    least, stages, allowed = np.zeros(1), [], [np.flatnonzero(row <= spare) for row in rows]
    first = [int(places[0]) if len(places) else room + 1 for places in allowed]
    room_left = room - sum(first)
    if room_left < 0:
        return None
    for row, places, start in zip(rows, allowed, first, strict=True):
        stages.append(least)
        longer = np.full(min(len(least) + int(places[-1]) - start, room_left + 1), np.inf)
        for place in places[: np.searchsorted(places, start + len(longer))]:
            into = longer[place - start : place - start + len(least)]
            np.minimum(into, least[: len(into)] + row[place], out=into)
        least = longer
    least = least + besides[sum(first) : sum(first) + len(least)]
    at, chosen = int(np.argmin(least)), np.zeros(len(rows), np.intp)
    total = float(least[at])
    for number in reversed(range(len(rows))):
        before, places = stages[number], allowed[number]
        offsets = at - (places - first[number])
        sums = np.where((offsets >= 0) & (offsets < len(before)), before[np.clip(offsets, 0, len(before) - 1)], np.inf)
        pick = int(np.argmin(sums + rows[number][places]))
        chosen[number], at = places[pick], int(offsets[pick])
    return (total, chosen) if total <= spare else None


def _pick_options(worth: Array, room: int) -> NDArray[np.intp]:
    """Pick one option per row with the least total worth, such that the option numbers sum to at most `room`."""
    rows, count = worth.shape
    room = min(room, rows * (count - 1))
    offsets = np.arange(room + 1)[:, None] - np.arange(count)
    least, picks = np.zeros(room + 1), []
    for row_worth in worth:
        sums = np.where(offsets >= 0, least[np.maximum(offsets, 0)] + row_worth, np.inf)
        picks.append(np.argmin(sums, axis=1))
        least = sums.min(axis=1)
    room_left, chosen = room, np.zeros(rows, np.intp)
    for row in reversed(range(rows)):
        chosen[row] = picks[row][room_left]
        room_left -= int(chosen[row])
    return chosen


def best_within(terms: HcefTerms, limit: Array) -> Point:
    """Return each device's best point within a limit of joules, of shape (N, levels)."""
    rho, theta = terms.least
    step_s, send_s, step_joules, send_joules, deadline = (
        column[:, None]
        for column in (terms.step_s, terms.send_s, terms.step_joules, terms.send_joules, terms.deadline_s)
    )
    with np.errstate(all="ignore"):
        unit = np.ones_like(limit)
        x = np.stack((unit, deadline / send_s * unit, limit / send_joules))  # three limits theta <= x - y rho
        y = np.stack((0 * unit, step_s / send_s * unit, step_joules / send_joules * unit))
        limits = ((deadline - theta * send_s) / step_s, (limit - theta * send_joules) / step_joules)
        most = np.clip(np.fmin(np.fmin(unit, limits[0]), limits[1]), rho, 1.0)
        turns = [
            (2 * terms.bend - (2 - a) * terms.noise) / (2 * (terms.bend + b * terms.noise))
            for a, b in zip(x, y, strict=True)
        ]
        kinks = [(x[i] - x[j]) / (y[i] - y[j]) for i, j in combinations(range(3), 2)]
        steps = np.stack([*turns, *kinks, rho * unit, most])
        steps = np.clip(np.where(np.isnan(steps), rho, steps), rho, most)
        sent = np.fmin.reduce([a - b * steps for a, b in zip(x, y, strict=True)])
    sent = np.clip(sent, theta, 1.0)
    pick = np.argmin(objective_terms(terms, (steps, sent)), axis=0)[None]
    return np.take_along_axis(steps, pick, 0)[0], np.take_along_axis(sent, pick, 0)[0]
