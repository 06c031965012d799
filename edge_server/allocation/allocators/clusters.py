"""Allocator `clusters`: paper 001's keep ratios, by order of first appearance.

Z. Niu, H. Dong, A. K. Qin: FedSPU, AAAI 2025, section 4. https://arxiv.org/abs/2403.11464
"""

from __future__ import annotations

from edge_server.allocation.allocator import Allocator
from edge_server.allocation.inputs import Case
from edge_server.allocation.options import Options, parse_ratios
from edge_server.journal.decision import Decision, DeviceDecision


class ClusterOptions(Options, frozen=True, kw_only=True):
    """Of `clusters`: the p_k of paper 001, dealt to the devices as they first appear.

    Attributes:
        keep: The ratios, one a cluster, with commas between.
    """

    keep: str = "0.2,0.4,0.6,0.8,1"

    def __post_init__(self) -> None:
        self.ratios()

    def ratios(self) -> list[float]:
        """Return the ratios. Raises ValueError."""
        return parse_ratios(self.keep)


def decide(options: ClusterOptions, _solver: object, case: Case) -> Decision:
    """Give every device the ratio of its cluster; one that was given another once and for all has that.

    Args:
        case: What it is decided from.
    """
    ratios, devices = options.ratios(), {}
    for device in case.names:
        figures, ratio = case.figures_of(device), ratios[case.places[device] % len(ratios)]
        keep = figures["keep"].value if "keep" in figures else ratio
        binding = "cluster" if keep == ratio else "settled"
        devices[device] = DeviceDecision(values={"keep": keep}, figures=figures, binding=binding)
    return Decision(devices=devices)


CLUSTERS = Allocator(options=ClusterOptions, decides=("keep",), decide=decide)
