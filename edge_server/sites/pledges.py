"""Energy pledges and grants between sites, by coordinator term (pure functions).

Every site may spend its allowance, its devices' share of the plan's joules. For a round it pledges a part to one
coordinator, for one term, and is granted a part in return. A pledge is journalled before it is sent and never made
again, and grants never exceed the pledges they come from. So however messages are lost, repeated or delayed, and
however sites are partitioned, together they never spend more than the plan has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Key: TypeAlias = tuple[int, int]
"""Round and term."""


def coordinator_of(order: Sequence[str], term: int) -> str:
    """Return the coordinating site of a term."""
    return order[term % len(order)]


def next_term(order: Sequence[str], term: int, reachable: Collection[str]) -> int:
    """Return the next term with a reachable coordinator.

    Args:
        order: The sites, in the plan's order.
        term: The term that is over.
        reachable: Reachable sites, including the caller's.
    """
    later = range(term + 1, term + 1 + len(order))
    return next((candidate for candidate in later if coordinator_of(order, candidate) in reachable), term + 1)


@dataclass(frozen=True)
class EnergyAccount:
    """Joules that a site may spend.

    Attributes:
        allowance: Its devices' share of the plan's joules.
        pledged: Joules pledged, by round and term.
        granted: Joules granted in return, by round and term.
    """

    allowance: float
    pledged: Mapping[Key, float] = field(default_factory=dict)
    granted: Mapping[Key, float] = field(default_factory=dict)

    @property
    def rights(self) -> float:
        """Total joules that its devices may have spent by now."""
        return math.fsum([self.allowance, *self.granted.values(), *(-joules for joules in self.pledged.values())])

    def list_open(self) -> list[tuple[Key, float]]:
        """Return the pledges without a grant, in order."""
        return sorted((key, joules) for key, joules in self.pledged.items() if key not in self.granted)


def pledge(account: EnergyAccount, key: Key, joules: float) -> EnergyAccount:
    """Return the account after a pledge, limited to what it has; a repeated pledge changes nothing.

    Args:
        key: Round and term of the pledge.
    """
    if key in account.pledged:
        return account
    return replace(account, pledged={**account.pledged, key: min(max(0.0, joules), max(0.0, account.rights))})


def credit(account: EnergyAccount, key: Key, joules: float) -> EnergyAccount:
    """Return the account after a grant; one without a pledge, or a repeated one, changes nothing."""
    if key not in account.pledged or key in account.granted or not 0 <= joules < math.inf:
        return account
    return replace(account, granted={**account.granted, key: joules})


def share_out(pledges: Mapping[str, float], needs: Mapping[str, float]) -> dict[str, float]:
    """Return each site's grant from all pledges together: its need, and its part of the surplus.

    If the needs exceed the total, each site gets its part by need. The grants add up to the pledges or, due to
    rounding, to slightly less.

    Args:
        pledges: Joules by site.
        needs: Joules that the decision needs, by site; missing sites need none.
    """
    total = math.fsum(pledges.values())
    demands = {site: max(0.0, needs.get(site, 0.0)) for site in pledges}
    need = math.fsum(demands.values())
    if total <= 0 or not math.isfinite(need):
        return dict(pledges)
    if need > total:
        parts = {site: demands[site] * (total / need) for site in pledges}
    else:
        parts = {site: demands[site] + (total - need) * (pledges[site] / total) for site in pledges}
    over = math.fsum(parts.values())
    while over > total:
        parts = {site: math.nextafter(joules * (total / over), 0.0) for site, joules in parts.items()}
        over = math.fsum(parts.values())
    return parts


@dataclass(frozen=True)
class GrantLog:
    """A coordinator's past decisions.

    Attributes:
        term: The highest known term; never decreases.
        grants: Grants by round and term, for every site whose pledge was used.
    """

    term: int = 0
    grants: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)


def adopt_term(grant_log: GrantLog, term: int) -> GrantLog:
    """Return the log after learning of a term."""
    return replace(grant_log, term=max(grant_log.term, term))


def settle(grant_log: GrantLog, key: Key, grants: Mapping[str, float]) -> GrantLog:
    """Return the log with a decision's grants; earlier decisions stay, and a past term decides nothing.

    Args:
        grants: Joules for every site whose pledge was used.
    """
    if key in grant_log.grants or key[1] < grant_log.term:
        return grant_log
    return replace(adopt_term(grant_log, key[1]), grants={**grant_log.grants, key: dict(grants)})


def find_grant(grant_log: GrantLog, site: str, key: Key, joules: float) -> float | None:
    """Return the grant for a site's pledge; None while that is undecided.

    A pledge that no decision used, and none can use any more, is returned in full.

    Args:
        grant_log: Log of the coordinator that received the pledge.
        joules: The pledged amount, returned if unused.
    """
    if key in grant_log.grants:
        return grant_log.grants[key].get(site, joules)
    return joules if key[1] < grant_log.term else None
