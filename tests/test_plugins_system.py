"""A run whose algorithm, network, codec and data source are plugins: live and in replay, recorded with their digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.journal.records import RunOpened, closed_rounds
from edge_server.journal.sqlite import read_records
from tests.edge_server.processes import final, folder_of, started
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto
from tests.naming import names_all
from tests.plugin_files import write_distribution

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]

PLAN = """
name = "plugged"
rounds = {rounds}
local = 2
data = {{ source = "pairs", path = "count" }}
model = {{ name = "tiny" }}
algorithm = {{ name = "slow", options = {{ share = 0.5 }} }}
codec = {{ name = "fieldplug.methods:plain" }}
hyper = {{ batch_size = 16, learning_rate = 0.1 }}
partition = {{ kind = "even" }}
evaluation = {{ every = 0 }}
device = [{{ name = "a" }}, {{ name = "b" }}]
"""


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Return a function that runs the plan with a command; it gives code, output and runs."""
    code = tmp_path / "code"
    code.mkdir()
    write_distribution(code)
    (tmp_path / "count").write_text("66")
    monkeypatch.setenv("PYTHONPATH", str(code))
    monkeypatch.setenv("FIELDFLEET_PLUGINS", "field-plug:* fieldplug.methods:plain")

    def run(*command: str, rounds: int = 2) -> tuple[int, str, Path]:
        plan, runs, log = tmp_path / "plan.toml", tmp_path / "-".join(command), tmp_path / "log"
        plan.write_text(PLAN.format(rounds=rounds))
        log.unlink(missing_ok=True)
        with started("edge_server", *command, plan, "--data-root", tmp_path, "--data-dir", runs, log=log) as process:
            code = process.wait(300)
        return code, log.read_text(), runs

    return run


def test_plugins_of_every_kind_train_the_same_live_and_in_replay(ran):
    live = ran("trial", "run")
    again = ran("replay")
    assert (live[0], again[0]) == (0, 0), live[1] + again[1]
    for _, _, runs in (live, again):
        records = read_records(folder_of(runs))
        assert [len(closed.arrived) for closed in closed_rounds(records)] == [2, 2]
        [opened] = [record for record in records if isinstance(record, RunOpened)]
        assert [(plugin.kind, plugin.name, plugin.distribution, plugin.version) for plugin in opened.plugins] == [
            ("algorithm", "slow", "field-plug", "1.2"),
            ("model", "tiny", "field-plug", "1.2"),
            ("codec", "fieldplug.methods:plain", "field-plug", "1.2"),
            ("source", "pairs", "field-plug", "1.2"),
        ]
        assert len({plugin.digest for plugin in opened.plugins}) == 1
    require_equal(final(folder_of(live[2]), 2), final(folder_of(again[2]), 2))


def test_a_plugin_that_is_not_listed_is_refused_when_the_plan_is_read(ran, monkeypatch):
    monkeypatch.setenv("FIELDFLEET_PLUGINS", "field-plug:slow fieldplug.methods:plain")
    code, said, _ = ran("replay")
    assert code == 2
    assert names_all(said, "field-plug:tiny", "FIELDFLEET_PLUGINS")
