"""Step function over virtual time: bit/s, watts or hertz.

The integral up to every step is precomputed, so that a transfer or task costs two binary searches, however many steps
it spans.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from edge_server.plan.simulated_devices import AfterEnd


@dataclass(frozen=True)
class Curve:
    """Non-negative step function from second 0 on; create it with `constant` or `steps`.

    Attributes:
        edges: Start of each step, the first at 0, and end of the last; shape (N + 1,).
        values: Value of each step; shape (N,).
        after: Hold the last value, repeat the curve, or stay at zero.
        begin_s: Position of virtual second 0 on the axis of the edges.
    """

    edges: tuple[float, ...]
    values: tuple[float, ...]
    after: AfterEnd = "hold"
    begin_s: float = 0.0
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the steps and sum up the integral to every edge."""
        lengths = [after - before for before, after in pairwise(self.edges)]
        if not self.values or len(lengths) != len(self.values) or self.edges[0] or min(lengths) <= 0:
            raise ValueError("steps must start at 0 and ascend")
        if not all(0 <= value < math.inf for value in self.values):
            raise ValueError("values must be >= 0 and finite")
        if self.after == "repeat" and self.edges[-1] == math.inf:
            raise ValueError("an infinite curve cannot repeat")
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
        """Return the integral from `t0` to `t1` >= `t0`: bits of a link, joules of a power curve."""
        (first_turn, first), (turn, last) = self._locate(t0), self._locate(t1)
        index = bisect_right(self.edges, first) - 1
        if turn == first_turn and index < len(self.values) and last <= self.edges[index + 1]:
            return self.values[index] * (t1 - t0)  # within one step: exact, without the rounding of sums
        full_turns = (turn - first_turn) * self._sums[-1] if turn != first_turn else 0.0
        return full_turns + self._integrate_to(last) - self._integrate_to(first)

    def finish_time(self, t0: float, amount: float) -> float:
        """Return the earliest second by which the integral since `t0` reaches `amount`; infinite if never."""
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
        """Return the curve shifted to start at that second."""
        shifted = copy(self)  # shares the steps: ten thousand devices may use one long trace
        object.__setattr__(shifted, "begin_s", self.begin_s + seconds)
        return shifted

    def scale(self, factor: float) -> Curve:
        """Return the curve with every value multiplied by a factor."""
        return replace(self, values=tuple(factor * value for value in self.values))

    def _locate(self, t: float) -> tuple[float, float]:
        """Return the number of repetitions before second `t`, and the position on the axis of the edges."""
        place = self.begin_s + t
        if self.after != "repeat" or place < self.edges[-1]:
            return 0.0, place
        turn = place // self.edges[-1]
        return turn, min(max(0.0, place - turn * self.edges[-1]), self.edges[-1])

    def _integrate_to(self, place: float) -> float:
        """Return the integral of one repetition up to a position on the axis of the edges."""
        index = bisect_right(self.edges, place) - 1
        if index < len(self.values):
            return self._sums[index] + self.values[index] * (place - self.edges[index])
        return self._sums[-1] + (self.values[-1] * (place - self.edges[-1]) if self.after == "hold" else 0.0)

    def _find_time(self, turn: float, amount: float) -> float:
        """Return the earliest position, repetitions included, whose integral since the start of `turn` is `amount`."""
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
    """Return a curve of one constant value.

    Raises:
        ValueError: The value is negative or not finite.
    """
    return Curve(edges=(0.0, math.inf), values=(value,))


def steps(pairs: Iterable[tuple[float, float]], *, after: AfterEnd = "hold", end_s: float | None = None) -> Curve:
    """Return a curve of steps.

    Args:
        pairs: Start and value of each step; the first starts at second 0.
        end_s: End of the last step; None to repeat the length of the step before.

    Raises:
        ValueError: There are no steps, they do not ascend, or a value is negative or not finite.
    """
    begun = list(pairs)
    if not begun:
        raise ValueError("a curve needs at least one step")
    starts = [float(start) for start, _ in begun]
    if end_s is None:
        end_s = starts[-1] + (starts[-1] - starts[-2] if len(starts) > 1 else 1.0)
    return Curve(edges=(*starts, float(end_s)), values=tuple(float(value) for _, value in begun), after=after)
