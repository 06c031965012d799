"""Plugins of a plan, for its record, its tasks and its resumption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.journal.records import RunOpened
from edge_server.plan.plan import Plan
from edge_server.plan.project import require_project
from shared.algorithms import ALGORITHMS
from shared.codecs import CODECS
from shared.data.sources.read import SOURCES
from shared.errors import ConfigError
from shared.models import MODELS
from shared.objectives.loss_table import LOSSES
from shared.objectives.metric_table import METRICS
from shared.plugins import SHOWN_DIGITS, identify
from shared.protocol.messages import PluginVersion
from shared.registry import Registry

REGISTRIES: Sequence[Registry[Any]] = (ALGORITHMS, ALLOCATORS, CODECS, LOSSES, METRICS, MODELS, SOURCES)
"""Every kind of plugin, in the order of the entry points' groups."""
DEFAULT_LOSS = "cross_entropy"
SERVER_KINDS = frozenset({ALLOCATORS.kind, SOURCES.kind})
"""Kinds of which devices have none, or choose their own."""


def plan_plugins(plan: Plan) -> tuple[PluginVersion, ...]:
    """Return the plugins that a plan names; empty if all of its names are built in.

    Raises:
        ConfigError: One is unknown, not allowed in this process, or cannot be imported.
    """
    return identify(_names(plan))


def task_plugins(plan: Plan) -> tuple[PluginVersion, ...]:
    """Return the plugins that tasks of a plan need on devices."""
    return identify((registry, name) for registry, name in _names(plan) if registry.kind not in SERVER_KINDS)


def changed_network_code(begun: RunOpened) -> str:
    """Describe how the code of a run's network differs from that of its beginning; empty if it does not.

    Raises:
        ConfigError: As `plan_plugins`, or the code of its project is missing.
    """
    plan = begun.plan
    require_project(plan, begun.run)
    return describe_changes(begun, identify([(ALGORITHMS, plan.algorithm.name), (MODELS, plan.model.name)]))


def describe_changes(begun: RunOpened, plugins: Sequence[PluginVersion]) -> str:
    """Describe the first plugin with other code than a run began with; empty if there is none."""
    recorded = {(plugin.kind, plugin.name): plugin for plugin in begun.plugins or ()}
    for plugin in plugins:
        before = recorded.get((plugin.kind, plugin.name))
        if before and before.digest != plugin.digest:
            return (
                f"run {begun.run!r} began with {plugin.kind} {plugin.name!r} {before.version} (digest "
                f"{before.digest[:SHOWN_DIGITS]}), and here it is {plugin.version} (digest "
                f"{plugin.digest[:SHOWN_DIGITS]}): a file of its package was added, changed or removed"
            )
    return ""


def require_recorded(begun: RunOpened, plugins: Sequence[PluginVersion]) -> None:
    """Refuse to resume a run with other code of a plugin than it began with.

    Raises:
        ConfigError: A digest differs; the message names both.
    """
    if changes := describe_changes(begun, plugins):
        raise ConfigError(f"{changes}; restore that version, or name another run")


def _names(plan: Plan) -> Iterator[tuple[Registry[Any], str]]:
    yield ALGORITHMS, plan.algorithm.name
    yield MODELS, plan.model.name
    yield CODECS, plan.codec.name
    yield CODECS, plan.cut_codec.name
    yield LOSSES, plan.objective.loss or DEFAULT_LOSS
    for metric in plan.objective.metrics:
        yield METRICS, metric
    if plan.optimizer:
        yield ALLOCATORS, plan.optimizer.name
    for data in (plan.data, plan.server_data):
        if data:
            yield SOURCES, data.source
