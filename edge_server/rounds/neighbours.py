"""The other edge servers of a run, as the rounds of one site see them: who decides for all, and who mixes models.

What implements it speaks with them over brokers, or in one virtual time; see `edge_server.sites`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Decision
from edge_server.plan.devices import expanded
from edge_server.plan.plan import Plan
from edge_server.plan.sites import devices_by_site
from shared.errors import ConfigError
from shared.tensors.tree import State


class Neighbours(Protocol):
    """What one site's rounds ask of the others'. A round that is gone on with after a restart asks again."""

    async def begin(self, number: int) -> None:
        """Tell them which round begins here, or is gone on with."""
        ...

    async def decide(self, case: Case, number: int) -> Decision:
        """Return what is decided for this site's devices, in place of `allocation.coordinator.decide`.

        Args:
            case: Of this site's devices.
            number: Of the round. Asked again, it gives the same decision.
        """
        ...

    async def mix(self, number: int, state: State) -> State:
        """Return a site's state after a gossip step; `Algorithm.mixing` says what of it is mixed.

        Called once the round has a new model, and before that is kept, recorded or evaluated: a server that was killed
        meanwhile aggregates the same updates again and mixes again.

        Args:
            number: Of the round, the last edge round of its global round.
        """
        ...

    async def leave(self) -> None:
        """Tell the others that the run has ended here, by its plan or before, and that nobody need wait for it."""
        ...


def plan_of_site(plan: Plan, site: str) -> Plan:
    """Return the plan that one site acts by: of the budget of joules it has the share of its devices.

    Raises:
        ConfigError: The plan has sites, and that is none of them.
    """
    if not plan.sites:
        return plan
    if site not in plan.sites.clusters:
        known = ", ".join(plan.sites.names)
        raise ConfigError(f"site {site!r}: plan {plan.name!r} has no such site; known: {known}")
    if plan.budget.joules is None:
        return plan
    devices = [device.name for device in expanded(plan.device)]
    joules = plan.budget.joules * len(devices_by_site(plan.sites, devices)[site]) / len(devices)
    return msgspec.structs.replace(plan, budget=msgspec.structs.replace(plan.budget, joules=joules))
