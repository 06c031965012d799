"""Counts: how many of n things a share of them is, rounded down or up as on paper: 0.29 of 100 are 29, in binary too.

In binary 0.29 * 100 is 28.999999999999996, and 1 - 0.9 is a little less than a tenth. So what lies within rounding of
a whole number is that number: a billionth, and for large counts a billionth of a thousandth of what comes out.
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
    """Tell whether a share is no larger than another one but for rounding.

    1 - 0.9 is not above 0.1, whichever of the two it is in binary.
    """
    return share <= most + ABSOLUTE
