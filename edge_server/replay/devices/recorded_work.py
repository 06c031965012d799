"""Trainable parameters and training-step shares of a recorded run."""

from __future__ import annotations

from typing import TypeAlias

from edge_server.replay.trace.schema import DecisionRow
from edge_server.replay.trace.trace import Trace
from shared.algorithms import ALGORITHMS
from shared.models.build import build_blank
from shared.models.evaluate import build_skeleton
from shared.protocol.messages import Assignment, Hyper
from shared.registry import build

Shares: TypeAlias = dict[tuple[str, int], float]
"""Share of a full training step, by device and round."""


def count_trainable_parameters(trace: Trace) -> int:
    """Return the number of trainable parameters on the devices; in split sessions, those below the cut."""
    plan = trace.header.plan
    leaves = dict(build_skeleton(plan.model).named_parameters())
    if any(decision.steps for decision in trace.decisions):
        algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
        assignment = Assignment(seed=plan.seed, hyper=plan.hyper_of(1))
        start = algorithm.broadcast(algorithm.init(build_blank(plan.model), plan.seed), "", assignment)
        leaves = {name: leaf for name, leaf in leaves.items() if name in start}
    return sum(leaf.numel() for leaf in leaves.values())


def compute_step_shares(trace: Trace) -> Shares:
    """Return the shares of a full training step; empty if the algorithm computes all of it."""
    plan = trace.header.plan
    step_share = build(ALGORITHMS, plan.algorithm, "algorithm").resources.step_share
    if step_share is None:
        return {}
    model = build_blank(plan.model)
    return {(row.device, row.round): step_share(model, _assignment_of(row)) for row in trace.decisions}


def _assignment_of(row: DecisionRow) -> Assignment:
    hyper = Hyper(local_epochs=row.local_epochs, batch_size=row.batch_size, learning_rate=row.learning_rate)
    return Assignment(seed=row.seed, hyper=hyper, values=row.values)
