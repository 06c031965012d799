"""The ratios of paper 001: devices are dealt to clusters as they first appear, and stay there.

Z. Niu, H. Dong, A. K. Qin: FedSPU, AAAI 2025, section 4. https://arxiv.org/abs/2403.11464
"""

from __future__ import annotations

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Decision, Given
from edge_server.plan.optimizer import ClusterOptions


def decide(options: ClusterOptions, _solver: object, case: Case) -> Decision:
    """Give every device the ratio of its cluster."""
    ratios = options.ratios()
    return Decision(
        optimizer="clusters",
        devices={
            device: Given(values={"keep": ratios[case.places[device] % len(ratios)]}, binding="cluster")
            for device in case.names
        },
    )
