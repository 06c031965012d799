"""A figure over virtual time, constant between its steps: bit/s of a link, watts of a board, hertz of a clock.

The integral of the steps up to every one of them is kept, so that a transfer or a task costs two searches, however
many steps it lasts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

After: TypeAlias = Literal["hold", "repeat", "zero"]
"""What comes behind the last step: its value for ever, everything again, or nothing."""


@dataclass(frozen=True)
class Curve:
    """Values of at least zero from second 0 on; make one by `constant` or `steps`.

    Attributes:
        edges: Where the steps begin, the first at 0, and where the last one ends; of shape (N + 1,).
        values: One for each step; of shape (N,).
        after: What comes behind the last edge.
        begin_s: Where on the edges' axis virtual second 0 lies.
    """

    edges: tuple[float, ...]
    values: tuple[float, ...]
    after: After = "hold"
    begin_s: float = 0.0
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Sum up to every edge; refuse what is no curve."""
        lengths = [after - before for before, after in pairwise(self.edges)]
        if not self.values or len(lengths) != len(self.values) or self.edges[0] or min(lengths) <= 0:
            raise ValueError("the steps must begin at 0, and each one later than the one before")
        if not all(0 <= value < math.inf for value in self.values):
            raise ValueError("values must be >= 0 and finite")
        if self.after == "repeat" and self.edges[-1] == math.inf:
            raise ValueError("what never ends cannot repeat")
        sums = accumulate((v * s if v else 0.0 for v, s in zip(self.values, lengths, strict=True)), initial=0.0)
        object.__setattr__(self, "_sums", tuple(sums))

    @property
    def most(self) -> float:
        """Return the highest value."""
        return max(self.values)

    def at(self, t: float) -> float:
        """Return the value at second `t`."""
        _, place = self._locate(t)
        index = bisect_right(self.edges, place) - 1
        if index < len(self.values):
            return self.values[index]
        return self.values[-1] if self.after == "hold" else 0.0

    def integral(self, t0: float, t1: float) -> float:
        """Return the integral between two seconds, the first not later: bits of a link, joules of watts."""
        (first_turn, first), (turn, last) = self._locate(t0), self._locate(t1)
        index = bisect_right(self.edges, first) - 1
        if turn == first_turn and index < len(self.values) and last <= self.edges[index + 1]:
            return self.values[index] * (t1 - t0)  # within one step: no sum's rounding
        full_turns = (turn - first_turn) * self._sums[-1] if turn != first_turn else 0.0
        return full_turns + self._integrate_to(last) - self._integrate_to(first)

    def when(self, t0: float, amount: float) -> float:
        """Return the earliest second by which the integral since `t0` is `amount`; infinite if it never is."""
        turn, first = self._locate(t0)
        index = bisect_right(self.edges, first) - 1
        value = self.values[index] if index < len(self.values) else self.values[-1] * (self.after == "hold")
        end = self.edges[index + 1] if index < len(self.values) else math.inf
        if amount <= 0:
            return t0
        if value and (took := amount / value) <= end - first:
            return t0 + took
        if end == math.inf:
            return math.inf
        return max(t0, self._find_time(turn, self._integrate_to(first) + amount) - self.begin_s)

    def later(self, seconds: float) -> Curve:
        """Return the curve as it is from that second on."""
        shifted = copy(self)  # shares the steps: a fleet may enter one long trace at ten thousand places
        object.__setattr__(shifted, "begin_s", self.begin_s + seconds)
        return shifted

    def scale(self, factor: float) -> Curve:
        """Return the curve with every value times a factor."""
        return replace(self, values=tuple(factor * value for value in self.values))

    def _locate(self, t: float) -> tuple[float, float]:
        """Return how often everything has repeated by second `t`, and where on the edges' axis that is."""
        place = self.begin_s + t
        if self.after != "repeat" or place < self.edges[-1]:
            return 0.0, place
        turn = place // self.edges[-1]
        return turn, min(max(0.0, place - turn * self.edges[-1]), self.edges[-1])

    def _integrate_to(self, place: float) -> float:
        """Return the integral of the first turn up to a place on the edges' axis."""
        index = bisect_right(self.edges, place) - 1
        if index < len(self.values):
            return self._sums[index] + self.values[index] * (place - self.edges[index])
        return self._sums[-1] + (self.values[-1] * (place - self.edges[-1]) if self.after == "hold" else 0.0)

    def _find_time(self, turn: float, amount: float) -> float:
        """Return the earliest place, turns included, at which the integral since the begin of `turn` is `amount`."""
        total, period = self._sums[-1], self.edges[-1]
        if amount > total and self.after == "repeat":
            if not total:
                return math.inf
            turns = math.ceil(amount / total) - 1
            turn, amount = turn + turns, min(total, amount - turns * total)
        if amount > total:
            rate = self.values[-1] if self.after == "hold" else 0.0
            return period + (amount - total) / rate if rate else math.inf
        index = max(1, bisect_left(self._sums, amount)) - 1
        value = self.values[index]
        offset_s = (amount - self._sums[index]) / value if value else 0.0
        return turn * period * (self.after == "repeat") + min(self.edges[index] + offset_s, self.edges[index + 1])


def constant(value: float) -> Curve:
    """Return a curve that always has one value.

    Raises:
        ValueError: It is below zero or not finite.
    """
    return Curve(edges=(0.0, math.inf), values=(value,))


def steps(pairs: Iterable[tuple[float, float]], *, after: After = "hold", end_s: float | None = None) -> Curve:
    """Return a curve of steps.

    Args:
        pairs: Where each step begins, and its value; the first begins at second 0.
        after: What comes behind the last step.
        end_s: Where the last step ends; None for as long a step as the one before it.

    Raises:
        ValueError: There are none, they do not rise, or a value is below zero or not finite.
    """
    begun = list(pairs)
    if not begun:
        raise ValueError("a curve needs at least one step")
    starts = [float(start) for start, _ in begun]
    if end_s is None:
        end_s = starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else 1.0)
    return Curve(edges=(*starts, float(end_s)), values=tuple(float(value) for _, value in begun), after=after)
