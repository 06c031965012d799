"""Terms, pledges and grants: who coordinates, and whose joules he may give away. Pure functions over what is journaled.

Every site may spend its allowance, its devices' share of the plan's joules. For a round it pledges a part to one
coordinator, for one term; what it is granted comes back to it. A pledge is put aside before it is told and never
pledged again, and grants are at most the pledges they come from: so whatever messages are lost, repeated or late, and
however the sites are cut off from each other, together they never may spend more than the plan has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Key: TypeAlias = tuple[int, int]
"""Round and term."""


def leader(order: Sequence[str], term: int) -> str:
    """Return the site that coordinates in a term."""
    return order[term % len(order)]


def next_term(order: Sequence[str], term: int, there: Collection[str]) -> int:
    """Return the next term whose coordinator is there.

    Args:
        order: The sites, as the plan has them.
        term: The one that is over.
        there: The sites that can be spoken to; the one that asks is among them.
    """
    later = range(term + 1, term + 1 + len(order))
    return next((one for one in later if leader(order, one) in there), term + 1)


@dataclass(frozen=True)
class Purse:
    """What a site may spend of the plan's joules.

    Attributes:
        allowance: Its devices' share of them.
        pledged: What it has put aside, by round and term.
        granted: What came back for that.
    """

    allowance: float
    pledged: Mapping[Key, float] = field(default_factory=dict)
    granted: Mapping[Key, float] = field(default_factory=dict)

    @property
    def rights(self) -> float:
        """Joules that its devices may have spent in all, by now."""
        return math.fsum([self.allowance, *self.granted.values(), *(-one for one in self.pledged.values())])

    def unanswered(self) -> list[tuple[Key, float]]:
        """Return the pledges of which nobody has told what became, in order."""
        return sorted((key, joules) for key, joules in self.pledged.items() if key not in self.granted)


def pledge(purse: Purse, key: Key, joules: float) -> Purse:
    """Return the purse after a pledge, which is never more than it has; one that was made stays as it was.

    Args:
        key: For which round and term.
    """
    if key in purse.pledged:
        return purse
    return replace(purse, pledged={**purse.pledged, key: min(max(0.0, joules), max(0.0, purse.rights))})


def credit(purse: Purse, key: Key, joules: float) -> Purse:
    """Return the purse after a grant; one for what was never pledged, or that came before, changes nothing."""
    if key not in purse.pledged or key in purse.granted or not 0 <= joules < math.inf:
        return purse
    return replace(purse, granted={**purse.granted, key: joules})


def share_out(pledges: Mapping[str, float], needs: Mapping[str, float]) -> dict[str, float]:
    """Return what each site is granted of all pledges together: what it needs, and its part of what is left.

    Where they need more than there is, each has its part by need. The grants add up to the pledges or, for rounding,
    to a little less.

    Args:
        pledges: Joules by site.
        needs: What the decision takes, by site; one that is not here needs none.
    """
    total = math.fsum(pledges.values())
    wanted = {site: max(0.0, needs.get(site, 0.0)) for site in pledges}
    need = math.fsum(wanted.values())
    if total <= 0 or not math.isfinite(need):
        return dict(pledges)
    if need > total:
        parts = {site: wanted[site] * (total / need) for site in pledges}
    else:
        parts = {site: wanted[site] + (total - need) * (pledges[site] / total) for site in pledges}
    over = math.fsum(parts.values())
    while over > total:
        parts = {site: math.nextafter(one * (total / over), 0.0) for site, one in parts.items()}
        over = math.fsum(parts.values())
    return parts


@dataclass(frozen=True)
class Book:
    """What a site has decided as coordinator.

    Attributes:
        term: The highest that it knows; it only grows.
        grants: By round and term, to every site whose pledge the decision took.
    """

    term: int = 0
    grants: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)


def adopt(book: Book, term: int) -> Book:
    """Return the book after hearing of a term."""
    return replace(book, term=max(book.term, term))


def settle(book: Book, key: Key, grants: Mapping[str, float]) -> Book:
    """Return the book with a decision's grants; what was decided before stays, and a past term decides nothing.

    Args:
        grants: To every site whose pledge was taken.
    """
    if key in book.grants or key[1] < book.term:
        return book
    return replace(adopt(book, key[1]), grants={**book.grants, key: dict(grants)})


def grant_for(book: Book, site: str, key: Key, joules: float) -> float | None:
    """Return what becomes of a site's pledge; None while that is open.

    One that no decision took, and that none can take any more, comes back whole.

    Args:
        book: Of the coordinator whom it was pledged to.
        joules: How much it was.
    """
    if key in book.grants:
        return book.grants[key].get(site, joules)
    return joules if key[1] < book.term else None
