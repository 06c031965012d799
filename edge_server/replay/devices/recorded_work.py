"""Trainable parameters and training-step shares of a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edge_server.record.rows import DecisionRow
from edge_server.replay.trace.trace import Trace
from shared.algorithms import ALGORITHMS
from shared.models.build import build_blank
from shared.models.cost import trained_share
from shared.models.evaluate import build_skeleton
from shared.protocol.messages import Assignment, Hyper
from shared.registry import build


@dataclass(frozen=True)
class StepShares:
    """Shares of a full training step.

    Attributes:
        trained: Of a step of the whole network that leaves its frozen leaves out.
        by_task: Of a step of the method, by device and round; those that are missing compute all.
    """

    trained: float = 1.0
    by_task: Mapping[tuple[str, int], float] = field(default_factory=dict)


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


def compute_step_shares(trace: Trace, example: tuple[int, ...] = ()) -> StepShares:
    """Return the shares of a full training step.

    Args:
        example: Shape of one input; empty for that which the network declares.
    """
    plan = trace.header.plan
    step_share = build(ALGORITHMS, plan.algorithm, "algorithm").resources.step_share
    if step_share is None and not plan.adaptation:
        return StepShares()
    model = build_blank(plan.model)
    example = example or model.example
    trained = trained_share(plan.model, example, plan.adaptation)
    model = replace(model, example=model.example or example)
    shares = {
        (row.device, row.round): trained * (step_share(model, _assignment_of(row)) if step_share else 1.0)
        for row in trace.decisions
    }
    return StepShares(trained, shares)


def _assignment_of(row: DecisionRow) -> Assignment:
    hyper = Hyper(local_epochs=row.local_epochs, batch_size=row.batch_size, learning_rate=row.learning_rate)
    return Assignment(seed=row.seed, hyper=hyper, values=row.values)
