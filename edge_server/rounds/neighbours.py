"""Interface to the other edge servers of a run: joint decisions and model mixing.

Implemented over brokers and in virtual time; see `edge_server.sites`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Decision
from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.plan.sites import devices_by_site
from shared.errors import ConfigError
from shared.tensors.tree import State


class Neighbours(Protocol):
    """The other sites, as used by a site's rounds. A round resumed after a restart asks again."""

    async def begin(self, number: int) -> None:
        """Announce the round that begins or resumes at this site."""
        ...

    async def decide(self, case: Case, number: int) -> Decision:
        """Return the decision for this site's devices, in place of `allocation.coordinator.decide`.

        Args:
            case: Input of this site's devices.
            number: The round; repeated calls return the same decision.
        """
        ...

    async def mix(self, number: int, state: State) -> State:
        """Return a site's state after a gossip step; `Algorithm.mixing` selects the mixed part.

        Called with a round's new model before it is stored, recorded or evaluated: a server killed in between
        aggregates the same updates and mixes again.

        Args:
            number: The last edge round of its global round.
        """
        ...

    async def leave(self) -> None:
        """Announce that the run has ended at this site, so that no other site waits for it."""
        ...


def plan_of_site(plan: Plan, site: str) -> Plan:
    """Return the plan as one site runs it: its energy budget is the share of its devices.

    Raises:
        ConfigError: The plan has sites, and `site` is not one of them.
    """
    if not plan.sites:
        return plan
    if site not in plan.sites.clusters:
        names = ", ".join(plan.sites.names)
        raise ConfigError(f"site {site!r}: plan {plan.name!r} has no such site; known: {names}")
    if plan.budget.joules is None:
        return plan
    devices = [device.name for device in expand_devices(plan.device)]
    joules = plan.budget.joules * len(devices_by_site(plan.sites, devices)[site]) / len(devices)
    return msgspec.structs.replace(plan, budget=msgspec.structs.replace(plan.budget, joules=joules))
