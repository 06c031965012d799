"""Device eligibility and the wait for a minimum cohort."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from edge_server.fleet.classes import ClassNames
from edge_server.fleet.hub import Server
from edge_server.fleet.inputs import RunInputs
from edge_server.fleet.silent_devices import SilentDevices
from edge_server.fleet.state import Fleet
from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import CohortPlan, Plan
from shared.protocol.inputs import Inputs
from shared.protocol.messages import Assignment, Status
from shared.transport.presence import SERVES

log = logging.getLogger(__name__)

Members: TypeAlias = frozenset[str] | None
"""Names of devices that may take part; None for any that connects."""

MOST_NAMED = 32
"""Most devices that a run's journal names as left out: anybody can connect under any number of names."""


def devices_of_plan(plan: Plan) -> Members:
    """Return the devices that a plan names, None if it names none."""
    return frozenset(device.name for device in expand_devices(plan.device)) or None


def _is_trainer(status: Status) -> bool:
    return status.trains and status.state != SERVES


def _find_older_agents(statuses: Mapping[str, Status], needs: frozenset[str]) -> dict[str, str]:
    """Find agents that would ignore a field of the run's tasks, and train for another objective."""
    return {
        device: f"the agent of {device}, version {status.version or 'unknown'}, does not know "
        f"{', '.join(sorted(needs.difference(status.knows)))} of the plan's tasks; upgrade it"
        for device, status in statuses.items()
        if not needs <= {*status.knows}
    }


@dataclass
class Membership:
    """Eligibility of devices for tasks.

    Attributes:
        members: Participants by name; None for any device that connects.
        unmetered: Participants excluded by an energy budget, because they report no energy.
        departed: Devices that the algorithm's state excludes from training; they still evaluate.
        broken: Agent instances, by device, that cannot do their tasks until restarted.
        silent: Tracker of devices that are online but send nothing.
        ever_online: Participants that were online at any time of the run.
        classes: The run's class names once known; devices with other ones take no part.
        reads_labels: Whether any device's labels are used; otherwise class names do not matter.
        inputs: The run's input preparation once known; devices with another one take no part.
        needs: Fields of the run's tasks that an agent must know: `Status.knows`.
        full_precision: Devices that train in 32 bits although the plan asks for 16, as the journal notes.
    """

    members: Members = None
    unmetered: frozenset[str] = frozenset()
    departed: frozenset[str] = frozenset()
    broken: dict[str, str] = field(default_factory=dict)
    silent: SilentDevices = field(default_factory=SilentDevices)
    ever_online: set[str] = field(default_factory=set)
    classes: ClassNames | None = None
    reads_labels: bool = True
    inputs: RunInputs | None = None
    needs: frozenset[str] = frozenset()
    full_precision: set[str] = field(default_factory=set)
    _reported: set[str] = field(default_factory=set)

    def takes(self, device: str) -> bool:
        """Return true if a device belongs to the run."""
        return self.members is None or device in self.members

    def list_online(self, fleet: Fleet) -> tuple[str, ...]:
        """Return the online participants that can train or evaluate, sorted by name."""
        others, members, statuses = self.find_mismatches(fleet), self.members, fleet.statuses
        return tuple(
            device
            for device in fleet.online
            if (members is None or device in members) and device not in others and statuses[device].state != SERVES
        )

    def find_mismatches(self, fleet: Fleet) -> dict[str, str]:
        """Return the online participants with other classes or inputs, or an older agent, each with the reason."""
        mismatches = self._find_input_mismatches(fleet) | self._find_class_mismatches(fleet)
        if not self.needs:
            return mismatches
        participants = {device: fleet.statuses[device] for device in fleet.online if self.takes(device)}
        return mismatches | _find_older_agents(participants, self.needs)

    def _find_input_mismatches(self, fleet: Fleet) -> dict[str, str]:
        if self.inputs is None:
            return {}
        refusals = {}
        for device in fleet.online:
            inputs = fleet.statuses[device].inputs
            if self.takes(device) and inputs is not None and inputs != self.inputs.inputs:
                refusals[device] = self.inputs.explain_mismatch(device, inputs)
        return {device: refusal for device, refusal in refusals.items() if refusal}

    def _find_class_mismatches(self, fleet: Fleet) -> dict[str, str]:
        if self.classes is None or not self.reads_labels:
            return {}
        statuses, usual = fleet.statuses, [None, list(self.classes.names)]  # fast path for nearly all devices
        unlike = (device for device in fleet.online if statuses[device].classes not in usual)
        class_lists = {device: statuses[device].classes or () for device in unlike if self.takes(device)}
        return {
            device: self.classes.explain_mismatch(device, names)
            for device, names in class_lists.items()
            if self.classes.differ_from(names)
        }

    def names_for(self, fleet: Fleet, device: str) -> list[str]:
        """Return the class names that a device's task must carry; empty if it reported them, or none are known."""
        status = fleet.statuses.get(device)
        return self.classes.names_for(status.classes if status else None) if self.classes else []

    def complete(self, fleet: Fleet, device: str, assignment: Assignment) -> Assignment:
        """Return a task's assignment with the run's class names, and the inputs' mean and deviation if measured."""
        classes, inputs = self.names_for(fleet, device), self.inputs
        if inputs is None or not inputs.is_measured:
            return msgspec.structs.replace(assignment, classes=classes)
        return msgspec.structs.replace(assignment, classes=classes, mean=inputs.inputs.mean, std=inputs.inputs.std)

    def unrecorded_classes(self) -> tuple[str, ...] | msgspec.UnsetType:
        """Return, once, the class names that devices agreed on, to record them for a resumed run."""
        if not self.classes or not self.classes.names or self.classes.is_recorded:
            return msgspec.UNSET
        self.classes = replace(self.classes, is_recorded=True)
        return self.classes.names

    def unrecorded_inputs(self) -> Inputs | msgspec.UnsetType:
        """Return, once, the inputs that devices agreed on, to record them for a resumed run."""
        if not self.inputs or self.inputs.is_recorded:
            return msgspec.UNSET
        self.inputs = replace(self.inputs, is_recorded=True)
        return self.inputs.inputs

    def list_ready(self, fleet: Fleet) -> tuple[str, ...]:
        """Return the online participants within the energy budget's rules."""
        return tuple(device for device in self.list_online(fleet) if device not in self.unmetered)

    def list_trainers(self, fleet: Fleet) -> tuple[str, ...]:
        """Return the online participants that can train; boards without torch only evaluate."""
        return tuple(device for device in self.list_online(fleet) if fleet.statuses[device].trains)

    def list_trainable(self, fleet: Fleet, *, evaluates: bool = False) -> tuple[str, ...]:
        """Return the devices that may get a training task, or an evaluation task that needs no trainer."""
        candidates = (device for device in self.list_ready(fleet) if evaluates or fleet.statuses[device].trains)
        staying = (device for device in candidates if device not in self.departed)
        able = [device for device in staying if self.broken.get(device) != fleet.statuses[device].instance]
        return tuple(self.silent.skip_silent(fleet, able))

    def has_refused(self, plan: Plan, fleet: Fleet) -> bool:
        """Return true if every device of the plan, and every other one seen, has refused its task for good.

        Devices that only evaluate or serve are ignored. A plan that names no devices may still get others.
        """
        every = {*(devices_of_plan(plan) or ()), *self.ever_online, *filter(self.takes, fleet.statuses)}
        trained = [device for device in every if device not in fleet.statuses or _is_trainer(fleet.statuses[device])]
        return bool(trained) and all(self._is_broken(device, fleet) for device in trained)

    def _is_broken(self, device: str, fleet: Fleet) -> bool:
        status = fleet.statuses.get(device)
        return status is not None and self.broken.get(device) == status.instance

    def describe_left_out(self, plan: Plan, fleet: Fleet) -> list[str]:
        """Return a message for each excluded device, once and at most `MOST_NAMED` in all."""
        causes = {
            device: f"device {device} is connected and takes no part: plan {plan.name!r} names others"
            for device in fleet.online
            if not self.takes(device)
        } | {
            device: f"device {device} takes no further part: budget.joules is set, and it tells none of its training"
            for device in self.unmetered
        }
        causes |= self.find_mismatches(fleet)
        unreported = [device for device in sorted(causes) if device not in self._reported]
        unreported = unreported[: MOST_NAMED - len(self._reported)]
        self._reported.update(unreported)
        return [causes[device] for device in unreported]


async def wait_for_cohort(
    server: Server,
    membership: Membership,
    cohort: CohortPlan,
    on_change: Callable[[tuple[str, ...]], None] | None = None,
) -> bool:
    """Wait until the minimum cohort is online; return false after `cohort.wait_s`.

    If some devices have departed or are broken, at least one other must be among them.

    Args:
        on_change: Called with the online devices whenever they may have changed.
    """
    try:
        async with asyncio.timeout(cohort.wait_s):
            while True:
                online = membership.list_online(server.fleet)
                if on_change:
                    on_change(online)
                everybody = not (membership.departed or membership.broken)
                enough = len(membership.list_trainers(server.fleet)) >= cohort.min_devices
                if enough and (everybody or membership.list_trainable(server.fleet)):
                    return True
                server.presence.changed.clear()
                await server.presence.changed.wait()
    except TimeoutError:
        return False
