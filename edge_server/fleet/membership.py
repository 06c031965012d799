"""Which of the connected devices may take part in a run, and the wait until there are enough of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from edge_server.fleet.classes import ClassNames
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
        broken: Instances of the agents, by device, that cannot do their tasks until they are started anew.
        seen: Everybody who was ever there and belongs to the run.
        classes: What the run's classes are called, as soon as somebody has said so: others' take no part.
    """

    members: Members = None
    unmetered: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    broken: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    classes: ClassNames | None = None
    _told: set[str] = field(default_factory=set)

    def takes(self, device: str) -> bool:
        """Tell whether a device belongs to the run."""
        return self.members is None or device in self.members

    def here(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who is there and belongs to the run, in order of name."""
        others = self.mislabelled(fleet)
        return tuple(device for device in fleet.online if self.takes(device) and device not in others)

    def mislabelled(self, fleet: Fleet) -> dict[str, str]:
        """Return the refusal of each device that is there and belongs to the run but for what its labels mean."""
        if self.classes is None:
            return {}
        told = {device: fleet.statuses[device].classes for device in fleet.online if self.takes(device)}
        return {
            device: self.classes.refusal(device, names or ())
            for device, names in told.items()
            if self.classes.differ_from(names)
        }

    def names_for(self, fleet: Fleet, device: str) -> list[str]:
        """Return the class names that a device's task must say; none where it has told them, or nobody knows any."""
        status = fleet.statuses.get(device)
        return self.classes.names_for(status.classes if status else None) if self.classes else []

    def unrecorded_classes(self) -> tuple[str, ...] | msgspec.UnsetType:
        """Return, once, the class names that the devices agreed on, for a server that goes on with the run."""
        if not self.classes or not self.classes.names or self.classes.is_recorded:
            return msgspec.UNSET
        self.classes = replace(self.classes, is_recorded=True)
        return self.classes.names

    def ready(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who of them may be given a task."""
        return tuple(device for device in self.here(fleet) if device not in self.unmetered)

    def training(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who of those may be given one that trains."""
        able = (device for device in self.ready(fleet) if device not in self.left)
        return tuple(device for device in able if self.broken.get(device) != fleet.statuses[device].instance)

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
        found |= self.mislabelled(fleet)
        news = [device for device in sorted(found) if device not in self._told]
        news = news[: MOST_NAMED - len(self._told)]
        self._told.update(news)
        return [found[device] for device in news]


async def wait_for_cohort(
    server: Server, muster: Muster, cohort: CohortPlan, tell: Callable[[tuple[str, ...]], None] | None = None
) -> bool:
    """Wait until as many devices are there as a cohort asks for; tell whether they came in `cohort.wait_s`.

    Where some have left the training for good or cannot do their tasks, one other must be among them.

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
                everybody = not (muster.left or muster.broken)
                if len(here) >= cohort.min_devices and (everybody or muster.training(server.fleet)):
                    return True
                server.changed.clear()
                await server.changed.wait()
    except TimeoutError:
        return False
