"""Bandwidth shares in a replay: link rates, deadlines and record agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.allocation.explain import explain
from edge_server.journal.records import AnyRecord, RoundOpened, closed_rounds
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from tests.edge_server.harness import write_examples, write_plan

DEADLINE_S = 20.0
DEVICES = """
[[device]]
name = "a"
compute_s = 4.0
up_mbit_s = 0.4
[[device]]
name = "b"
compute_s = 1.0
up_mbit_s = 0.8
[[device]]
name = "c"
compute_s = 6.0
up_mbit_s = 0.2
"""


def played(folder: Path, optimizer: str, rounds: int = 3, devices: str = DEVICES) -> list[AnyRecord]:
    text = {
        "algorithm": 'name = "pruned_personalization"\noptions = { split = "all_global", personal_steps = 0 }',
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 8192, classes = 3 }',
        "data": write_examples(folder, 90),
        "partition": 'kind = "even"',
        "cohort": "min_devices = 3",
        "round": "deadline_s = 500.0",
        "optimizer": optimizer,
    }
    path = write_plan(folder, rounds=rounds, more=devices, **text)
    return replay_plan(load(path, folder), folder / "run")[1]


def options(**more: str) -> str:
    own = {"deadline_s": str(DEADLINE_S), "compute": '"dense"', "most_pruned": "1.0"} | more
    return 'name = "bandwidth"\noptions = { ' + ", ".join(f"{name} = {value}" for name, value in own.items()) + " }"


def test_rounds_keep_to_the_deadline_and_each_device_has_its_share(tmp_path):
    records = played(tmp_path, options())
    openings = [record for record in records if isinstance(record, RoundOpened)]
    assert len(openings) == 3
    for record in openings:
        assert record.decision
        shares = [given.values["share"] for given in record.decision.devices.values()]
        assert sum(shares) == pytest.approx(1.0)
        assert any(given.values["prune"] > 0 for given in record.decision.devices.values())
    for closed in closed_rounds(records):
        assert closed.seconds <= 1.05 * DEADLINE_S
    for number in (1, 2, 3):
        found = explain(records, number)
        for one in found.devices:
            assert one.measured
            # A plan gives the seconds of a task that prunes; without warm-up it has five steps in place of six.
            is_guess = number == 1 and one.values["prune"] == 0
            assert one.measured.compute_s == pytest.approx(one.predicted.compute_s * (6 / 5 if is_guess else 1))
            assert one.measured.upload_s == pytest.approx(one.predicted.upload_s, rel=0.03)
    assert explain(records, 1).devices[0].figures["up_bits_per_s"].source == "profile"
    later = explain(records, 3).devices[0].figures["up_bits_per_s"]
    assert later.source == "measured"
    assert later.value == pytest.approx(4e5, rel=0.02)


def test_equal_shares_with_the_best_ratios_miss_it(tmp_path):
    """Reading (ii) of the paper's baseline."""
    records = played(tmp_path, options(equal='"ratio"'))
    assert max(closed.seconds for closed in closed_rounds(records)) > 1.1 * DEADLINE_S


def test_a_replay_without_the_table_is_as_before(tmp_path):
    """Each device has its whole link, and nothing is decided."""
    own = {"data": write_examples(tmp_path, 90), "model": 'name = "mlp"\noptions = { features = 8, classes = 3 }'}
    path = write_plan(tmp_path, rounds=1, more=DEVICES, partition='kind = "even"', **own)
    _, records = replay_plan(load(path, tmp_path), tmp_path / "run")
    assert [record.decision for record in records if isinstance(record, RoundOpened)] == [None]
