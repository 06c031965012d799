"""Plan table `[partition]`: how simulated devices share one data set."""

from __future__ import annotations

import math
from typing import Literal

from edge_server.plan.sections import Section


class PartitionPlan(Section, frozen=True, kw_only=True):
    """How local agents and replayed devices share one data set; a real device brings its own examples.

    Attributes:
        kind: `none`: every device has all examples; `dirichlet`: shares of the classes are drawn for each device;
            `shards`: each has a few runs of the examples sorted by class; `even`: equal parts; `client`: the examples
            of the client of the data set (`[data] client_column`) that is named as the device is.
        alpha: Of `dirichlet`: concentration; 0.1 is very unequal, 100 nearly even.
        shards_per_device: Of `shards`: how many runs of examples each device has.
        min_examples: Of `dirichlet`: no device has fewer.
        seed: Of what is drawn.
    """

    kind: Literal["none", "dirichlet", "shards", "even", "client"] = "none"
    alpha: float = 0.5
    shards_per_device: int = 2
    min_examples: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what the journal could not hold; the rest is for the data set to say."""
        if not 0 < self.alpha < math.inf:
            raise ValueError("alpha must be > 0 and finite")
