"""Seeded random draws as functions of their keys.

A device's figures therefore depend neither on the rest of the fleet nor on the order of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from edge_server.plan.simulated_devices import Span, range_ends


def draw_uniform(*keys: object) -> float:
    """Return a number in [0, 1), a hash of the keys."""
    return (xxhash.xxh3_64_intdigest("/".join(map(str, keys)).encode()) >> 11) * 2.0**-53


def draw_within(span: Span, *keys: object) -> float:
    """Return a number drawn uniformly from a range."""
    low, high = range_ends(span)
    return low if low == high else low + (high - low) * draw_uniform(*keys)


def draw_exponential(mean: float, *keys: object) -> float:
    """Return a number drawn from an exponential distribution, such as the power gain of Rayleigh fading."""
    return -mean * math.log1p(-draw_uniform(*keys))


@dataclass(frozen=True)
class Blocks:
    """Figure drawn again every `every_s` seconds and constant in between; same interface as `Curve`.

    Attributes:
        draw: Block number -> value, above zero.
        most: Upper bound on the values.
    """

    draw: Callable[[int], float]
    every_s: float
    most: float = math.inf

    def at(self, t: float) -> float:
        """Return the value at second `t`."""
        return self.draw(math.floor(t / self.every_s))

    def integral(self, t0: float, t1: float) -> float:
        """Return the integral between two seconds."""
        total, block = 0.0, math.floor(t0 / self.every_s)
        while t0 < t1:
            end = min(t1, (block + 1) * self.every_s)
            total += self.draw(block) * (end - t0)
            t0, block = end, block + 1
        return total

    def finish_time(self, t0: float, amount: float) -> float:
        """Return the earliest second by which the integral since `t0` reaches `amount`."""
        block = math.floor(t0 / self.every_s)
        while amount > 0:
            value, end = self.draw(block), (block + 1) * self.every_s
            if amount <= value * (end - t0):
                return min(end, t0 + amount / value)
            amount -= value * (end - t0)
            t0, block = end, block + 1
        return t0
