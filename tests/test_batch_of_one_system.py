"""A last batch of one example joins the batch before it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edge_server.journal.records import closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.replay.trace.export import trace_of
from tests.edge_server.processes import captured, final, folder_of
from tests.edge_server.textbook import require_equal
from tests.machine import needs_mosquitto
from tests.naming import names_all

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]

NETWORK = """
from torch import nn
from shared.models.base import Model

def net(features: int = 4, classes: int = 3) -> Model:
    layers = nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
    return Model(nn.Sequential(nn.Flatten(), *layers), {1: 2}, (features,))
"""
PLAN = """
name = "one"
rounds = 2
local = 2
data = {{ source = "csv", path = "data" }}
model = {{ name = "batchnorm_net:net" }}
algorithm = {{ {algorithm} }}
hyper = {{ batch_size = {batch_size}, learning_rate = 0.1 }}
partition = {{ kind = "even" }}
device = [{{ name = "a" }}, {{ name = "b" }}]
"""
FEDAVG, FEDSL = 'name = "fedavg"', 'name = "fedsl", options = { cut = 1 }'


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Return a function that runs a plan with a command; it gives the exit code, the output and the records."""
    (tmp_path / "batchnorm_net.py").write_text(NETWORK)
    (tmp_path / "data").mkdir()
    for name, count in (("train", 66), ("test", 30)):  # 33 examples a device: 16, 16 and 1
        rows = [f"{i % 7},{i % 3},{i % 5},{(i % 3) ** 2},{i % 3}" for i in range(count)]
        (tmp_path / "data" / f"{name}.csv").write_text("\n".join(["a,b,c,d,label", *rows]) + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the agents of a live run
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "batchnorm_net", raising=False)
    monkeypatch.setenv("FIELDFLEET_MODELS", "batchnorm_net:net")

    def run(*command: str, algorithm: str = FEDAVG, batch_size: int = 16) -> tuple[int, str, Path]:
        plan, runs = tmp_path / "plan.toml", tmp_path / "-".join(command)
        plan.write_text(PLAN.format(algorithm=algorithm, batch_size=batch_size))
        done = captured(*command, plan, "--data-root", tmp_path, "--data-dir", runs)
        return done.code, done.out + done.err, folder_of(runs)

    return run


def test_a_last_batch_of_one_trains_the_same_live_and_in_replay(ran):
    live = ran("trial", "run")
    again = ran("replay", "--workers", "1")
    assert (live[0], again[0]) == (0, 0), live[1] + again[1]
    figures = [
        [(one.round, len(one.arrived), one.accuracy, one.test_loss) for one in closed_rounds(read_records(folder))]
        for _, _, folder in (live, again)
    ]
    assert [row[1] for row in figures[0]] == [2, 2]
    assert figures[0] == figures[1]
    require_equal(final(live[2], 2), final(again[2], 2))
    assert {row.steps for row in trace_of(read_records(live[2])).tasks if row.purpose == "train"} == {2}


def test_a_split_network_with_batch_norm_on_the_server_trains_too(ran):
    code, said, folder = ran("replay", "--workers", "1", algorithm=FEDSL)
    assert code == 0, said
    assert [len(one.arrived) for one in closed_rounds(read_records(folder))] == [2, 2]


def test_batches_of_one_are_refused_with_the_remedy(ran):
    code, said, _ = ran("replay", "--workers", "1", batch_size=1)
    assert code == 1
    assert names_all(said, "hyper.batch_size", 2)
