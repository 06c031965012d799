"""The coordinator: from a plan's optimizer and one round's case to what every device is given."""

from __future__ import annotations

from edge_server.deciding.case import Case
from edge_server.decision import Decision
from edge_server.trial.optimizer_plan import BandwidthOptions, ClusterOptions, KeepOptions, OptimizerPlan


def decide(table: OptimizerPlan, case: Case) -> Decision:
    """Return one round's decision; nothing that a device says makes it fail."""
    match table.chosen():
        case ClusterOptions() as options:
            from edge_server.deciding import clusters  # noqa: PLC0415 - the others need numpy

            return clusters.decide(options, table.solver, case)
        case KeepOptions() as options:
            from edge_server.deciding import keep  # noqa: PLC0415

            return keep.decide(options, table.solver, case)
        case BandwidthOptions() as options:
            from edge_server.deciding import bandwidth  # noqa: PLC0415

            return bandwidth.decide(options, table.solver, case)
