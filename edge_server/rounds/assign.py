"""Who takes part in a round and what each is told: the wait for devices, the draw, the coordinator's decision.

Who takes part in a round, and how many of them must answer.
"""

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
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import Case, RoundSetting
from edge_server.allocation.model_sizes import measure_model, sent_bytes, update_bytes
from edge_server.fleet import membership as muster
from edge_server.fleet.classes import agreed_classes
from edge_server.fleet.hub import Server
from edge_server.fleet.inputs import agreed_inputs
from edge_server.fleet.membership import Muster
from edge_server.journal.budget import Ledger, affordable, foreseen_joules
from edge_server.journal.checkpoints import Store
from edge_server.journal.decision import Decision, predicted_joules
from edge_server.journal.disk import persist
from edge_server.journal.records import Noted, RoundOpened
from edge_server.plan.plan import Plan
from edge_server.rounds.evaluation.running_statistics import tell_devices, tell_merging
from edge_server.rounds.neighbours import Neighbours
from shared.algorithms.base import Algorithm, Cohort
from shared.errors import ConfigError, Infeasible
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.counts import ceil_share
from shared.tensors.tree import State

log = logging.getLogger(__name__)
MOST_NAMED = 8
WHAT: Mapping[str, str] = {
    "evaluate": "the devices' evaluation",
    "measure": "the measurement before round 1",
    "statistics": "the measurement of running statistics",
}
"""What is done that is no round."""


def select_cohort(
    online: Sequence[str], *, size: int, seed: int, number: int, over_selection: float = 0.0
) -> tuple[str, ...]:
    """Return the devices of round `number`, in order of name.

    Args:
        online: Devices that are there.
        size: How many updates the round is to have; 0 for one of each device.
        seed: The run's seed; the draw is a function of it, the round and who is there.
        over_selection: How many more to draw, as a share of `size`, so that the slowest need not be waited for
            (K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019,
            https://arxiv.org/abs/1902.01046).
    """
    devices, wanted = sorted(online), ceil_share(1 + over_selection, size)
    if not size or wanted >= len(devices):
        return tuple(devices)
    return tuple(sorted(Random(f"{seed}/{number}").sample(devices, wanted)))  # noqa: S311 - a draw, not a secret


def updates_needed(asked: int, *, size: int, quorum: float) -> int:
    """Return how many updates end a round at once.

    Args:
        asked: Devices that were given its task.
        size: Of the cohort without over-selection; 0 for all of them.
        quorum: The share of the cohort that suffices.
    """
    return ceil_share(quorum, min(size, asked) if size else asked)


Purpose: TypeAlias = Literal["train", "evaluate", "measure", "statistics"]


def evaluates_everybody(plan: Plan, algorithm: Algorithm) -> bool:
    """Tell whether all devices that are there evaluate, each of them, and not as many as take part in a round."""
    return bool(plan.evaluation.devices_every or algorithm.personal)


def evaluates_alone(plan: Plan) -> bool:
    """Tell whether devices evaluate without their trainers, so that those without torch can."""
    return plan.evaluation.runtime == "onnx"


class Assigned(NamedTuple):
    """What the devices of a round are told, and what was decided for them; None where nobody decides."""

    assignments: dict[str, Assignment]
    decision: Decision | None = None


def _some(devices: Sequence[str]) -> str:
    """Return the names of devices, not too many of them."""
    more = f" and {len(devices) - MOST_NAMED} more" if len(devices) > MOST_NAMED else ""
    return f"{'devices' if len(devices) > 1 else 'device'} {', '.join(devices[:MOST_NAMED])}{more}"


@dataclass
class Assigning:
    """Tells devices what to do. What it has learnt of them follows from the journal.

    Attributes:
        neighbours: The other sites of a plan with several.
    """

    run: str
    plan: Plan
    server: Server
    store: Store
    algorithm: Algorithm
    model: Model
    muster: Muster
    neighbours: Neighbours | None = None
    told: Mapping[int, RoundOpened] = field(default_factory=dict)
    _experience: Experience = field(default_factory=Experience)
    _ledger: Ledger = field(default_factory=Ledger)
    _silent: set[str] = field(default_factory=set)

    async def next(self, state: State, number: int, purpose: Purpose = "train") -> Assigned:
        """Wait until enough devices are there, or for as long as the plan says; tell each what to do.

        Args:
            purpose: To train, to evaluate or to measure.

        Raises:
            Infeasible: What is left of a budget lasts for no such round.
        """
        plan, server = self.plan, self.server
        log.debug("phase waiting run=%s round=%d", self.run, number)
        await server.reachable()
        departure = self.algorithm.departure
        self.muster.left = departure.left(state) if departure and purpose == "train" else frozenset()
        enough = await muster.wait_for_cohort(server, self.muster, plan.cohort, partial(self._require_able, number))
        self._agree_on_inputs()
        self._agree_on_classes()
        await self._name_left_out()
        if not enough:
            here, least = len(self.muster.here(server.fleet)), plan.cohort.min_devices
            what = WHAT.get(purpose, f"round {number}")
            able = len(self.muster.training(server.fleet))
            rest = "" if here < least or able else "; none can do its tasks until its agent is started anew"
            log.warning("%s: %d of %d devices are here after %.0f s%s", what, here, least, plan.cohort.wait_s, rest)
            return Assigned({})
        if purpose == "train" and number in self.told:
            return Assigned(dict(self.told[number].assignments), self.told[number].decision)
        devices = select_cohort(
            self.muster.training(server.fleet, evaluates=purpose == "evaluate" and evaluates_alone(plan)),
            size=0 if purpose == "evaluate" and evaluates_everybody(plan, self.algorithm) else plan.cohort.size,
            seed=plan.seed,
            number=number,
            over_selection=plan.cohort.over_selection,
        )
        decision = None
        if purpose == "train":
            devices, decision = await self._afforded(state, devices, number)
        elif purpose == "evaluate":
            decision = await self._decided(state, devices, number)
        allocation = decision.allocation if decision else {}
        drawn = Cohort(devices, plan.hyper, plan.seed, plan.rounds)
        told = tell_merging(self.model, self.algorithm.assign(state, drawn, allocation, number))
        if purpose == "evaluate":  # that is no session, be the method split
            told = {device: msgspec.structs.replace(one, steps=0) for device, one in told.items()}
        if purpose == "evaluate" or (purpose == "train" and plan.evaluation.on_device):
            told = tell_devices(plan, self.algorithm, self.model, told)
        return Assigned(told, decision)

    async def _name_left_out(self) -> None:
        """Record who is there and takes no part, each once."""
        for left_out in self.muster.left_out(self.plan, self.server.fleet):
            log.warning("%s", left_out)
            await persist(self.server.worker, self.store.retry_s, self.store.append, Noted(what=left_out))

    async def open_round(self, state: State, number: int) -> RoundOpened:
        """Decide who takes part in a round, as `next`; return what is to be recorded of its beginning."""
        assignments, decision = await self.next(state, number)
        log.debug("phase opening run=%s round=%d", self.run, number)
        return RoundOpened(
            round=number,
            assignments=assignments,
            at=self.server.clock(),
            online=len(self.muster.here(self.server.fleet)),
            decision=decision,
            classes=self.muster.unrecorded_classes(),
            inputs=self.muster.unrecorded_inputs(),
        )

    def _require_able(self, number: int, here: tuple[str, ...]) -> None:
        """Refuse to begin a run for which only devices are missing whose examples mean something else."""
        others, least = self.muster.unlike(self.server.fleet), self.plan.cohort.min_devices
        if number <= 1 and others and len(here) < least <= len(here) + len(others):
            raise ConfigError(f"{len(here)} of {least} devices can begin: {next(iter(others.values()))}")

    def _agree_on_inputs(self) -> None:
        """Learn how inputs are prepared, as far as the plan does not say so, from the devices that are there.

        Raises:
            ConfigError: They differ.
        """
        here = self.muster.here(self.server.fleet)
        self.muster.inputs = agreed_inputs(self.muster.inputs, self.server.fleet.statuses, here)

    def _agree_on_classes(self) -> None:
        """Learn what the classes are called, where neither plan nor test data say so, from the devices that are there.

        Raises:
            ConfigError: They differ.
        """
        if not self.muster.reads_labels:
            return
        here, statuses = self.muster.here(self.server.fleet), self.server.fleet.statuses
        if self.muster.classes is None:
            self.muster.classes = agreed_classes(statuses, here)
        silent = [device for device in here if statuses[device].classes is None]
        if news := sorted(set(silent) - self._silent):
            self._silent.update(news)
            log.info("%s: what their classes are called is not known; their labels are taken as they are", _some(news))

    async def _afforded(
        self, state: State, devices: tuple[str, ...], number: int
    ) -> tuple[tuple[str, ...], Decision | None]:
        """Return the devices whose tasks the budget of joules still pays for, and what is decided for these.

        Raises:
            Infeasible: It pays for fewer than the round needs.
        """
        drawn, budget = devices, self.plan.budget.joules
        decision = await self._decided(state, devices, number)
        if budget is None:
            return devices, decision
        self._ledger.take(await self.server.worker(self.store.records, self._ledger.seen))
        spending, dearest = self._ledger.spending(), self._ledger.dearest()
        spent, budget = spending.joules or 0.0, budget + spending.moved
        whole = foreseen = foreseen_joules(devices, predicted_joules(decision), dearest)
        while (chosen := affordable(foreseen, budget - spent)) != devices:
            if len(chosen) < self.plan.round.min_updates:
                few = sum(sorted(whole.values())[: self.plan.round.min_updates])
                raise Infeasible(
                    f"budget.joules: {spent:.6g} J of {budget:g} J are spent, and round {number} would take "
                    f"{few:.4g} J at the least"
                )
            devices, decision = chosen, await self._decided(state, chosen, number, decision)
            foreseen = foreseen_joules(devices, predicted_joules(decision), dearest)
        if devices != drawn:
            all_j = math.fsum(whole.values())
            what = (
                f"round {number} begins with {len(devices)} of {len(drawn)} devices: {budget - spent:.4g} J are left "
                f"of budget.joules, and the tasks of all would take {all_j:.4g} J"
            )
            log.warning("%s", what)
            await persist(self.server.worker, self.store.retry_s, self.store.append, Noted(what=what))
        return devices, decision

    async def _decided(
        self, state: State, devices: tuple[str, ...], number: int, given: Decision | None = None
    ) -> Decision | None:
        """Return what the plan's optimizer decides, for all sites at once where there are several; None: it has none.

        Args:
            given: What the sites have decided for more devices of this round: they decide a round once.
        """
        table = self.plan.optimizer
        if not table:
            return None
        if given and self.neighbours:
            return msgspec.structs.replace(
                given, devices={device: one for device, one in given.devices.items() if device in devices}
            )
        self._experience.take(await self.server.worker(self.store.records, self._experience.seen))
        self._ledger.take(await self.server.worker(self.store.records, self._ledger.seen))
        asked = await self.server.worker(self._case, state, devices, number)
        if self.neighbours and number <= self.plan.rounds:
            decision = await self.neighbours.decide(asked, number)
        else:
            decision = await self.server.worker(coordinator.decide, table, asked)
        if not decision.feasible and number <= self.plan.rounds:
            enough = ", ".join(f"{name} {value:.4g}" for name, value in decision.enough.items())
            log.warning("round %d: not every device can meet the limits; %s would do", number, enough or "nothing")
        return decision

    def _case(self, state: State, devices: tuple[str, ...], number: int) -> Case:
        """Return what is decided from."""
        plan = self.plan
        assert plan.optimizer
        settled = self.algorithm.resources.settled
        chosen = coordinator.allocator_of(plan.optimizer)
        shares = chosen.candidates(coordinator.options_of(plan.optimizer))
        sizes = partial(sent_bytes, plan.codec) if "sent" in chosen.decides else update_bytes
        setting = RoundSetting(
            plan=plan,
            number=number,
            devices=devices,
            spending=self._ledger.spending(),
            sizes=measure_model(self.algorithm, self.model, state),
            ladder=sizes(self.model, shares) if shares else (),
            last_limits=self._experience.limits,
            settled={device: settled(state, device) for device in devices} if settled else {},
        )
        reports = dict(self.server.fleet.reports)  # it changes meanwhile
        return coordinator.round_case(setting, self._experience, reports)
