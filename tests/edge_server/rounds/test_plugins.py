"""Plugins of a plan: those of tasks, and the refusal to resume a run with other code."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.journal.records import RunOpened
from edge_server.plan.plan import Plan
from edge_server.rounds.plugins import describe_changes, plan_plugins, require_recorded, task_plugins
from shared import registry
from shared.errors import ConfigError
from shared.plugins import source_digest
from tests.naming import naming
from tests.plugin_files import write_distribution

PLAN = {
    "name": "plugged",
    "rounds": 1,
    "algorithm": {"name": "slow"},
    "model": {"name": "mlp"},
    "data": {"source": "pairs", "path": "count"},
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    write_distribution(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    registry.allow(["field-plug:*"])
    source_digest.cache_clear()
    yield msgspec.convert(PLAN, Plan)
    registry.allow([])


def test_tasks_carry_what_devices_need(plan):
    assert [plugin.name for plugin in plan_plugins(plan)] == ["slow", "pairs"]
    assert [plugin.name for plugin in task_plugins(plan)] == ["slow"]  # each device reads a source of its own


def test_a_run_is_not_resumed_with_other_code(plan):
    plugins = plan_plugins(plan)
    begun = RunOpened(run="r", plan=plan, plugins=plugins)
    require_recorded(begun, plugins)
    require_recorded(RunOpened(run="r", plan=plan), plugins)  # of a version that recorded none
    changed = [msgspec.structs.replace(plugin, digest="e" * 64) for plugin in plugins]
    with pytest.raises(ConfigError, match=naming("'r'", "algorithm", "'slow'", plugins[0].digest[:12], "e" * 12)):
        require_recorded(begun, changed)
    assert describe_changes(begun, plugins) == ""
    assert "e" * 12 in describe_changes(begun, changed)


def test_a_record_without_plugins_is_written_as_before(plan):
    assert b"plugins" not in msgspec.json.encode(RunOpened(run="r", plan=plan))
