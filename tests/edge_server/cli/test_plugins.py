"""`edge-server plugins`: what is installed and listed here, without importing any of it."""

from __future__ import annotations

import json
import sys

import pytest

from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.allocation.coordinator import find_allocator
from edge_server.plan.optimizer import OptimizerPlan
from shared import registry
from shared.plugins import source_digest
from tests.edge_server.processes import captured
from tests.plugin_files import write_distribution


@pytest.fixture
def installed(tmp_path, monkeypatch):
    write_distribution(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(registry.VARIABLE, "field-plug:slow fieldplug.methods:*")
    source_digest.cache_clear()
    yield tmp_path
    registry.allow([])
    for name in [name for name in sys.modules if name.partition(".")[0] == "fieldplug"]:
        del sys.modules[name]


def test_plugins_are_listed_with_version_and_digest(installed):
    done = captured("plugins", "--format", "json")
    assert done.code == 0, done.err
    listed = {(one["kind"], one["name"]): one for one in json.loads(done.out) if one["distribution"] == "field-plug"}
    assert set(listed) == {
        *(("algorithm", "slow"), ("codec", "plain"), ("model", "tiny"), ("source", "pairs")),
        ("any", "fieldplug.methods:*"),
    }
    assert {one["version"] for one in listed.values()} == {"1.2"}
    assert len({one["digest"] for one in listed.values()}) == 1
    assert "fieldplug.methods" not in sys.modules
    shown = captured("plugins").out
    assert listed["algorithm", "slow"]["digest"][:12] in shown


def test_the_servers_file_lists_plugins_too(installed, monkeypatch):
    monkeypatch.setenv(registry.VARIABLE, "")
    config = installed / "server.toml"
    for lines, expected in (("", {False}), ('[trainer]\nplugins = ["field-plug:*"]\n', {True})):
        config.write_text(f'plan = "plan.toml"\nsite = "lab"\n{lines}')
        done = captured("plugins", "--format", "json", "--config", config)
        assert {one["listed"] for one in json.loads(done.out) if one["distribution"] == "field-plug"} == expected


def test_an_allocator_of_ones_own_is_found_by_its_name(installed):
    (installed / "fieldplug" / "spread.py").write_text(
        "from dataclasses import replace\nfrom edge_server.allocation.allocators.table import ALLOCATORS\n"
        'EVEN = replace(ALLOCATORS["keep_ratio"], objective="evenness")\n'
    )
    registry.allow(["fieldplug.spread:*"])
    allocator = find_allocator(OptimizerPlan(name="fieldplug.spread:EVEN"))
    assert allocator.objective == "evenness"
    assert allocator.options is ALLOCATORS["keep_ratio"].options
