"""Which of the connected devices may take part in a run, and the wait until there are enough of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from edge_server.fleet.hub import Server
from edge_server.fleet.state import Fleet
from edge_server.plan.devices import expanded
from edge_server.plan.plan import CohortPlan, Plan

Members: TypeAlias = frozenset[str] | None
"""Names of those who may take part; None for whoever connects."""

MOST_NAMED = 32
"""Devices that a run's record names one by one as left out: anybody may connect under any number of names."""


def devices_of_plan(plan: Plan) -> Members:
    """Return the devices that a plan names, None where it names none."""
    return frozenset(device.name for device in expanded(plan.device)) or None


@dataclass
class Muster:
    """Who may take part.

    Attributes:
        members: By name; None for whoever connects.
        unmetered: Those of them that a budget of joules leaves out: nobody knows what they draw.
        left: Those that take no further part in training, by what the method's state says: they still evaluate.
        seen: Everybody who was ever there and belongs to the run.
    """

    members: Members = None
    unmetered: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    seen: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)

    def takes(self, device: str) -> bool:
        """Tell whether a device belongs to the run."""
        return self.members is None or device in self.members

    def here(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who is there and belongs to the run, in order of name."""
        return tuple(device for device in fleet.online if self.takes(device))

    def ready(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who of them may be given a task."""
        return tuple(device for device in self.here(fleet) if device not in self.unmetered)

    def training(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who of those may be given one that trains."""
        return tuple(device for device in self.ready(fleet) if device not in self.left)

    def left_out(self, plan: Plan, fleet: Fleet) -> list[str]:
        """Return what to record of devices that take no part, each once and not without bound."""
        found = {
            device: f"device {device} is connected and takes no part: plan {plan.name!r} names others"
            for device in fleet.online
            if not self.takes(device)
        } | {
            device: f"device {device} takes no further part: budget.joules is set, and it tells none of its training"
            for device in self.unmetered
        }
        news = [device for device in sorted(found) if device not in self._told]
        news = news[: MOST_NAMED - len(self._told)]
        self._told.update(news)
        return [found[device] for device in news]


async def wait_for_cohort(
    server: Server, muster: Muster, cohort: CohortPlan, tell: Callable[[tuple[str, ...]], None] | None = None
) -> bool:
    """Wait until as many devices are there as a cohort asks for; tell whether they came in `cohort.wait_s`.

    Where some have left the training for good, one who has not must be among them.

    Args:
        server: The site.
        muster: Who counts.
        cohort: How many, and how long to wait.
        tell: Is told who is there whenever that may have changed.
    """
    try:
        async with asyncio.timeout(cohort.wait_s):
            while True:
                here = muster.here(server.fleet)
                if tell:
                    tell(here)
                if len(here) >= cohort.min_devices and (not muster.left or muster.training(server.fleet)):
                    return True
                server.changed.clear()
                await server.changed.wait()
    except TimeoutError:
        return False
