"""Run training tasks of replayed devices at a cost fixed beforehand."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from device_agent.measurement.task_meter import BlockCost, FixedMeter
from device_agent.trainer.interface import Job
from device_agent.trainer.perform import perform
from device_agent.trainer.task import TrainingTask
from device_agent.trainer.workspace import Workspace
from edge_server.replay.pool import Ending, TrainingOrder
from edge_server.replay.stacked_networks import stack_networks
from edge_server.replay.stacked_training import can_stack, correction_of, train
from shared.algorithms.base import Result
from shared.data.cache import DataCache
from shared.errors import FieldFleetError
from shared.protocol.messages import Task
from shared.registry import FAULTS

log = logging.getLogger(__name__)

FAILURES = (FieldFleetError, MemoryError, *FAULTS)
"""Errors that fail a task instead of the process that trains."""


class TrainingExecutor:
    """Execute training orders of any device; caches the data set and one network.

    Args:
        together: Allow training the jobs of a batch in one pass instead of one after the other.
    """

    def __init__(self, cache: DataCache, *, together: bool = False) -> None:
        self._workspace, self._may_stack = Workspace(read=cache.load), together

    def execute(self, orders: Sequence[TrainingOrder]) -> list[Ending]:
        """Write every order's update into its draft; return the ending of each order."""
        trained = self._train_together([order.job for order in orders]) if self._may_stack else {}
        return [self._execute_order(order, trained.get(place)) for place, order in enumerate(orders)]

    def _execute_order(self, order: TrainingOrder, trained: Result | None) -> Ending:
        meter = FixedMeter(order.spent, order.step)
        try:
            perform(order.job, self._workspace, meter.task, lambda: False, trained=trained)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _train_together(self, jobs: Sequence[Job]) -> dict[int, Result]:
        """Train jobs that share start parameters and settings in one pass; return results by index."""
        alike = defaultdict[bytes, list[int]](list)
        for place, job in enumerate(jobs):
            if job.task.train and not job.task.adaptation:
                alike[_stacking_key(job.task)].append(place)
        results: dict[int, Result] = {}
        for places in alike.values():
            if len(places) > 1:
                results |= zip(places, self._train_stacked([jobs[place] for place in places]), strict=False)
        return {
            place: result for place, result in results.items() if result.loss is None or math.isfinite(result.loss)
        }  # others train alone, and fail with the step

    def _train_stacked(self, jobs: Sequence[Job]) -> list[Result]:
        """Train several jobs with stacked networks; return nothing if that is impossible.

        The jobs are then trained one by one, so that each reports its own error.
        """
        first, task = TrainingTask(jobs[0], self._workspace, FixedMeter(BlockCost()).task, lambda: False), jobs[0].task
        try:
            model = self._workspace.model(task.model)
            is_sgd, correct = correction_of(first.algorithm)
            if not is_sgd:
                return []
            objective = first.objective
            batches = [self._workspace.batches(job.data, job.task.assignment, lambda: False, objective) for job in jobs]
            network = stack_networks(model.layers, batches[0].examples.inputs.shape[1:])
            if network is None or not can_stack(task.assignment.hyper.step):
                return []
            return train(network, first.read_parameters(), batches, task.assignment.hyper, correct, objective)
        except FAILURES as error:
            log.warning("round %d: devices train one by one, stacked training failed: %s", task.round, error)
            return []


def _stacking_key(task: Task) -> bytes:
    return msgspec.msgpack.encode(
        (task.run, task.params, task.algorithm, task.model, task.assignment.hyper, task.objective)
    )
