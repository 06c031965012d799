"""Allocator `bandwidth`: joint uplink shares and pruning ratios of paper 004."""

from __future__ import annotations

from edge_server.allocation.allocator import Allocator, WhatIf
from edge_server.allocation.allocators.bandwidth_decision import decide
from edge_server.allocation.allocators.bandwidth_figures import BandwidthOptions, figures, limits
from edge_server.allocation.allocators.bandwidth_what_if import keep_with_changed_figures

BANDWIDTH = Allocator(
    options=BandwidthOptions,
    decides=("prune", "share", "up_bits_per_s"),
    decide=decide,
    limits=limits,
    figures=figures,
    what_if=WhatIf(clock="step_s", keep_ratios=keep_with_changed_figures),
    solvers=("numpy", "cvxpy"),
)
