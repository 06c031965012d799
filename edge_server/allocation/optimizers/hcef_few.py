"""HCEF's P2 for few devices: the joules of each from a grid, by dynamic programming, the rest of P2 exactly.

phi_n(J) = min (2 - theta) rho A + B (1 - rho)^2,  rho a_n + theta e_n <= J, and in time: convex in rho
minimise sum_n phi_n(J_n),  sum_n J_n <= E
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, joules, value

LEVELS, OF_EACH = 129, 10
NARROWER, TIMES = 4, 6
COLUMNS = ("step_s", "send_s", "step_joules", "send_joules", "deadline_s")


def shared_out(given: HcefTerms, point: Point, devices: NDArray[np.intp]) -> Iterator[Point]:
    """Yield better and better points where these devices share out anew what they spend at a point.

    First from a grid of all their joules beyond their floors, then from finer ones around what was found.

    Args:
        given: The problem.
        point: rho and theta to begin with.
        devices: Among which joules are shared out anew.
    """
    few = replace(given, **{name: getattr(given, name)[devices] for name in COLUMNS})
    floors = few.least[0] * few.step_joules + few.least[1] * few.send_joules
    energy = given.energy_joules - joules(given, point) + joules(few, (point[0][devices], point[1][devices]))
    room = max(LEVELS, OF_EACH * len(devices))
    unit = max(0.0, energy - float(floors.sum())) / room
    spent, options = floors, np.arange(room + 1)
    rows = np.arange(len(floors))
    for _ in range(TIMES):
        offered = spent[:, None] + unit * options
        steps, sent = within(few, offered)
        allowed = offered >= floors[:, None] * (1 - 1e-12)
        picks = _picked(np.where(allowed, value(few, (steps, sent)), np.inf), room)
        all_steps, all_sent = point[0].copy(), point[1].copy()
        all_steps[devices], all_sent[devices] = steps[rows, picks], sent[rows, picks]
        yield all_steps, all_sent
        spent, unit = offered[rows, picks], unit / NARROWER
        options = np.arange(-2 * NARROWER, 2 * NARROWER + 1)
        left = energy - float(spent.sum())
        room = 2 * NARROWER * len(floors) + (int(left / unit) if unit > 0 and left > 0 else 0)


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
