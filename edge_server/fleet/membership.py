"""Which of the connected devices may take part in a run, and the wait until there are enough of them.

A device that is connected and says nothing costs each round its whole deadline. After some such rounds it is left out,
until it speaks: a report, a wish for frames, an update, a birth. Now and then it is given a task all the same, and no
round waits for it. One that speaks and is late is no such device, however late it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from edge_server.fleet.classes import ClassNames
from edge_server.fleet.hub import Server
from edge_server.fleet.inputs import RunInputs
from edge_server.fleet.state import Fleet
from edge_server.plan.devices import expanded
from edge_server.plan.plan import CohortPlan, Plan
from shared.protocol.inputs import Inputs
from shared.protocol.messages import Status
from shared.transport.presence import SERVES

log = logging.getLogger(__name__)

Members: TypeAlias = frozenset[str] | None
"""Names of those who may take part; None for whoever connects."""

MOST_NAMED = 32
"""Devices that a run's record names one by one as left out: anybody may connect under any number of names."""


def devices_of_plan(plan: Plan) -> Members:
    """Return the devices that a plan names, None where it names none."""
    return frozenset(device.name for device in expanded(plan.device)) or None


SILENT_ROUNDS, SILENT_S = 3, 60.0
"""Deadlines in a row that a device may let pass without a word, and the least time that they must have taken: a usual
agent reports twice as often."""
FIRST_PROBE, LAST_PROBE = 16, 256
"""Rounds after which a device that is left out is given a task again; each time in vain, it is twice as many."""


@dataclass
class Silence:
    """What a device has not said.

    Attributes:
        words: That were heard of it before.
        instance: Of its agent's process.
        since: When the first of these rounds began.
        rounds: That it let pass to their deadlines.
        is_out: Whether it is left out.
        skipped: Rounds since it was given a task.
        probe: After so many, it is given another.
    """

    words: int
    instance: str
    since: float = 0.0
    rounds: int = 0
    is_out: bool = False
    skipped: int = 0
    probe: int = FIRST_PROBE


@dataclass
class Silences:
    """Who lets deadline after deadline pass without a word.

    Attributes:
        least: A round has so many devices that are not silent, or no silent one is left out.
    """

    least: int = 1
    _known: dict[str, Silence] = field(default_factory=dict)
    _begun: dict[str, tuple[int, str]] = field(default_factory=dict)
    _begun_at: float = 0.0

    def recall(self, device: str, instance: str) -> None:
        """Leave out a device that an earlier process of the server has left out, until it speaks."""
        self._known[device] = Silence(0, instance, is_out=True)

    def forget(self, device: str) -> None:
        """Take a device for one that has spoken."""
        self._known.pop(device, None)

    def is_out(self, fleet: Fleet, device: str) -> bool:
        """Tell whether a device has been left out and has said nothing since."""
        known = self._known.get(device)
        return known is not None and known.is_out and (known.words, known.instance) == _heard(fleet, device)

    def without(self, fleet: Fleet, devices: Collection[str]) -> list[str]:
        """Return the devices of a round: all but the silent ones for which it is not time to be asked again."""
        silent = {device for device in self._known if self.is_out(fleet, device)}
        if not silent or sum(device not in silent for device in devices) < self.least:
            return list(devices)
        due = {device for device, known in self._known.items() if known.skipped >= known.probe}
        return [device for device in devices if device in due or device not in silent]

    def spared(self, fleet: Fleet, devices: Collection[str]) -> set[str]:
        """Return those of a round's devices that it does not wait for."""
        silent = {device for device in self._known if device in devices and self.is_out(fleet, device)}
        return silent if len(devices) - len(silent) >= self.least else set()

    def begin(self, fleet: Fleet, devices: Collection[str], now: float) -> None:
        """Note that a round begins.

        Args:
            fleet: What is known of all.
            devices: Who is given a task.
            now: Seconds.
        """
        for device, known in list(self._known.items()):
            if (known.words, known.instance) != _heard(fleet, device):
                if known.is_out:
                    log.info("device %s speaks again and takes part", device)
                del self._known[device]
            elif known.is_out and device in devices:
                known.skipped, known.probe = 0, min(2 * known.probe, LAST_PROBE)
            elif known.is_out:
                known.skipped += 1
        self._begun, self._begun_at = {device: _heard(fleet, device) for device in devices}, now

    def passed(self, fleet: Fleet, late: Iterable[str], now: float) -> dict[str, str]:
        """Note that the round's deadline has passed; return who is left out from now on, with the cause.

        Args:
            fleet: What is known of all.
            late: Who has not answered.
            now: Seconds.
        """
        found = {}
        for device in late:
            words, instance = heard = _heard(fleet, device)
            if heard != self._begun.get(device) or device not in fleet.online:
                self.forget(device)
                continue
            known = self._known.setdefault(device, Silence(words, instance, self._begun_at))
            known.rounds += 1
            silent_s = now - known.since
            if not known.is_out and known.rounds >= SILENT_ROUNDS and silent_s >= SILENT_S:
                known.is_out = True
                found[device] = f"connected, and not a word of it in {known.rounds} rounds of {silent_s:.0f} s"
        return found


def _heard(fleet: Fleet, device: str) -> tuple[int, str]:
    status = fleet.statuses.get(device)
    return fleet.words[device], status.instance if status else ""


def _trains(status: Status) -> bool:
    return status.trains and status.state != SERVES


@dataclass
class Muster:
    """Who may take part.

    Attributes:
        members: By name; None for whoever connects.
        unmetered: Those of them that a budget of joules leaves out: nobody knows what they draw.
        left: Those that take no further part in training, by what the method's state says: they still evaluate.
        broken: Instances of the agents, by device, that cannot do their tasks until they are started anew.
        silent: Those that are there and say nothing.
        seen: Everybody who was ever there and belongs to the run.
        classes: What the run's classes are called, as soon as somebody has said so: others' take no part.
        reads_labels: Whether any device's labels are read in the run; where not, what these are called is all the same.
        inputs: How the run's inputs are prepared, as soon as somebody has said so: who prepares others takes no part.
    """

    members: Members = None
    unmetered: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    broken: dict[str, str] = field(default_factory=dict)
    silent: Silences = field(default_factory=Silences)
    seen: set[str] = field(default_factory=set)
    classes: ClassNames | None = None
    reads_labels: bool = True
    inputs: RunInputs | None = None
    _told: set[str] = field(default_factory=set)

    def takes(self, device: str) -> bool:
        """Tell whether a device belongs to the run."""
        return self.members is None or device in self.members

    def here(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who is there, trains and belongs to the run, in order of name."""
        others, members, statuses = self.unlike(fleet), self.members, fleet.statuses
        return tuple(
            device
            for device in fleet.online
            if (members is None or device in members) and device not in others and statuses[device].state != SERVES
        )

    def unlike(self, fleet: Fleet) -> dict[str, str]:
        """Return the refusal of each device that is there and belongs to the run but for what its examples mean."""
        return self._unlike_inputs(fleet) | self._mislabelled(fleet)

    def _unlike_inputs(self, fleet: Fleet) -> dict[str, str]:
        if self.inputs is None:
            return {}
        told = {device: fleet.statuses[device].inputs for device in fleet.online if self.takes(device)}
        usual = (None, self.inputs.inputs)  # of nearly all of a large fleet
        found = {device: self.inputs.refusal(device, one) for device, one in told.items() if one not in usual}
        return {device: refusal for device, refusal in found.items() if refusal}

    def _mislabelled(self, fleet: Fleet) -> dict[str, str]:
        if self.classes is None or not self.reads_labels:
            return {}
        statuses, usual = fleet.statuses, [None, list(self.classes.names)]  # nearly all of a large fleet
        unlike = (device for device in fleet.online if statuses[device].classes not in usual)
        told = {device: statuses[device].classes or () for device in unlike if self.takes(device)}
        return {
            device: self.classes.refusal(device, names)
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

    def unrecorded_inputs(self) -> Inputs | msgspec.UnsetType:
        """Return, once, the inputs that the devices agreed on, for a server that goes on with the run."""
        if not self.inputs or self.inputs.is_recorded:
            return msgspec.UNSET
        self.inputs = replace(self.inputs, is_recorded=True)
        return self.inputs.inputs

    def ready(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who of them may be given a task."""
        return tuple(device for device in self.here(fleet) if device not in self.unmetered)

    def trainers(self, fleet: Fleet) -> tuple[str, ...]:
        """Return who of those that are there trains: boards without torch evaluate alone."""
        return tuple(device for device in self.here(fleet) if fleet.statuses[device].trains)

    def training(self, fleet: Fleet, *, evaluates: bool = False) -> tuple[str, ...]:
        """Return who of those may be given one that trains; or one that any of them evaluates."""
        asked = (one for one in self.ready(fleet) if evaluates or fleet.statuses[one].trains)
        staying = (device for device in asked if device not in self.left)
        able = [device for device in staying if self.broken.get(device) != fleet.statuses[device].instance]
        return tuple(self.silent.without(fleet, able))

    def has_refused(self, plan: Plan, fleet: Fleet) -> bool:
        """Return true if every device of the plan, and every other one seen, has refused its task for good.

        Devices that only evaluate or serve are ignored. A plan that names no devices may still get others.
        """
        every = {*(devices_of_plan(plan) or ()), *self.seen, *filter(self.takes, fleet.statuses)}
        trained = [device for device in every if device not in fleet.statuses or _trains(fleet.statuses[device])]
        return bool(trained) and all(self._is_broken(device, fleet) for device in trained)

    def _is_broken(self, device: str, fleet: Fleet) -> bool:
        status = fleet.statuses.get(device)
        return status is not None and self.broken.get(device) == status.instance

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
        found |= self.unlike(fleet)
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
                enough = len(muster.trainers(server.fleet)) >= cohort.min_devices
                if enough and (everybody or muster.training(server.fleet)):
                    return True
                server.changed.clear()
                await server.changed.wait()
    except TimeoutError:
        return False
