"""Boards with tables of their own whose class names or preparation differ: agents, broker and server are processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from edge_server.fleet import broker
from edge_server.journal.records import closed_rounds
from edge_server.journal.runs import find_run
from edge_server.journal.sqlite import read_records
from edge_server.release.run_model import read_model
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import PATIENCE_S, folder_of, forked, started
from tests.machine import needs_mosquitto
from tests.naming import names_all

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]
PREPARED = {"mean": [0.5], "std": [2.0]}


def table(left: str, right: str, names: str = "v,w") -> str:
    """Return a table of two classes; what stands before a class and a comma is one feature more."""
    rows = "".join(f"{-place},1,{left}\n{place},1,{right}\n" for place in range(1, 21))
    return f"{names},{'more,' * left.count(',')}label\n{rows}"


@contextmanager
def board(folder: Path, port: int, site: str, name: str, text: str, prepared: dict[str, list[float]]) -> Iterator[None]:
    """Run an agent with a table until the block ends."""
    place = folder / site / name
    place.mkdir(parents=True)
    (place / "table.csv").write_text(text)
    config = {"device": name, "state_dir": "state", "site": site, "broker": {"port": port}, "trainer": {"threads": 1}}
    config["data"] = {"source": "csv", "path": "table.csv"} | prepared  # beside this file
    (place / "agent.json").write_text(json.dumps(config))
    with started("device_agent", "run", "--config", place / "agent.json", log=place / "log"):
        yield


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    """Run a broker with two sites, in which boards name classes otherwise and prepare inputs otherwise."""
    folder = tmp_path_factory.mktemp("boards")
    with asyncio.Runner() as runner, ExitStack() as stack:
        private = broker.run_private_broker(folder)
        port = runner.run(private.__aenter__()).port
        stack.callback(lambda: runner.run(private.__aexit__(None, None, None)))
        for name, classes in (("a", ("cat", "dog")), ("b", ("bird", "cat"))):
            stack.enter_context(board(folder, port, "names", name, table(*classes), {}))
        for name, prepared in (("a", PREPARED), ("b", PREPARED), ("c", {})):
            stack.enter_context(board(folder, port, "inputs", name, table("cat", "dog"), prepared))
        yield port


def run_server(folder: Path, port: int, site: str, data: str, **sections: str) -> tuple[int, str]:
    """Run a plan of a site with this section of data, or none; return the exit code and what the server said."""
    classes = 3 if site == "names" else 2
    model = f'name = "mlp"\noptions = {{ features = 2, hidden = 8, classes = {classes} }}'
    path = write_plan(folder, rounds=1, **{"model": model, "hyper": "batch_size = 8\nlearning_rate = 0.2"} | sections)
    path.write_text(path.read_text().replace('[data]\nsource = "digits"\n', data))
    places = {"data_dir": "runs", "data_root": ".", "broker": {"port": port}, "threads": 1}
    (folder / "server.json").write_text(json.dumps({"plan": "plan.toml", "site": site} | places))
    with forked("run", "--config", folder / "server.json", log=folder / "log") as process:
        code = process.wait(PATIENCE_S)
    return code, (folder / "log").read_text()


PLANNED = '[data]\nsource = "csv"\npath = "own.csv"\nmean = [0.5]\nstd = [2.0]\n'


@pytest.mark.parametrize(
    ("site", "columns", "devices", "named"),
    [
        ("names", "", 2, ("b", "bird, cat", "a", "cat, dog")),  # both are 0 and 1: it ended with code 0
        ("inputs", "v,w", 3, ("c", "mean", "none", "std", 0.5, 2, "[data]")),
        ("inputs", "w,v", 2, ("'v', 'w'", "'w', 'v'")),
        ("inputs", "", 3, ("c", "mean", "none", "std", "a", 0.5, 2)),
    ],
)
def test_a_run_of_boards_that_differ_does_not_begin(port, tmp_path, site, columns, devices, named):
    """From each other, or from a plan with columns: the last line has both sides, and no run is left behind."""
    (tmp_path / "own.csv").write_text(table("cat", "dog", columns))
    code, said = run_server(tmp_path, port, site, PLANNED if columns else "", cohort=f"min_devices = {devices}")
    assert code == 2
    assert names_all(said.splitlines()[-1], *named)
    assert "Traceback" not in said
    assert not list((tmp_path / "runs").glob("tiny-*"))


def test_the_plan_names_classes_and_every_board_numbers_its_own_by_it(port, tmp_path):
    """`cat` is one class, right of zero on one board and left of it on the other; what does not fit has our words."""
    planned = '[data]\nsource = "csv"\npath = "nowhere.csv"\nclasses = ["dog", "bird", "cat"]\n'
    with board(tmp_path, port, "names", "c", table("0,cat", "0,dog"), {}):
        failing = {"cohort": "min_devices = 3", "round": 'on_missed = "stop"'}
        code, said = run_server(tmp_path, port, "names", planned, **failing)
        assert code == 2
        assert any(names_all(line, "c", 3, "a", 2) for line in said.splitlines())
    (again := tmp_path / "again").mkdir()
    code, said = run_server(again, port, "names", planned, cohort="min_devices = 2")
    assert code == 0, said
    [closed] = closed_rounds(read_records(folder_of(again / "runs")))
    assert closed.arrived == ("a", "b")


def test_boards_that_prepare_inputs_as_planned_train_and_the_release_says_how(port, tmp_path):
    (tmp_path / "own.csv").write_text(table("cat", "dog"))
    data = PLANNED + "holdout = 0.1\nlimit = 30\n"
    code, said = run_server(tmp_path, port, "inputs", data, cohort="min_devices = 2", partition='kind = "even"')
    assert code == 0, said
    assert any(names_all(line, "WARNING", "c", "mean", "std") for line in said.splitlines())
    assert any(names_all(line, "WARNING", "data.limit", "data.holdout", "[partition]") for line in said.splitlines())
    [closed] = closed_rounds(read_records(folder_of(tmp_path / "runs")))
    assert closed.arrived == ("a", "b")
    told = read_model(find_run(tmp_path / "runs", "last")).preprocessing
    assert (told.byte_scale, told.dtype, told.layout, told.features) == (1.0, "float32", "NF", ("v", "w"))
    assert (told.mean, told.std) == ((0.5,), (2.0,))
