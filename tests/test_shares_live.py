"""A plan's bandwidth optimizer live: agents over mosquitto keep to the shares of it that they were given."""

from __future__ import annotations

import json

import pytest

from edge_server import broker
from edge_server.explain import explain
from edge_server.store.sqlite import read
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import folder_of
from tests.test_system import called, trial

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.skipif(broker.mosquitto() is None, reason="mosquitto is not installed"),
]

DEADLINE_S = 4.0
"""Two devices, 33 k weights each (1.05 Mbit) and a cell of 0.4 Mbit/s: without pruning both would take 5.3 s."""
PLAN = {
    "algorithm": 'name = "pruned_personalization"\noptions = { split = "all_global", personal_steps = 0 }',
    "model": 'name = "mlp"\noptions = { hidden = 440 }',
    "partition": 'kind = "even"',
    "optimizer": f'name = "bandwidth"\noptions = {{ deadline_s = {DEADLINE_S}, compute = "dense" }}',
    "more": '[[device]]\nname = "device"\ncount = 2\ncompute_s = 0.1\nup_mbit_s = 0.4',
}


def test_agents_upload_at_their_share(tmp_path, capsys):
    plan = write_plan(tmp_path, rounds=2, **PLAN)
    done = trial(plan, tmp_path / "runs", "--local", 2)
    assert done.returncode == 0, done.stderr
    folder = folder_of(tmp_path / "runs")
    found = explain(read(folder), 1)
    assert {one.figures["up_bits_per_s"].source for one in found.devices} == {"profile"}
    for one in found.devices:
        assert one.values["share"] == pytest.approx(0.5, abs=1e-3)
        assert 0 < one.values["prune"] < 1
        assert one.measured
        assert one.measured.upload_s == pytest.approx(one.predicted.upload_s, rel=0.25)
        assert one.measured.bytes_up == pytest.approx(one.predicted.bytes_up, rel=0.03)
        assert one.measured.upload_s <= 1.1 * DEADLINE_S
    assert found.seconds is not None  # those in which the trainers started are in it
    assert called("explain", folder, 2, "--format", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [one["device"] for one in shown["devices"]] == ["device-0", "device-1"]
    sources = {one["figures"]["up_bits_per_s"][1] for one in shown["devices"]}
    assert {"measured"} <= sources <= {"measured", "profile"}  # who was last may tell its cost after the decision
    assert called("explain", folder, 2, "--device", "device-1") == 0
    assert "held back by" in capsys.readouterr().out
