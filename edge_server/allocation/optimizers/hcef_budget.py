"""HCEF's D_i and E: budget left for the next edge round.

The rest of the run is assumed to be like this round. (15b), (15c):

    ((total - sum_{c < l} spent^c) / (phi - l) - fixed - sum_{e < r} spent^{l,e}) / (q - r)
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Position in a run.

    Attributes:
        over: l, completed global rounds.
        rounds: phi, total number of global rounds.
        edge_over: r, completed edge rounds of this global round.
        edge_rounds: q, edge rounds per global round.
    """

    over: int
    rounds: int
    edge_over: int = 0
    edge_rounds: int = 1


def remaining(total: float, before: float, place: Place, now: float = 0.0, fixed: float = 0.0) -> float:
    """Return the seconds or joules for the next edge round: negative if overspent, zero after the last round.

    Args:
        total: Budget of the whole run.
        before: Spent in completed global rounds.
        now: Spent in this global round; for a deadline, by the cluster.
        fixed: Fixed cost per global round, such as seconds of the backhaul.
    """
    rounds_left, edge_left = place.rounds - place.over, place.edge_rounds - place.edge_over
    return ((total - before) / rounds_left - now - fixed) / edge_left if rounds_left > 0 and edge_left > 0 else 0.0
