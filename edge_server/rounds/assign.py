"""Select a round's cohort and assign tasks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from edge_server.allocation import coordinator
from edge_server.fleet.classes import agree_on_classes
from edge_server.fleet.inputs import agree_on_inputs
from edge_server.fleet.membership import wait_for_cohort
from edge_server.journal.budget import affordable, foreseen_joules
from edge_server.journal.decision import Decision, predicted_joules
from edge_server.journal.records import Noted, RoundOpened
from edge_server.plan.plan import Plan
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.check_data import require_known_fit
from edge_server.rounds.decision_inputs import DecisionInputs
from edge_server.rounds.input_statistics import is_federated
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.running_statistics import request_merging, request_statistics
from shared.algorithms.base import Algorithm, Cohort
from shared.errors import ConfigError, Infeasible
from shared.protocol.messages import Assignment
from shared.runtime.phases import log_phase
from shared.tensors.counts import ceil_share
from shared.tensors.tree import State

log = logging.getLogger(__name__)
MOST_NAMED = 8
Purpose: TypeAlias = Literal["train", "evaluate", "measure", "statistics"]
PURPOSE_LABELS: Mapping[str, str] = {
    "evaluate": "the devices' evaluation",
    "measure": "the measurement before round 1",
    "statistics": "the measurement of running statistics",
}


def select_cohort(
    online: Sequence[str], *, size: int, seed: int, number: int, over_selection: float = 0.0
) -> tuple[str, ...]:
    """Return the cohort of round `number`, sorted by name.

    Args:
        size: Updates that the round needs; 0 for one of each device.
        seed: The run's seed; the draw depends on seed, round number and online devices.
        over_selection: Extra devices as a share of `size`, so that the slowest need not be waited for
            (K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019,
            https://arxiv.org/abs/1902.01046).
    """
    devices, count = sorted(online), ceil_share(1 + over_selection, size)
    if not size or count >= len(devices):
        return tuple(devices)
    return tuple(sorted(Random(f"{seed}/{number}").sample(devices, count)))  # noqa: S311 - a draw, not a secret


def evaluates_all_devices(plan: Plan, algorithm: Algorithm) -> bool:
    """Return true if every online device evaluates, not only a cohort."""
    return bool(plan.evaluation.devices_every or algorithm.personal)


def asks_all_devices(plan: Plan, algorithm: Algorithm, purpose: Purpose) -> bool:
    """Return true if tasks of this purpose go to every online device, not only to a cohort."""
    if purpose == "measure":
        return is_federated(plan)
    return purpose == "evaluate" and evaluates_all_devices(plan, algorithm)


def evaluates_without_trainers(plan: Plan) -> bool:
    """Return true if devices evaluate with ONNX Runtime, so that those without torch take part."""
    return plan.evaluation.runtime == "onnx"


class CohortTasks(NamedTuple):
    """Assignments of a cohort and the optimizer's decision; None without an optimizer."""

    assignments: dict[str, Assignment]
    decision: Decision | None = None


def _name_devices(devices: Sequence[str]) -> str:
    more = f" and {len(devices) - MOST_NAMED} more" if len(devices) > MOST_NAMED else ""
    return f"{'devices' if len(devices) > 1 else 'device'} {', '.join(devices[:MOST_NAMED])}{more}"


@dataclass
class TaskAssigner:
    """Selects devices and assigns their tasks. Its state is derived from the journal.

    Attributes:
        neighbours: The other sites of a multi-site plan.
        recorded_rounds: Recorded rounds whose assignments are repeated, by number.
    """

    run: ActiveRun
    neighbours: Neighbours | None = None
    recorded_rounds: Mapping[int, RoundOpened] = field(default_factory=dict)
    inputs: DecisionInputs = field(init=False)
    _silent: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.inputs = DecisionInputs(self.run)

    async def assign_tasks(self, state: State, number: int, purpose: Purpose = "train") -> CohortTasks:
        """Wait for a minimum cohort, up to the plan's limit, and assign its tasks.

        Raises:
            Infeasible: The rest of a budget does not pay for such a round.
        """
        plan, server = self.run.plan, self.run.server
        log_phase(log, "waiting", run=self.run.name, round=number)
        await server.reachable()
        departure = self.run.algorithm.departure
        self.run.membership.departed = departure.departed(state) if departure and purpose == "train" else frozenset()
        require_matching = partial(self._require_matching_devices, number)
        enough = await wait_for_cohort(server, self.run.membership, plan.cohort, require_matching)
        self._agree_on_inputs()
        self._agree_on_classes()
        if enough:
            await self._require_fit()
        await self._record_left_out()
        if not enough:
            self._log_missing(purpose, number)
            return CohortTasks({})
        if purpose == "train" and number in self.recorded_rounds:
            return CohortTasks(dict(self.recorded_rounds[number].assignments), self.recorded_rounds[number].decision)
        without_trainers = purpose == "evaluate" and evaluates_without_trainers(plan)
        devices = select_cohort(
            self.run.membership.list_trainable(server.fleet, evaluates=without_trainers),
            size=0 if asks_all_devices(plan, self.run.algorithm, purpose) else plan.cohort.size,
            seed=plan.seed,
            number=number,
            over_selection=plan.cohort.over_selection,
        )
        decision = None
        if purpose == "train":
            devices, decision = await self._fit_budget(state, devices, number)
        elif purpose == "evaluate":
            decision = await self._decide(state, devices, number)
        allocation = decision.allocation if decision else {}
        drawn = Cohort(devices, plan.hyper_of(number), plan.seed, plan.rounds)
        assignments = request_merging(self.run.model, self.run.algorithm.assign(state, drawn, allocation, number))
        if purpose == "evaluate":  # no split session, even for split algorithms
            assignments = {device: msgspec.structs.replace(task, steps=0) for device, task in assignments.items()}
        if purpose == "evaluate" or (purpose == "train" and plan.evaluation.on_device):
            assignments = request_statistics(plan, self.run.algorithm, self.run.model, assignments)
        return CohortTasks(assignments, decision)

    def _log_missing(self, purpose: Purpose, number: int) -> None:
        fleet, cohort = self.run.server.fleet, self.run.plan.cohort
        online, least = len(self.run.membership.list_online(fleet)), cohort.min_devices
        what = PURPOSE_LABELS.get(purpose, f"round {number}")
        able = len(self.run.membership.list_trainable(fleet))
        hint = "" if online < least or able else "; none can do its tasks until its agent is restarted"
        log.warning("%s: %d of %d devices are online after %.0f s%s", what, online, least, cohort.wait_s, hint)

    async def _record_left_out(self) -> None:
        """Record each online device that takes no part, once."""
        for left_out in self.run.membership.describe_left_out(self.run.plan, self.run.server.fleet):
            log.warning("%s", left_out)
            await self.run.record(Noted(what=left_out))

    async def open_round(self, state: State, number: int) -> RoundOpened:
        """Assign a training round; return its opening record."""
        assignments, decision = await self.assign_tasks(state, number)
        log_phase(log, "opening", run=self.run.name, round=number)
        return RoundOpened(
            round=number,
            assignments=assignments,
            at=self.run.server.clock(),
            online=len(self.run.membership.list_online(self.run.server.fleet)),
            decision=decision,
            classes=self.run.membership.unrecorded_classes(),
            inputs=self.run.membership.unrecorded_inputs(),
        )

    def _require_matching_devices(self, number: int, online: tuple[str, ...]) -> None:
        """Refuse to begin a run that lacks only devices with incompatible classes or inputs."""
        least, others = self.run.plan.cohort.min_devices, self.run.membership.find_mismatches(self.run.server.fleet)
        if number <= 1 and others and len(online) < least <= len(online) + len(others):
            raise ConfigError(f"{len(online)} of {least} devices can begin: {next(iter(others.values()))}")

    def _agree_on_inputs(self) -> None:
        """Adopt the input preparation of the online devices, where the plan does not set it.

        Raises:
            ConfigError: The devices differ.
        """
        online = self.run.membership.list_online(self.run.server.fleet)
        self.run.membership.inputs = agree_on_inputs(self.run.membership.inputs, self.run.server.fleet.statuses, online)

    def _agree_on_classes(self) -> None:
        """Adopt the class names of the online devices, where neither plan nor test data name them.

        Raises:
            ConfigError: The devices differ.
        """
        membership, fleet = self.run.membership, self.run.server.fleet
        if not membership.reads_labels:
            return
        online, statuses = membership.list_online(fleet), fleet.statuses
        if membership.classes is None:
            membership.classes = agree_on_classes(statuses, online)
        silent = [device for device in online if statuses[device].classes is None]
        if news := sorted(set(silent) - self._silent):
            self._silent.update(news)
            log.info(
                "%s: names of classes not reported; labels are used unchanged",
                _name_devices(news),
            )

    async def _require_fit(self) -> None:
        """Refuse a network that does not fit the shape or classes that devices report.

        Raises:
            ConfigError: It does not.
        """
        inputs, classes = self.run.membership.inputs, self.run.membership.classes
        if inputs and not inputs.is_recorded:  # otherwise the plan's, which were checked before
            count = len(classes.names) if classes else 0
            try:
                await self.run.server.worker(require_known_fit, self.run.plan, inputs.inputs.shape, count)
            except ConfigError as error:
                raise ConfigError(f"{error}, or [data] of the devices ({inputs.origin} this shape)") from error

    async def _fit_budget(
        self, state: State, devices: tuple[str, ...], number: int
    ) -> tuple[tuple[str, ...], Decision | None]:
        """Return the devices that the remaining joules pay for, and the decision for them.

        Raises:
            Infeasible: The budget pays for fewer than the round's minimum.
        """
        drawn, budget = devices, self.run.plan.budget.joules
        decision = await self._decide(state, devices, number)
        if budget is None:
            return devices, decision
        spending, dearest = await self.run.server.worker(self.inputs.read_expenses)
        spent_j, budget = spending.joules or 0.0, budget + spending.moved
        drawn_joules = foreseen = foreseen_joules(devices, predicted_joules(decision), dearest)
        while (chosen := affordable(foreseen, budget - spent_j)) != devices:
            if len(chosen) < self.run.plan.round.min_updates:
                few = sum(sorted(drawn_joules.values())[: self.run.plan.round.min_updates])
                raise Infeasible(
                    f"budget.joules: {spent_j:.6g} J of {budget:g} J are spent, and round {number} "
                    f"needs at least {few:.4g} J"
                )
            devices, decision = chosen, await self._decide(state, chosen, number, decision)
            foreseen = foreseen_joules(devices, predicted_joules(decision), dearest)
        if devices != drawn:
            all_j = math.fsum(drawn_joules.values())
            what = (
                f"round {number} begins with {len(devices)} of {len(drawn)} devices: {budget - spent_j:.4g} J are left "
                f"of budget.joules, and the tasks of all would take {all_j:.4g} J"
            )
            log.warning("%s", what)
            await self.run.record(Noted(what=what))
        return devices, decision

    async def _decide(
        self, state: State, devices: tuple[str, ...], number: int, previous: Decision | None = None
    ) -> Decision | None:
        """Return the optimizer's decision, for all sites at once where there are several; None without an optimizer.

        Args:
            previous: Decision of all sites for a larger cohort of this round; sites decide a round only once.
        """
        table = self.run.plan.optimizer
        if not table:
            return None
        if previous and self.neighbours:
            return msgspec.structs.replace(
                previous, devices={device: outcome for device, outcome in previous.devices.items() if device in devices}
            )
        case = await self.run.server.worker(self.inputs.build_case, state, devices, number)
        if self.neighbours and number <= self.run.plan.rounds:
            decision = await self.neighbours.decide(case, number)
        else:
            decision = await self.run.server.worker(coordinator.decide, table, case)
        if not decision.feasible and number <= self.run.plan.rounds:
            enough = ", ".join(f"{name} {value:.4g}" for name, value in decision.enough.items())
            log.warning("round %d: not every device can meet the limits; sufficient: %s", number, enough or "nothing")
        return decision
