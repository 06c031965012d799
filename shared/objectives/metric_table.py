"""Table of metrics by name: built-in ones and plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.objectives.metrics import builders
from shared.registry import Registry

METRICS: Registry[Callable[..., Any]] = Registry("metric", "metrics", builders())
"""Builders of metrics by name. A plugin is a builder without parameters, or a function (outputs, targets) -> one value
per example, whose mean is the metric."""
