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
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, joules, value

LEVELS, OF_EACH = 129, 10
NARROWER, TIMES = 4, 6
NEAR = 1e-9
COLUMNS = ("step_s", "send_s", "step_joules", "send_joules", "deadline_s")


def shared_out(given: HcefTerms, point: Point, devices: NDArray[np.intp]) -> Iterator[Point]:
    """Yield better and better points where these devices share out anew what they spend at a point.

    First from a grid of all their joules beyond their floors, then from finer ones around what was found.

    Args:
        point: rho and theta to begin with.
        devices: Among which joules are shared out anew.
    """
    few = replace(given, **{name: getattr(given, name)[devices] for name in COLUMNS})
    floors = few.least[0] * few.step_joules + few.least[1] * few.send_joules
    energy = given.energy_joules - joules(given, point) + joules(few, (point[0][devices], point[1][devices]))
    room = max(LEVELS, OF_EACH * len(devices))
    unit = max(0.0, energy - float(floors.sum())) / room
    for steps, sent in _finer(few, energy, (floors, unit), np.arange(room + 1)):
        all_steps, all_sent = point[0].copy(), point[1].copy()
        all_steps[devices], all_sent[devices] = steps, sent
        yield all_steps, all_sent


def narrowed(given: HcefTerms, spent: Array, unit: float) -> Iterator[Point]:
    """Yield better and better points where all devices share out anew, from about what they spend.

    Args:
        spent: Joules of each, about.
        unit: Of joules; each device's may be some of them off.
    """
    yield from _finer(given, given.energy_joules, (spent, unit), np.arange(-2 * NARROWER, 2 * NARROWER + 1))


def _finer(few: HcefTerms, energy: float, start: tuple[Array, float], options: NDArray[np.intp]) -> Iterator[Point]:
    """Yield the best of what devices can spend, so many units more than at the start; then of finer units around it."""
    floors = few.least[0] * few.step_joules + few.least[1] * few.send_joules
    (spent, unit), rows = start, np.arange(len(floors))
    for _ in range(TIMES):
        offered = spent[:, None] + unit * options
        steps, sent = within(few, offered)
        allowed = offered >= floors[:, None] * (1 - 1e-12)
        left = energy - float(spent.sum()) + unit * abs(int(options[0])) * len(floors)
        picks = _picked(
            np.where(allowed, value(few, (steps, sent)), np.inf), int(left / unit + NEAR) if unit > 0 else 0
        )
        yield steps[rows, picks], sent[rows, picks]
        spent, unit = offered[rows, picks], unit / NARROWER
        options = np.arange(-2 * NARROWER, 2 * NARROWER + 1)


@dataclass(frozen=True)
class Cells:
    """A bound from below by cells of joules.

    Attributes:
        bound: No allocation is below it.
        joules: Of each device at the lower end of its cell, in what the bound is of; None where nothing can be better
            than what there is.
    """

    bound: float
    joules: Array | None = None


def bound_by_cells(given: HcefTerms, faces: tuple[Array, Array], price: float, most: float, count: int) -> Cells:
    """Bound P2 from below.

    Args:
        faces: Joules and objective of what is best for each device on each of its faces at the price, of shape (3, N).
        price: lambda, what a joule costs.
        most: The objective of an allocation that there is: what cannot be better is not looked at.
        count: Cells of all joules beyond the floors.
    """
    floors = given.least[0] * given.step_joules + given.least[1] * given.send_joules
    room = given.energy_joules - float(floors.sum())
    unit, most_of_one = room / count, float(np.max(given.step_joules + given.send_joules - floors, initial=0.0))
    levels = floors[:, None] + unit * np.arange(1 + max(1, min(count, int(most_of_one / unit) + 1)))
    worth = value(given, within(given, levels)) + price * levels
    worth = np.minimum(worth[:, :-1], worth[:, 1:])
    spent, least = faces[0], faces[1] + price * faces[0]
    places, rows = (spent - floors) / unit, np.arange(len(floors))
    for off in (-NEAR, NEAR):  # at an end between two cells it is in both
        cell = np.clip(np.floor(places + off), 0, worth.shape[1] - 1).astype(np.intp)
        for face in range(len(cell)):
            worth[rows, cell[face]] = np.minimum(worth[rows, cell[face]], least[face])
    paid = price * given.energy_joules
    lowest = worth.min(axis=1)
    spare = most + paid - float(lowest.sum())
    unspent = price * np.maximum(0.0, room - unit * (np.arange(count + 1) + len(floors)))
    found = _least_sum([one - low for one, low in zip(worth, lowest, strict=True)], spare, unspent)
    if found is None:
        return Cells(most)
    total, cells = found
    return Cells(min(most, float(lowest.sum()) + total - paid), floors + unit * cells)


def _least_sum(rows: list[Array], spare: float, besides: Array) -> tuple[float, NDArray[np.intp]] | None:
    """Return the least sum of one number of each row and of what their places together cost; None if above `spare`.

    Args:
        rows: Numbers that are not below zero.
        spare: What is above it is not looked at.
        besides: What each sum of places costs, as far as there is room for them.
    """
    room = len(besides) - 1
    least, stages, allowed = np.zeros(1), [], [np.flatnonzero(row <= spare) for row in rows]
    first = [int(one[0]) if len(one) else room + 1 for one in allowed]
    left = room - sum(first)
    if left < 0:
        return None
    for row, places, start in zip(rows, allowed, first, strict=True):
        stages.append(least)
        longer = np.full(min(len(least) + int(places[-1]) - start, left + 1), np.inf)
        for place in places[: np.searchsorted(places, start + len(longer))]:
            into = longer[place - start : place - start + len(least)]
            np.minimum(into, least[: len(into)] + row[place], out=into)
        least = longer
    least = least + besides[sum(first) : sum(first) + len(least)]
    at, chosen = int(np.argmin(least)), np.zeros(len(rows), np.intp)
    total = float(least[at])
    for number in reversed(range(len(rows))):
        before, places = stages[number], allowed[number]
        apart = at - (places - first[number])
        sums = np.where((apart >= 0) & (apart < len(before)), before[np.clip(apart, 0, len(before) - 1)], np.inf)
        pick = int(np.argmin(sums + rows[number][places]))
        chosen[number], at = places[pick], int(apart[pick])
    return (total, chosen) if total <= spare else None


def _picked(worth: Array, room: int) -> NDArray[np.intp]:
    """Return an option of each row, the least sum of worths with a sum of options up to `room`."""
    rows, count = worth.shape
    room = min(room, rows * (count - 1))
    apart = np.arange(room + 1)[:, None] - np.arange(count)
    least, picks = np.zeros(room + 1), []
    for one in worth:
        sums = np.where(apart >= 0, least[np.maximum(apart, 0)] + one, np.inf)
        picks.append(np.argmin(sums, axis=1))
        least = sums.min(axis=1)
    left, chosen = room, np.zeros(rows, np.intp)
    for row in reversed(range(rows)):
        chosen[row] = picks[row][left]
        left -= int(chosen[row])
    return chosen


def within(given: HcefTerms, limit: Array) -> Point:
    """Return the best point of each device that spends no more than these joules, of shape (N, levels)."""
    rho, theta = given.least
    step_s, send_s, step_joules, send_joules, deadline = (
        one[:, None] for one in (given.step_s, given.send_s, given.step_joules, given.send_joules, given.deadline_s)
    )
    with np.errstate(all="ignore"):
        ones = np.ones_like(limit)
        x = np.stack((ones, deadline / send_s * ones, limit / send_joules))  # theta <= x - y rho, three times
        y = np.stack((0 * ones, step_s / send_s * ones, step_joules / send_joules * ones))
        limits = ((deadline - theta * send_s) / step_s, (limit - theta * send_joules) / step_joules)
        most = np.clip(np.fmin(np.fmin(ones, limits[0]), limits[1]), rho, 1.0)
        turns = [
            (2 * given.bend - (2 - a) * given.noise) / (2 * (given.bend + b * given.noise))
            for a, b in zip(x, y, strict=True)
        ]
        kinks = [(x[i] - x[j]) / (y[i] - y[j]) for i, j in combinations(range(3), 2)]
        steps = np.stack([*turns, *kinks, rho * ones, most])
        steps = np.clip(np.where(np.isnan(steps), rho, steps), rho, most)
        sent = np.fmin.reduce([a - b * steps for a, b in zip(x, y, strict=True)])
    sent = np.clip(sent, theta, 1.0)
    pick = np.argmin(value(given, (steps, sent)), axis=0)[None]
    return np.take_along_axis(steps, pick, 0)[0], np.take_along_axis(sent, pick, 0)[0]
