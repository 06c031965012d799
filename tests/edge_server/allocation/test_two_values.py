"""An allocator that decides two values a device: one file and one line of the registry, from the plan to the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.allocation import coordinator
from edge_server.allocation.explain import explain, explanation_lines
from edge_server.allocation.inputs import recorded_case
from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.journal.sqlite import read
from edge_server.replay.run import replay
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from tests.edge_server.allocation.hcef_allocator import HCEF
from tests.edge_server.harness import write_examples, write_plan

DEVICES = """
[[device]]
name = "fast"
compute_s = 2.0
up_mbit_s = 10.0
down_mbit_s = 10.0
[[device]]
name = "slow"
compute_s = 2.0
up_mbit_s = 0.05
down_mbit_s = 10.0
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The one line of the registry."""
    monkeypatch.setitem(coordinator.ALLOCATORS, "hcef", HCEF)


def plan_file(folder: Path, options: str) -> Path:
    text = {
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 512, classes = 3 }',
        "data": write_examples(folder, 60),
        "partition": 'kind = "even"',
        "round": "deadline_s = 500.0",
        "optimizer": f'name = "hcef"\noptions = {{ {options} }}',
    }
    return write_plan(folder, rounds=2, more=DEVICES, **text)


@pytest.fixture
def records(tmp_path) -> list[AnyRecord]:
    replay(load(plan_file(tmp_path, "deadline_s = 4.0, tau = 6"), tmp_path), tmp_path / "run")
    return read(tmp_path / "run")


def test_both_values_are_decided_recorded_and_told_to_every_device(records):
    """4 s allow 6 steps of 0.5 s and a second of upload: the whole change at 10 Mbit/s, a part of it at 50 kbit/s."""
    rounds = [one for one in records if isinstance(one, RoundOpened)]
    assert len(rounds) == 2
    for one in rounds:
        assert one.decision.optimizer == "hcef"
        for device, given in one.decision.devices.items():
            told = one.assignments[device].values
            assert given.values.keys() == {"local_steps", "top_k"}
            assert {name: told[name] for name in given.values} == given.values
        fast, slow = (one.decision.devices[device] for device in ("fast", "slow"))
        assert fast.values["top_k"] == pytest.approx(1.0)
        assert fast.values["local_steps"] > 1
        assert 0.0 < slow.values["top_k"] < 0.9
        assert slow.predicted.compute_s + slow.predicted.upload_s <= 4.0 + 0.5


def test_both_values_are_explained(records):
    found = explain(records, 1)
    assert [one.device for one in found.devices] == ["fast", "slow"]
    assert all(one.values.keys() == {"local_steps", "top_k"} and not one.buys for one in found.devices)
    text = "\n".join(explanation_lines(found))
    assert "hcef decided, for tasks within 4 s" in text
    assert f"local_steps {found.devices[0].values['local_steps']}" in text
    assert "top_k 1" in text


def test_the_same_case_gives_the_same_decision(records):
    for one in records:
        if isinstance(one, RoundOpened):
            table = records[0].plan.optimizer
            assert coordinator.decide(table, recorded_case(one.decision)) == one.decision


def test_a_mistake_in_its_options_names_file_key_and_remedy(tmp_path):
    path = plan_file(tmp_path, "taus = 6")
    with pytest.raises(ConfigError, match=r"optimizer: options of hcef: .*`taus`; correct its spelling \(known: .*tau"):
        load(path, tmp_path)
    path = plan_file(tmp_path, 'tau = "six"')
    with pytest.raises(ConfigError, match=r"plan.toml: optimizer: options.tau of hcef: Expected `int`.*correct the"):
        load(path, tmp_path)


def test_what_no_method_uses_is_told(tmp_path, caplog):
    load(plan_file(tmp_path, "tau = 6"), tmp_path)
    assert "decides local_steps, top_k, which algorithm 'fedavg' does not use" in caplog.text
