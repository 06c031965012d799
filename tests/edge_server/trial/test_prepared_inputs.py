"""Boards whose examples are prepared otherwise than the plan's, or each other's, take no part, and both are shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edge_server.fleet import broker
from edge_server.journal.records import closed_rounds
from edge_server.journal.runs import find_run
from edge_server.journal.sqlite import read_records
from edge_server.release.run_model import read_model
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import PATIENCE_S, folder_of, forked, started
from tests.naming import names_all

pytestmark = [
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.skipif(broker.find_mosquitto() is None, reason="mosquitto is not installed"),
]


def table(names: str) -> str:
    rows = "".join(f"{-place},1,cat\n{place},1,dog\n" for place in range(1, 21))
    return f"{names},label\n{rows}"


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    """Run a broker with three boards that have tables; return its port."""
    folder = tmp_path_factory.mktemp("boards")
    settings: dict[str, dict[str, Any]] = {
        "a": {"mean": [0.5], "std": [2.0]},
        "b": {"mean": [0.5], "std": [2.0]},
        "c": {},
    }
    with asyncio.Runner() as runner, ExitStack() as stack:
        private = broker.run_private_broker(folder)
        port = runner.run(private.__aenter__()).port
        stack.callback(lambda: runner.run(private.__aexit__(None, None, None)))
        for name, more in settings.items():
            (folder / name).mkdir()
            (folder / name / "table.csv").write_text(table("v,w"))
            config = {"device": name, "state_dir": "state", "site": "lab", "broker": {"port": port}}
            config |= {"trainer": {"threads": 1}, "data": {"source": "csv", "path": "table.csv"} | more}
            (folder / name / "agent.json").write_text(json.dumps(config))
            words = ("run", "--config", folder / name / "agent.json")
            stack.enter_context(started("device_agent", *words, log=folder / f"{name}.log"))
        yield port


def run_server(folder: Path, port: int, data: str, **sections: str) -> tuple[int, str]:
    """Run a plan; return the exit code and what the server said."""
    model = 'name = "mlp"\noptions = { features = 2, hidden = 8, classes = 2 }'
    path = write_plan(folder, rounds=1, **{"model": model, "hyper": "batch_size = 8\nlearning_rate = 0.2"} | sections)
    path.write_text(path.read_text().replace('[data]\nsource = "digits"\n', data))
    places = {"data_dir": "runs", "data_root": ".", "broker": {"port": port}, "threads": 1}
    (folder / "server.json").write_text(json.dumps({"plan": "plan.toml", "site": "lab"} | places))
    with forked("run", "--config", folder / "server.json", log=folder / "log") as process:
        code = process.wait(PATIENCE_S)
    return code, (folder / "log").read_text()


PLANNED = '[data]\nsource = "csv"\npath = "own.csv"\nmean = [0.5]\nstd = [2.0]\n'


def test_boards_prepare_inputs_otherwise_than_the_plan(port, tmp_path):
    """The server measured 0.24 and the boards 0.77, with exit code 0."""
    (tmp_path / "own.csv").write_text(table("v,w"))
    code, said = run_server(tmp_path, port, PLANNED, cohort="min_devices = 3")
    assert code == 2
    last = said.splitlines()[-1]
    assert names_all(last, "c", "mean", "none", "std", 0.5, 2, "[data]")
    assert not list((tmp_path / "runs").glob("tiny-*"))  # a run that never began leaves nothing behind


def test_the_others_train_and_the_release_says_what_they_trained_on(port, tmp_path):
    (tmp_path / "own.csv").write_text(table("v,w"))
    data = PLANNED + "holdout = 0.1\nlimit = 30\n"
    code, said = run_server(tmp_path, port, data, cohort="min_devices = 2", partition='kind = "even"')
    assert code == 0, said
    assert any(names_all(line, "WARNING", "c", "mean", "std") for line in said.splitlines())
    assert any(names_all(line, "WARNING", "data.limit", "data.holdout", "[partition]") for line in said.splitlines())
    [closed] = closed_rounds(read_records(folder_of(tmp_path / "runs")))
    assert closed.arrived == ("a", "b")
    told = read_model(find_run(tmp_path / "runs", "last")).preprocessing
    assert (told.byte_scale, told.dtype, told.layout, told.features) == (1.0, "float32", "NF", ("v", "w"))
    assert (told.mean, told.std) == ((0.5,), (2.0,))


def test_a_plan_with_columns_in_another_order(port, tmp_path):
    (tmp_path / "own.csv").write_text(table("w,v"))
    code, said = run_server(tmp_path, port, PLANNED, cohort="min_devices = 2")
    assert code == 2
    assert names_all(said, "'v', 'w'", "'w', 'v'")


def test_boards_that_differ_among_themselves_do_not_begin(port, tmp_path):
    code, said = run_server(tmp_path, port, "", cohort="min_devices = 3")
    assert code == 2
    last = said.splitlines()[-1]
    assert names_all(last, "c", "mean", "none", "std", "a", 0.5, 2)
