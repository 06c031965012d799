"""The ratio that fits, found from what tasks cost, in a replay of FedSPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.allocation.explain import Explanation, explain
from edge_server.journal.records import RoundOpened
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from tests.edge_server.harness import write_examples, write_plan

DEVICES = """
[[device]]
name = "fast"
compute_s = 2.0
up_mbit_s = 1.0
down_mbit_s = 1.0
[[device]]
name = "slow"
compute_s = 2.0
up_mbit_s = 0.1
down_mbit_s = 0.1
"""


def explained(
    folder: Path, optimizer: str, algorithm: str = "fedspu", devices: str = DEVICES, **sections: str
) -> list[Explanation]:
    text = {
        "algorithm": f'name = "{algorithm}"',
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 2048, classes = 3 }',
        "data": write_examples(folder, 60),
        "partition": 'kind = "even"',
        "round": "deadline_s = 500.0",
        "optimizer": optimizer,
    } | sections
    path = write_plan(folder, rounds=3, more=devices, **text)
    _, records = replay_plan(load(path, folder), folder / "run")
    return [explain(records, one.round) for one in records if isinstance(one, RoundOpened)]


def test_a_slow_link_keeps_less_and_predictions_come_true(tmp_path):
    """98 kB both ways: 1.6 s of the fast link, 15.7 s of the slow one; 10 s are allowed, and 2 s are computed."""
    found = explained(tmp_path, 'name = "keep_ratio"\noptions = { deadline_s = 10.0 }')
    for one in found:
        fast, slow = one.devices
        assert fast.values == {"keep": 1.0}
        assert fast.binding == "full"
        assert slow.values == {"keep": 0.4}
        assert slow.binding == "time"
        assert slow.measured
        assert slow.measured.upload_s == pytest.approx(slow.predicted.upload_s, rel=0.05)
    assert found[0].devices[1].figures["up_bits_per_s"].source == "profile"
    assert found[2].devices[1].figures["up_bits_per_s"].source == "measured"
    assert found[2].devices[1].figures["task_s"].source == "measured"


@pytest.mark.parametrize("algorithm", ["hermes", "fedmp", "prunefl"])
def test_methods_that_choose_once_are_decided_once_and_the_record_says_what_is_kept(tmp_path, algorithm):
    """Time runs out, and with it what would fit; they keep their part all the same, and are charged for that."""
    optimizer = 'name = "keep_ratio"\noptions = { curve = "smaller", task_s = 2.0 }'
    cycles = 'compute = { kind = "ranges", hertz = 1e9, cycles_per_step = 1e9 }'
    devices = DEVICES.replace("compute_s = 2.0", cycles)
    found = explained(tmp_path, optimizer, algorithm, devices, budget="time_s = 36.0")
    steps_s = found[0].devices[0].measured.compute_s  # of the fast one, which keeps all
    assert [one.values["keep"] for one in found[0].devices] == [1.0, 0.6]
    assert not found[1].feasible
    for one in found[1:]:
        for device, keep in zip(one.devices, (1.0, 0.6), strict=True):
            assert (device.values["keep"], device.binding) == (keep, "settled")
            assert device.measured.compute_s == pytest.approx(steps_s * keep**2)
            assert device.measured.upload_s == pytest.approx(device.predicted.upload_s, rel=0.05)
            assert device.measured.bytes_up == pytest.approx(device.predicted.bytes_up, rel=0.05)


def test_clusters_are_those_of_the_plans_order(tmp_path):
    for one in explained(tmp_path, 'name = "clusters"\noptions = { keep = "0.2,1" }'):
        assert {device.device: device.values["keep"] for device in one.devices} == {"fast": 0.2, "slow": 1.0}
