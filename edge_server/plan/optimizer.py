"""Plan table `[optimizer]`: resource allocation per round."""

from __future__ import annotations

from typing import Literal

import msgspec

from edge_server.plan.sections import Section
from shared.protocol.messages import Scalar


class OptimizerPlan(Section, frozen=True, kw_only=True):
    """What decides how much each device is given in a round, and within which limits.

    Attributes:
        name: One of the optimizers that have a section of options below.
        solver: `numpy`, or for `bandwidth` and `hcef` also `cvxpy`, which is slower by far and there to compare.
        options: Options of that optimizer.
    """

    name: str
    solver: Literal["numpy", "cvxpy"] = "numpy"
    options: dict[str, Scalar] = msgspec.field(default_factory=dict)
