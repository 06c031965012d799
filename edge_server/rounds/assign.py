"""Who takes part in a round and what each is told: the wait for devices, the draw, the coordinator's decision.

Who takes part in a round, and how many of them must answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, NamedTuple, TypeAlias

from edge_server.allocation import coordinator
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import RoundSetting
from edge_server.allocation.model_sizes import measure_model, update_bytes
from edge_server.fleet import membership as muster
from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Muster
from edge_server.journal.budget import Ledger
from edge_server.journal.checkpoints import Store
from edge_server.journal.decision import Decision
from edge_server.journal.disk import persist
from edge_server.journal.records import Noted
from edge_server.plan.plan import Plan
from shared.algorithms.base import Algorithm, Cohort
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.tensors.tree import State

ROUNDING = 1e-9
"""0.28 of 25 are 7, and 50 and a tenth of it are 55, also in binary."""


def select_cohort(
    online: Sequence[str], *, size: int, seed: int, number: int, over_selection: float = 0.0
) -> tuple[str, ...]:
    """Return the devices of round `number`, in order of name.

    Args:
        online: Devices that are there.
        size: How many updates the round is to have; 0 for one of each device.
        seed: The run's seed; the draw is a function of it, the round and who is there.
        number: The round.
        over_selection: How many more to draw, as a share of `size`, so that the slowest need not be waited for
            (K. Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019,
            https://arxiv.org/abs/1902.01046).
    """
    devices, wanted = sorted(online), math.ceil(size * (1 + over_selection) - ROUNDING)
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
    return math.ceil(quorum * (min(size, asked) if size else asked) - ROUNDING)


log = logging.getLogger(__name__)

Purpose: TypeAlias = Literal["train", "evaluate", "measure"]

WHAT: Mapping[str, str] = {"evaluate": "the devices' evaluation", "measure": "the measurement before round 1"}
"""What is done that is no round."""


def evaluates_everybody(plan: Plan, algorithm: Algorithm) -> bool:
    """Tell whether all devices that are there evaluate, each of them, and not as many as take part in a round."""
    return bool(plan.evaluation.devices_every or algorithm.personal)


class Assigned(NamedTuple):
    """What the devices of a round are told, and what was decided for them; None where nobody decides."""

    assignments: dict[str, Assignment]
    decision: Decision | None = None


@dataclass
class Assigning:
    """Tells devices what to do. What it has learnt of them follows from the journal."""

    run: str
    plan: Plan
    server: Server
    store: Store
    algorithm: Algorithm
    model: Model
    muster: Muster
    _experience: Experience = field(default_factory=Experience)
    _ledger: Ledger = field(default_factory=Ledger)

    async def next(self, state: State, number: int, purpose: Purpose = "train") -> Assigned:
        """Wait until enough devices are there, or for as long as the plan says; tell each what to do.

        Args:
            state: The server's.
            number: Of the round.
            purpose: To train, to evaluate or to measure.
        """
        plan, server = self.plan, self.server
        log.debug("phase waiting run=%s round=%d", self.run, number)
        await server.reachable()
        departure = self.algorithm.departure
        self.muster.left = departure.left(state) if departure and purpose == "train" else frozenset()
        enough = await muster.wait_for_cohort(server, self.muster, plan.cohort)
        for left_out in self.muster.left_out(plan, server.fleet):
            log.warning("%s", left_out)
            await persist(server.worker, self.store.retry_s, self.store.append, Noted(what=left_out))
        if not enough:
            here, least = len(self.muster.here(server.fleet)), plan.cohort.min_devices
            what = WHAT.get(purpose, f"round {number}")
            log.warning("%s: %d of %d devices are here after %.0f s", what, here, least, plan.cohort.wait_s)
            return Assigned({})
        devices = select_cohort(
            self.muster.training(server.fleet),
            size=0 if purpose == "evaluate" and evaluates_everybody(plan, self.algorithm) else plan.cohort.size,
            seed=plan.seed,
            number=number,
            over_selection=plan.cohort.over_selection,
        )
        decision = None
        if plan.optimizer and purpose != "measure":
            decision = await self._decided(state, devices, number)
        allocation = decision.allocation if decision else {}
        drawn = Cohort(devices, plan.hyper, plan.seed, plan.rounds)
        return Assigned(self.algorithm.assign(state, drawn, allocation, number), decision)

    async def _decided(self, state: State, devices: tuple[str, ...], number: int) -> Decision:
        self._experience.take(await self.server.worker(self.store.records, self._experience.seen))
        self._ledger.take(await self.server.worker(self.store.records, self._ledger.seen))
        return await self.server.worker(self._decide, state, devices, number)

    def _decide(self, state: State, devices: tuple[str, ...], number: int) -> Decision:
        plan = self.plan
        assert plan.optimizer
        ratios = coordinator.allocator_of(plan.optimizer).candidates(coordinator.options_of(plan.optimizer))
        setting = RoundSetting(
            plan=plan,
            number=number,
            devices=devices,
            spending=self._ledger.spending(),
            sizes=measure_model(self.algorithm, self.model, state),
            ladder=update_bytes(self.model, ratios) if ratios else (),
        )
        asked = coordinator.round_case(setting, self._experience, self.server.fleet.reports)
        decision = coordinator.decide(plan.optimizer, asked)
        if not decision.feasible and number <= plan.rounds:
            enough = ", ".join(f"{name} {value:.4g}" for name, value in decision.enough.items())
            log.warning("round %d: not every device can meet the limits; %s would do", number, enough or "nothing")
        return decision
