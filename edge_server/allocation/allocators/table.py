"""Table of allocators: options, decided values and functions by `optimizer.name` of a plan."""

from __future__ import annotations

from typing import Any

from edge_server.allocation.allocator import Allocator, WhatIf
from edge_server.allocation.allocators import (
    bandwidth_decision,
    bandwidth_figures,
    bandwidth_what_if,
    clusters,
    hcef,
    hcef_figures,
    keep_ratio,
)
from shared.registry import Registry

ALLOCATORS: Registry[Allocator[Any]] = Registry(
    "allocator",
    "allocators",
    {
        "bandwidth": Allocator(
            options=bandwidth_figures.BandwidthOptions,
            decides=("prune", "share", "up_bits_per_s"),
            decide=bandwidth_decision.decide,
            limits=bandwidth_figures.compute_limits,
            figures=bandwidth_figures.estimate_figures,
            what_if=WhatIf(clock="step_s", keep_ratios=bandwidth_what_if.keep_with_changed_figures),
            solvers=("numpy", "cvxpy"),
        ),
        "clusters": Allocator(options=clusters.ClusterOptions, decides=("keep",), decide=clusters.decide),
        "hcef": Allocator(
            options=hcef_figures.HcefOptions,
            decides=(hcef.STEPS, hcef.SENT),
            decide=hcef.decide,
            limits=hcef_figures.compute_limits,
            figures=hcef_figures.estimate_figures,
            spread=hcef_figures.spread_estimates,
            candidates=hcef_figures.HcefOptions.levels,
            objective="convergence bound (15a)",
            shared="joule of the round",
            solvers=("numpy", "cvxpy"),
        ),
        "keep_ratio": Allocator(
            options=keep_ratio.KeepOptions,
            decides=("keep",),
            decide=keep_ratio.decide,
            limits=keep_ratio.compute_limits,
            figures=keep_ratio.estimate_figures,
            what_if=WhatIf(clock="task_s", keep_ratios=keep_ratio.keep_with_changed_figures),
            candidates=keep_ratio.KeepOptions.ratios,
        ),
    },
    product=Allocator,
    holds_products=True,
)
