"""Allocator `clusters` (FedSPU): fixed keep ratios, assigned round-robin to devices.

Z. Niu, H. Dong, A. K. Qin: FedSPU, AAAI 2025, section 4. https://arxiv.org/abs/2403.11464
"""

from __future__ import annotations

from edge_server.allocation.inputs import Case
from edge_server.allocation.options import Options, parse_ratios
from edge_server.journal.decision import Decision, DeviceDecision


class ClusterOptions(Options, frozen=True, kw_only=True):
    """The p_k of FedSPU, assigned to devices in order of first appearance.

    Attributes:
        keep: Comma-separated ratios, one per cluster.
    """

    keep: str = "0.2,0.4,0.6,0.8,1"

    def __post_init__(self) -> None:
        self.ratios()

    def ratios(self) -> list[float]:
        """Parse `keep`; raises ValueError."""
        return parse_ratios(self.keep)


def decide(options: ClusterOptions, _solver: object, case: Case) -> Decision:
    """Assign every device the ratio of its cluster, or the ratio that it has for the whole run."""
    ratios, devices = options.ratios(), {}
    for device in case.names:
        figures, ratio = case.figures_of(device), ratios[case.places[device] % len(ratios)]
        keep = figures["keep"].value if "keep" in figures else ratio
        binding = "cluster" if keep == ratio else "settled"
        devices[device] = DeviceDecision(values={"keep": keep}, figures=figures, binding=binding)
    return Decision(devices=devices)
