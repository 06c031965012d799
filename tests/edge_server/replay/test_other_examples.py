"""Replay of a run whose devices' own examples are not on this machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, RoundClosed, RoundOpened, RunOpened, UpdateAccepted
from edge_server.journal.sqlite import read_records
from edge_server.replay.run import replay_plan
from shared.protocol.inputs import Inputs
from tests.edge_server.processes import captured
from tests.edge_server.textbook import make_plan
from tests.naming import names_all


def changed(record: AnyRecord, name: str, folder: Path) -> AnyRecord:
    """Return a record as it would be of devices with examples of their own."""
    if isinstance(record, RunOpened):
        data = msgspec.structs.replace(record.plan.data, path=str(folder / "gone.npz"))
        plan = msgspec.structs.replace(record.plan, data=data if name == "gone" else msgspec.UNSET)
        return msgspec.structs.replace(record, run=name, plan=plan)
    if isinstance(record, RoundOpened) and name == "told":
        return msgspec.structs.replace(record, inputs=Inputs(shape=(8,)))
    return record


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder of runs: `own` names no data, `told` neither but the shape, `gone` a file that is not there."""
    folder = tmp_path_factory.mktemp("own")
    _, records = replay_plan(make_plan(folder, 3), folder / "first" / "run")
    for name in ("own", "told", "gone"):
        store = SqliteStore(folder / "runs" / name)
        for record in records:
            store.append(changed(record, name, folder))
        store.close()
    np.savez(folder / "mine.npz", x=np.random.default_rng(0).random((90, 8), np.float32), y=np.arange(90) % 3)
    return folder


@pytest.fixture
def call(runs):
    def run(*words: object) -> tuple[int, str]:
        code, out, err = captured("replay", *words, "--data-dir", runs / "runs")
        return code, out + err

    return run


@pytest.mark.parametrize("name", ["own", "gone"])
def test_without_the_boards_examples_both_ways_are_offered(call, name):
    code, said = call(name)
    assert code == 2
    assert names_all(said, "--data", "--synthetic")
    assert ("gone.npz" in said) == (name == "gone")


@pytest.mark.parametrize("words", [("told", "--synthetic"), ("own", "--synthetic", "8"), ("gone", "--synthetic", "8")])
def test_synthetic_examples_give_the_recorded_bytes_and_times(call, runs, words):
    code, said = call(*words)
    assert code == 0, said
    folder = Path(said.splitlines()[-1].partition(" ")[2])
    first, again = read_records(runs / "runs" / "own"), read_records(folder)
    for kind, figure in ((UpdateAccepted, "bytes_up"), (RoundClosed, "bytes_up")):
        told = [[getattr(one, figure) for one in records if isinstance(one, kind)] for records in (first, again)]
        assert told[0] == told[1]
    seconds = [[one.seconds for one in records if isinstance(one, RoundClosed)] for records in (first, again)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)
    assert all(one.accuracy is None for one in again if isinstance(one, RoundClosed))
    assert call(*words)[1].splitlines()[-1] == said.splitlines()[-1], "the same replay has the same record"


def test_a_data_set_of_the_users_is_trained_on(call, runs):
    code, said = call("own", "--data", f"npz={runs / 'mine.npz'}")
    assert code == 0, said
    assert names_all(said, "finished", 3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("own", "--synthetic"), ("own", "--synthetic 1x28x28")),
        (("own", "--synthetic", "9"), (9,)),
        (("own", "--synthetic", "8xx"), ("--synthetic", "8xx")),
        (("own", "--data", "x"), ("--data", "x", "SOURCE=PATH")),
        (("own", "--data", "digits", "--synthetic", "8"), ("--data", "--synthetic")),
        (("none", "--synthetic", "8"), ("none", "edge-server runs")),
    ],
)
def test_what_cannot_be_used_is_named_with_the_remedy(call, words, named):
    code, said = call(*words)
    assert code == 2
    assert names_all(said, *named)
