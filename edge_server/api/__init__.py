"""Python interface: check plans, run them in virtual time or live, and read runs.

    from edge_server import api

    plan = api.plan("deploy/plans/demo.toml", rounds=3)
    run = api.replay(plan)
    run.frame()

`deploy/docs/api.md` describes every function.
"""

from __future__ import annotations

from edge_server.api.comparisons import Comparison, compare
from edge_server.api.execution import replay, replay_sites, trial, trial_sites
from edge_server.api.figures import RunFigure
from edge_server.api.plans import plan
from edge_server.api.progress import RoundProgress
from edge_server.api.runs import Run, open_run
from edge_server.plan.plan import Plan
from shared.errors import ConfigError, FieldFleetError

__all__ = [
    "Comparison",
    "ConfigError",
    "FieldFleetError",
    "Plan",
    "RoundProgress",
    "Run",
    "RunFigure",
    "compare",
    "open_run",
    "plan",
    "replay",
    "replay_sites",
    "trial",
    "trial_sites",
]
