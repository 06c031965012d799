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
from edge_server.allocation.optimizers.hcef_faces import Apart, Faces, add_level, apart, level_faces, on_faces
from edge_server.allocation.optimizers.hcef_few import COLUMNS
from edge_server.allocation.optimizers.hcef_problem import HcefTerms, Point, value

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
    each: Apart
    price: float
    gap: float


def by_changes(given: HcefTerms, faces: Faces, start: Start, nearest: NDArray[np.intp]) -> Iterator[Point]:
    """Yield points in which few devices are on another face, or send at a level between their faces.

    Args:
        start: The faces to begin with.
        nearest: Devices, those first that are nearest to changing.
    """
    devices = nearest[:DEVICES]
    few = replace(given, **{name: getattr(given, name)[devices] for name in COLUMNS})
    levels = _levels(few)
    between = level_faces(few, levels)
    alone = apart(few, between, start.price)
    cost = np.vstack((start.each.cost[:, devices], alone.cost))
    spent = faces.still + faces.drawn * start.each.on_faces
    joules = np.vstack((spent[:, devices], between.still + between.drawn * alone.on_faces))
    own, rows = start.face[devices], np.arange(len(devices))
    left = given.energy_joules - float(spent[start.face, np.arange(len(start.face))].sum())
    for picks in _cheapest(cost - cost[own, rows], joules - joules[own, rows], left, _Rest.of(faces, start)):
        face, sent = start.face.copy(), np.full(len(start.face), given.least[1])
        face[devices] = np.minimum(picks, FACES)
        is_between = picks >= FACES
        sent[devices[is_between]] = levels[picks[is_between] - FACES, rows[is_between]]
        if found := on_faces(given, add_level(given, faces, sent), face):
            yield found


def _levels(few: HcefTerms) -> Array:
    """Return what devices may send between their faces, of shape (levels, N)."""
    theta = few.least[1]
    with np.errstate(all="ignore"):
        most = np.where(few.send_s > 0, (few.deadline_s - few.least[0] * few.step_s) / few.send_s, 1.0)
    part = np.arange(1, LEVELS + 1)[:, None] / (LEVELS + 1)
    return np.asarray(theta + part * (np.clip(most, theta, 1.0) - theta))


@dataclass(frozen=True)
class _Rest:
    """What it costs all others to take up some joules: about their square times `bend`, at most `price` of each."""

    bend: float
    price: float
    gap: float

    @classmethod
    def of(cls, faces: Faces, start: Start) -> _Rest:
        one, rows = faces.only(start.face), np.arange(len(start.face))
        steps = start.each.on_faces[start.face, rows]
        inside = (steps > one.low) & (steps < one.high) & (one.bend > 0)
        give = float((one.drawn[inside] ** 2 / (2 * one.bend[inside])).sum())
        return cls(1 / (2 * give) if give > 0 else np.inf, start.price, max(start.gap, 0.0))

    def cost(self, left: Array) -> Array:
        """Return it for joules that are left; for those that lack, below zero."""
        with np.errstate(invalid="ignore"):
            square = np.where(left == 0, 0.0, self.bend * left**2)
        return np.where(left > 0, np.minimum(square, self.price * left), square)

    @property
    def width(self) -> float:
        """Joules left or overdrawn that are worth looking at."""
        over = (self.gap / self.bend) ** 0.5 if self.bend < np.inf else 0.0
        return max(over, self.gap / self.price if self.price > 0 else 0.0)


def _cheapest(cost: Array, joules: Array, left: float, rest: _Rest) -> Iterator[NDArray[np.intp]]:
    """Yield choices of an option for each device, the ones that cost about the least first.

    Args:
        cost: Of each option, of shape (options, N).
        joules: Of each option, likewise, beyond those of a device's own.
        left: Joules that are left at its own.
        rest: What joules that are left or lack cost.
    """
    unit = (2 * rest.width + float(np.abs(joules).max(initial=0.0)) + abs(left)) / BINS
    if not unit > 0:
        return
    least, stages = np.full(2 * BINS + 1, np.inf), []
    least[BINS + round(left / unit)] = 0.0
    moves = np.rint(joules / unit).astype(int)
    places, edge = np.arange(len(least)), int(np.abs(moves).max(initial=0))
    for device in range(cost.shape[1]):
        reach = np.full(len(least) + 2 * edge, np.inf)  # no more can be left, or overdrawn, than the ends say
        reach[edge : edge + len(least)] = least
        moved = reach[places + edge + moves[:, device, None]] + cost[:, device, None]
        picks = moved.argmin(axis=0)
        stages.append(picks)
        least = moved[picks, places]
    total = least + rest.cost(unit * np.arange(-BINS, BINS + 1, dtype=np.float64))
    seen: set[bytes] = set()
    for end in np.argsort(total, kind="stable")[: 4 * TRIED]:
        if not np.isfinite(total[end]) or len(seen) == TRIED:
            return
        at, chosen = int(end), np.zeros(cost.shape[1], np.intp)
        for device in reversed(range(cost.shape[1])):
            chosen[device] = stages[device][at]
            at += int(moves[chosen[device], device])
        if chosen.tobytes() not in seen:
            seen.add(chosen.tobytes())
            yield chosen


def search_level(
    given: HcefTerms, faces: Faces, found: tuple[NDArray[np.intp], Array], *, device: int, worth: float
) -> Iterator[Point]:
    """Yield points with one device that sends at other levels, by golden section, while they may be worth less.

    Args:
        found: The face that each device is on, `FACES` for none of them, and what it sends then.
        worth: Objective of the best point that is known.
    """
    face, sent = found[0].copy(), found[1]
    face[device] = FACES
    apart_by = float(np.ptp(_levels(given)[:2, device]))
    low, high = max(given.least[1], sent[device] - apart_by), min(1.0, sent[device] + apart_by)

    levels, wide = sent.copy(), add_level(given, faces, sent)

    def at(level: float) -> tuple[float, Point | None]:
        levels[device] = level
        for line, new in zip(vars(wide).values(), vars(level_faces(given, levels)).values(), strict=True):
            line[FACES] = new
        point = on_faces(given, wide, face)
        return (float(value(given, point).sum()) if point else np.inf), point

    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = at(left), at(right)
    for step in range(NARROWINGS):
        least, most = sorted((at_left[0], at_right[0]))
        if most - least <= SAME * abs(least) or (step == HOPELESS and least > worth):
            break
        if at_left[0] <= at_right[0]:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = at(right)
    for _, point in (at_left, at_right):
        if point:
            yield point
