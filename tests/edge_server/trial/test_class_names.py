"""Boards with tables and folders of their own, whose class names differ: agents, broker and server are processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from edge_server.fleet import broker
from edge_server.journal.records import closed_rounds
from edge_server.journal.sqlite import read_records
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import PATIENCE_S, folder_of, forked, started
from tests.naming import names_all

pytestmark = [
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.skipif(broker.find_mosquitto() is None, reason="mosquitto is not installed"),
]


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    """Run a broker with boards a and b, whose folders of classes are `cat, dog` and `bird, cat`; return its port."""
    folder = tmp_path_factory.mktemp("boards")
    with asyncio.Runner() as runner, ExitStack() as stack:
        private = broker.run_private_broker(folder)
        port = runner.run(private.__aenter__()).port
        stack.callback(lambda: runner.run(private.__aexit__(None, None, None)))
        stack.enter_context(boards(folder, port, a=("cat", "dog"), b=("bird", "cat")))
        yield port


@contextmanager
def boards(folder: Path, port: int, **labels: tuple[str, str]) -> Iterator[None]:
    """Run an agent for each table of two classes until the block ends.

    What stands before a class and a comma is one feature more.
    """
    with ExitStack() as stack:
        for name, (left, right) in labels.items():
            (folder / name).mkdir()
            rows = "".join(f"{-place},1,{left}\n{place},1,{right}\n" for place in range(1, 21))
            (folder / name / "table.csv").write_text(f"v,w,{'more,' * left.count(',')}label\n" + rows)
            config = {
                "device": name,
                "state_dir": "state",
                "site": "lab",
                "broker": {"port": port},
                "trainer": {"threads": 1},
            }
            config["data"] = {"source": "csv", "path": "table.csv"}  # beside this file
            (folder / name / "agent.json").write_text(json.dumps(config))
            words = ("run", "--config", folder / name / "agent.json")
            stack.enter_context(started("device_agent", *words, log=folder / f"{name}.log"))
        yield


def run_server(folder: Path, port: int, **sections: str) -> tuple[int, str]:
    """Run a plan without data of the server's own; return the exit code and what the server said."""
    model = 'name = "mlp"\noptions = { features = 2, hidden = 8, classes = 3 }'
    hyper = "local_epochs = 5\nbatch_size = 8\nlearning_rate = 0.2"
    path = write_plan(folder, rounds=1, **({"model": model, "hyper": hyper} | sections))
    path.write_text(path.read_text().replace('[data]\nsource = "digits"\n', ""))
    config = {"plan": "plan.toml", "site": "lab", "data_dir": "runs", "broker": {"port": port}, "threads": 1}
    (folder / "server.json").write_text(json.dumps(config))
    with forked("run", "--config", folder / "server.json", log=folder / "log") as process:
        code = process.wait(PATIENCE_S)
    return code, (folder / "log").read_text()


def test_other_names_are_refused_with_both_lists(port, tmp_path):
    """Folders `cat, dog` and `bird, cat` are both 0 and 1: it ended with code 0 and without a word."""
    code, said = run_server(tmp_path, port)
    assert code == 2
    last = said.splitlines()[-1]
    assert names_all(last, "b", "bird, cat", "a", "cat, dog")
    assert "Traceback" not in said
    assert not list((tmp_path / "runs").glob("tiny-*"))  # a run that never began leaves nothing behind


def test_the_plan_names_them_and_every_board_numbers_its_own_by_it(port, tmp_path):
    """`cat` is one class, right of zero on one board and left of it on the other; what does not fit has our words."""
    planned = 'source = "csv"\npath = "nowhere.csv"\nclasses = ["dog", "bird", "cat"]'
    with boards(tmp_path, port, c=("0,cat", "0,dog")):
        code, said = run_server(tmp_path, port, data=planned, cohort="min_devices = 3", round='on_missed = "stop"')
        assert code == 2
        assert any(names_all(line, "c", 3, "a", 2) for line in said.splitlines())
    (again := tmp_path / "again").mkdir()
    code, said = run_server(again, port, data=planned, cohort="min_devices = 2")
    assert code == 0, said
    [closed] = closed_rounds(read_records(folder_of(again / "runs")))
    assert closed.arrived == ("a", "b")
