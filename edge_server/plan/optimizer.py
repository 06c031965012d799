"""Plan table `[optimizer]`: the solver that allocates resources in each round."""

from __future__ import annotations

from typing import Literal

import msgspec

from edge_server.plan.sections import Section
from shared.protocol.messages import Scalar


class OptimizerPlan(Section, frozen=True, kw_only=True):
    """Optimizer that assigns resources to the devices of a round, with its limits.

    Attributes:
        name: Optimizer that has a section of options below.
        solver: `numpy`, or for `bandwidth` and `hcef` also `cvxpy`, which is far slower and meant for comparison.
        options: Options of the named optimizer.
    """

    name: str
    solver: Literal["numpy", "cvxpy"] = "numpy"
    options: dict[str, Scalar] = msgspec.field(default_factory=dict)
