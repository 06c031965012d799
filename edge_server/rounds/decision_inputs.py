"""Inputs of a round's decision, from the run's journal and the devices' reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from edge_server.allocation import coordinator
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import Case, RoundSetting
from edge_server.allocation.model_sizes import measure_model, sent_bytes, update_bytes, uploaded_leaves
from edge_server.journal.budget import Ledger, RunSpending
from edge_server.rounds.active_run import ActiveRun
from shared.algorithms.subnetwork.server_half import KEEP
from shared.protocol.messages import LOSSLESS
from shared.tensors.tree import State


class Expenses(NamedTuple):
    """Spending of a run so far, and the joules charged for a task without any report, by device."""

    spending: RunSpending
    dearest: Mapping[str, float]


@dataclass
class DecisionInputs:
    """Reads the journal as it grows."""

    run: ActiveRun
    _experience: Experience = field(default_factory=Experience)
    _ledger: Ledger = field(default_factory=Ledger)

    def read_expenses(self) -> Expenses:
        """Return the expenses of the run, without a decision's other inputs."""
        self._ledger.take(self.run.store.records(self._ledger.seen))
        return Expenses(self._ledger.spending(), self._ledger.dearest())

    def build_case(self, state: State, devices: tuple[str, ...], number: int) -> Case:
        """Return the optimizer's input."""
        plan, algorithm, model = self.run.plan, self.run.algorithm, self.run.model
        assert plan.optimizer
        spending, _ = self.read_expenses()
        self._experience.take(self.run.store.records(self._experience.record_count))
        settled_values = algorithm.resources.fixed_values
        chosen = coordinator.find_allocator(plan.optimizer)
        shares = chosen.candidates(coordinator.convert_options(plan.optimizer))
        ladder = self._update_sizes(state, shares, sends_share="sent" in chosen.decides) if shares else ()
        setting = RoundSetting(
            plan=plan,
            number=number,
            devices=devices,
            spending=spending,
            sizes=measure_model(algorithm, model, state),
            ladder=ladder,
            last_limits=self._experience.limits,
            fixed_values={device: settled_values(state, device) for device in devices} if settled_values else {},
        )
        reports = dict(self.run.server.fleet.reports)  # copy: the original changes concurrently
        return coordinator.round_case(setting, self._experience, reports)

    def _update_sizes(self, state: State, shares: list[float], *, sends_share: bool) -> tuple[tuple[float, int], ...]:
        """Return (share, bytes) of the updates by which devices could answer.

        Args:
            sends_share: Whether a device sends the share of its change, or keeps that of the neurons.
        """
        if not sends_share and KEEP in self.run.algorithm.resources.uses:
            return update_bytes(self.run.model, shares)
        codec = self.run.plan.codec if sends_share else LOSSLESS
        return sent_bytes(codec, uploaded_leaves(self.run.algorithm, state), shares)
