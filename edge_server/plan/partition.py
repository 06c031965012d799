"""Plan table `[partition]`: how simulated devices share one data set."""

from __future__ import annotations

import math
from typing import Literal

from edge_server.plan.sections import Section


class PartitionPlan(Section, frozen=True, kw_only=True):
    """Partition of one data set among local agents and replayed devices; connected devices have local examples.

    Attributes:
        kind: `none`: every device has all examples; `dirichlet`: class shares are drawn for each device;
            `shards`: each device has a few runs of the examples sorted by class; `even`: equal parts; `client`: the
            examples of the data set's client (`[data] client_column`) with the device's name.
        alpha: Concentration for `dirichlet`; 0.1 is very unequal, 100 nearly even.
        shards_per_device: Number of runs of examples per device, for `shards`.
        min_examples: Minimum number of examples per device, for `dirichlet`.
        seed: Seed of the random partitions.
    """

    kind: Literal["none", "dirichlet", "shards", "even", "client"] = "none"
    alpha: float = 0.5
    shards_per_device: int = 2
    min_examples: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values that JSON cannot store; the data set checks the rest."""
        if not 0 < self.alpha < math.inf:
            raise ValueError("alpha must be > 0 and finite")
