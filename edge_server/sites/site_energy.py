"""Energy account of a site: journalled pledges and grants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from edge_server.allocation.inputs import SPREAD, Case
from edge_server.allocation.optimizers.hcef_budget import Place, remaining
from edge_server.journal.decision import Granted, Pledged
from edge_server.sites import pledges
from edge_server.sites.cases import ROUND_JOULES
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.pledges import EnergyAccount, Key, coordinator_of
from shared.errors import WireError
from shared.protocol.peers import MOST_ASKED, Joules

ROUNDING = 1 + 1e-9


@dataclass
class SiteEnergy:
    """One site's account.

    Attributes:
        place: Returns the run's progress at a round.
        allowance: Joules that this site's devices may spend in the run, their share of the plan's; 0 for no budget.
        joules: The plan's joules: no pledge and no grant may exceed them.
    """

    identity: SiteIdentity
    services: SiteServices
    place: Callable[[int], Place]
    allowance: float = 0.0
    joules: float = 0.0
    account: EnergyAccount = field(init=False)

    def __post_init__(self) -> None:
        self.account = EnergyAccount(self.allowance)

    def restore(self, record: Pledged | Granted) -> None:
        """Restore a journalled pledge or grant."""
        key = (record.round, record.term)
        if isinstance(record, Pledged):
            self.account = replace(self.account, pledged={**self.account.pledged, key: record.joules})
        else:
            self.account = pledges.credit(self.account, key, record.joules)

    def require(self, joules: Iterable[float]) -> None:
        """Refuse a pledge or grant above the plan's joules.

        Raises:
            WireError: One is.
        """
        if over := [amount for amount in joules if not 0 <= amount <= self.joules * ROUNDING]:
            raise WireError(f"{over[0]:g} J exceed the plan's {self.joules:g} J", reason="joules")

    async def pledge(self, case: Case, key: Key) -> float | None:
        """Journal and pledge this round's part of our joules; None without a limit."""
        if ROUND_JOULES not in case.limits:
            return None
        if key not in self.account.pledged:
            account = pledges.pledge(self.account, key, self.round_share(case, key[0]))
            await self.services.keep(
                Pledged(round=key[0], term=key[1], joules=account.pledged[key], at=self.services.clock())
            )
            self.account = account
        return self.account.pledged[key]

    def round_share(self, case: Case, number: int) -> float:
        """Return this round's share of our joules; the sum over all sites is (15c), which is linear in them."""
        spent_joules = case.limits.get("spent_joules", 0.0)
        joules_before = case.limits.get("before_joules", spent_joules)
        even = remaining(self.account.rights, joules_before, self.place(number), spent_joules - joules_before)
        return max(0.0, even + case.limits.get(SPREAD, 0.0))

    async def credit(self, key: Key, joules: float | None) -> None:
        """Journal and book a grant."""
        if joules is None:
            return
        account = pledges.credit(self.account, key, joules)
        if account is not self.account:
            await self.services.keep(Granted(round=key[0], term=key[1], joules=joules, at=self.services.clock()))
            self.account = pledges.credit(self.account, key, joules)

    def list_open(self, lead: str, key: Key) -> tuple[Joules, ...]:
        """Return earlier pledges to a coordinator that it has not answered."""
        open_ones = ((pledge_key, joules) for pledge_key, joules in self.account.list_open() if pledge_key != key)
        order = self.identity.order
        unsettled = [(*pledged, joules) for pledged, joules in open_ones if coordinator_of(order, pledged[1]) == lead]
        return tuple(unsettled[-MOST_ASKED:])
