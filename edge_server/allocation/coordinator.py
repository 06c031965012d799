"""The coordinator: from a plan's optimizer and one round's case to what every device is given."""

from __future__ import annotations

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Decision, kept
from edge_server.plan.optimizer import BandwidthOptions, ClusterOptions, KeepOptions, OptimizerPlan


def decide(table: OptimizerPlan, case: Case) -> Decision:
    """Return one round's decision; nothing that a device says makes it fail."""
    match table.chosen():
        case ClusterOptions() as options:
            from edge_server.allocation import clusters  # noqa: PLC0415 - the others need numpy

            return clusters.decide(options, table.solver, case)
        case KeepOptions() as options:
            from edge_server.allocation import keep_ratio  # noqa: PLC0415

            return keep_ratio.decide(options, table.solver, case)
        case BandwidthOptions() as options:
            from edge_server.allocation import bandwidth  # noqa: PLC0415

            return bandwidth.decide(options, table.solver, case)


def kept_alone(table: OptimizerPlan, case: Case, changed: Case) -> dict[str, float]:
    """Return the share of the model that each device would keep if its own figures alone were those of `changed`.

    Args:
        table: The optimizer.
        case: What was decided from.
        changed: The same, with the other figures of all devices.
    """
    match table.chosen():
        case BandwidthOptions() as options:
            from edge_server.allocation import bandwidth as alone  # noqa: PLC0415 - the others need no numpy

            return alone.kept_alone(options, case, changed)
        case _:  # nobody's figures are another's
            return {device: kept(one.values) for device, one in decide(table, changed).devices.items()}
