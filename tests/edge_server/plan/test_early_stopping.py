"""Early stopping is one section of a plan, and in tasks and records what versions before wrote."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.plan.data import apply_fallback
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan
from tests.naming import naming

FALLBACK = '[fallback]\ndata = { source = "digits" }\nalgorithm = { name = "%s" }'
METHOD = 'name = "fedspu"'


def plan(folder, options: str, *, rest: str = "", **sections: str) -> Plan:
    """Return a plan of FedSPU with these options."""
    return load(write_plan(folder, algorithm=f"{METHOD}\noptions = {{ {options} }}", more=rest, **sections), folder)


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ("", "early_stopping = true"),
        ("share = 0.7\nmin_alive = 1", "early_stopping = true"),
        ("share = 0.4", "early_stopping = true, share = 0.4"),
        ("min_alive = 10", "early_stopping = true, min_alive = 10"),
    ],
)
def test_the_section_is_the_options_that_plans_of_before_gave(tmp_path, section, options):
    """Equal, so that a run that was begun with them goes on; byte for byte, so that a version before reads it."""
    before = plan(tmp_path, f"keep = 0.5, {options}")
    now = plan(tmp_path, "keep = 0.5", early_stopping=section)
    assert now == before
    recorded = msgspec.json.encode(now)
    assert recorded == msgspec.json.encode(before)
    assert b'"early_stopping":{' not in recorded
    assert msgspec.json.decode(recorded, type=Plan) == now


def test_a_plan_without_it_is_recorded_as_versions_before_recorded_it(tmp_path):
    """What it does not use has no key."""
    assert "early_stopping" not in msgspec.to_builtins(plan(tmp_path, "keep = 0.5"))
    assert plan(tmp_path, "early_stopping = false").algorithm.options == {"early_stopping": False}


def test_it_is_for_the_method_of_the_fallback_as_well(tmp_path):
    """Whose options take the place of the plan's own."""
    path = write_plan(tmp_path, algorithm=METHOD, early_stopping="share = 0.4", more=FALLBACK % "hermes")
    given = msgspec.toml.decode(path.read_bytes(), type=Plan)
    assert apply_fallback(given).algorithm.options == given.algorithm.options == {"early_stopping": True, "share": 0.4}
    path = write_plan(tmp_path, algorithm=METHOD, early_stopping="", more=FALLBACK % "fedavg")
    with pytest.raises(ConfigError, match=naming("early_stopping", "fedavg")):
        load(path, tmp_path)
