"""Exact shares of counts: floor and ceiling without binary rounding errors.

0.29 of 100 are 29, although 0.29 * 100 is 28.999999999999996 in binary, and 1 - 0.9 is a little less than a tenth. So
results within rounding of an integer are that integer: within a billionth, and for large counts within 1e-12 of the
result.
"""

from __future__ import annotations

import math

ABSOLUTE, RELATIVE = 1e-9, 1e-12


def floor_share(share: float, count: float) -> int:
    """Return floor(share * count).

    Args:
        share: Such as 0.29; above 1 it is a multiple.
    """
    exact = share * count
    return math.floor(exact + ABSOLUTE + RELATIVE * abs(exact))


def ceil_share(share: float, count: float) -> int:
    """Return ceil(share * count).

    Args:
        share: Such as 0.28; above 1 it is a multiple.
    """
    exact = share * count
    return math.ceil(exact - ABSOLUTE - RELATIVE * abs(exact))


def is_at_most(share: float, most: float) -> bool:
    """Return True if a share is at most another one, up to rounding: 1 - 0.9 is at most 0.1."""
    return share <= most + ABSOLUTE
