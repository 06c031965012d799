"""Table of allocators: options, decided values and functions by `optimizer.name` of a plan."""

from __future__ import annotations

from typing import Any

from edge_server.allocation.allocator import Allocator

ALLOCATORS: Registry[Allocator[Any]] = Registry(
    "allocator",
    "allocators",
    {"bandwidth": BANDWIDTH, "clusters": CLUSTERS, "hcef": HCEF, "keep_ratio": KEEP_RATIO},
    product=Allocator,
    holds_products=True,
)
