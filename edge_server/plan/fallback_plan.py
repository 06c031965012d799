"""What a plan trains with where its data is not there, so that an example runs everywhere."""

from __future__ import annotations

from edge_server.plan.optimizer import OptimizerPlan
from edge_server.plan.sections import Chosen, HyperPlan, Section
from shared.data.spec import Data


class FallbackPlan(Section, frozen=True, kw_only=True):
    """Takes the place of the plan's sections of these names if the path of its data does not exist.

    Attributes:
        data: Other data, which need no download.
        model, algorithm, hyper, optimizer: Such as fit them; the plan's own where left out.
    """

    data: Data
    model: Chosen | None = None
    algorithm: Chosen | None = None
    hyper: HyperPlan | None = None
    optimizer: OptimizerPlan | None = None
