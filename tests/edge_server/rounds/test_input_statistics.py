"""Mean and deviation of inputs, measured over devices before round 1 and used by every task."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_server.api import replay
from edge_server.journal.records import AnyRecord, Measured, RoundOpened
from edge_server.journal.runs import StoredRun
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.release.run_model import read_model
from shared.data.moments import sum_moments
from shared.data.sources.read import read_share
from shared.data.spec import Data
from shared.protocol.messages import INPUT_SUMS, Update
from tests.edge_server.harness import Puppet, Site, moved, site, virtual, write_examples, write_plan

pytestmark = pytest.mark.virtual_time

DATA = 'source = "npz"\npath = "examples.npz"\nnormalise = "federated"'
MODEL = 'name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }'
PLAN = {"rounds": 1, "cohort": "min_devices = 2\nwait_s = 5.0", "data": DATA, "evaluation": "every = 1", "model": MODEL}
HALVES = np.float32([[1, 2], [3, 10]]).repeat(4, axis=1), np.float32([[5, 12]]).repeat(4, axis=1)
MEAN, STD = (
    (3.0,) * 4 + (8.0,) * 4,
    tuple(np.std([1, 3, 5]) for _ in range(4)) + tuple(np.std([2, 10, 12]) for _ in range(4)),
)


async def add_sums(puppet: Puppet, sums: dict[str, list[float]]) -> None:
    task = await puppet.task()
    assert (task.round, task.train, task.measure_s, task.assignment.values) == (0, False, 0.0, {INPUT_SUMS: True})
    update = Update(run=task.run, round=0, device=task.device, params=None, start=task.params.digest, sums=sums)
    assert (await puppet.offer(update)).verdict == "accepted"


async def train(here: Site, *puppets: Puppet) -> None:
    for puppet in puppets:
        task = await puppet.task()
        assert task.round == 1
        assert task.assignment.mean == pytest.approx(MEAN)
        assert task.assignment.std == pytest.approx(STD)
        await puppet.answer(task, moved(here.plan, 0.5))


async def connect(here: Site) -> tuple[Puppet, Puppet]:
    return await here.device("one"), await here.device("two")


def test_sums_of_all_devices_become_the_mean_of_every_task_and_the_record(tmp_path):
    """Also of a server that starts again after it measured, and of the server's own examples."""
    write_examples(tmp_path)

    async def measure() -> None:
        async with site(tmp_path, **PLAN) as here:
            one, two = await connect(here)
            await add_sums(one, sum_moments(HALVES[0]))
            await add_sums(two, sum_moments(HALVES[1]))
            await one.task()

    async def go_on() -> None:
        async with site(tmp_path, **PLAN) as here:
            await train(here, *await connect(here))
            await here.ended()
            records = here.store.records()
            [measured] = [record for record in records if isinstance(record, Measured)]
            [opened] = [record for record in records if isinstance(record, RoundOpened)]
            assert measured.inputs.mean == opened.inputs.mean == pytest.approx(MEAN)
            assert measured.inputs.std == opened.inputs.std == pytest.approx(STD)

    virtual(measure())
    virtual(go_on())


def without_inputs(records: list[AnyRecord]) -> list[AnyRecord]:
    return [
        msgspec.structs.replace(record, inputs=None) if isinstance(record, RoundOpened) else record
        for record in records
    ]


def test_a_checkpoint_has_the_numbers_that_a_journal_lost(tmp_path):
    """The server resumes with them, without another measurement, and a release is made with them."""
    write_examples(tmp_path)
    plan = PLAN | {"rounds": 3}

    async def begin() -> None:
        async with site(tmp_path, **plan) as here:
            puppets = await connect(here)
            for puppet, inputs in zip(puppets, HALVES, strict=True):
                await add_sums(puppet, sum_moments(inputs))
            await train(here, *puppets)
            assert (await puppets[0].task()).round == 2
            folders.append(here.store.folder)

    async def go_on() -> None:
        async with site(tmp_path, **plan) as here:
            task = await (await connect(here))[0].task()
            assert task.round == 2
            assert task.assignment.mean == pytest.approx(MEAN)
            assert task.assignment.std == pytest.approx(STD)
            assert len([record for record in here.store.records() if isinstance(record, Measured)]) == 1

    folders: list[Path] = []
    virtual(begin())
    [folder] = folders
    with closing(sqlite3.connect(folder / JOURNAL)) as journal, journal:
        journal.execute("DELETE FROM records WHERE rowid > 1")
    virtual(go_on())
    prepared = read_model(StoredRun(folder, without_inputs(read_records(folder)))).preprocessing
    assert prepared.mean == pytest.approx(MEAN)
    assert prepared.std == pytest.approx(STD)


async def test_impossible_sums_do_not_count(tmp_path):
    write_examples(tmp_path)
    async with site(tmp_path, **PLAN) as here:
        one, two = await connect(here)
        await add_sums(one, sum_moments(np.concatenate(HALVES)))
        await add_sums(two, {"input_count": [1.0], "input_sum": [9.0] * 8, "input_squares": [1.0] * 8})
        await train(here, one, two)


def test_a_replay_equals_one_with_the_central_mean_and_deviation(tmp_path):
    """To float32: the devices' parts are measured, and the release has the numbers."""
    section = write_examples(tmp_path)
    parts = {"partition": 'kind = "even"', "rounds": 2, "evaluation": "every = 1", "model": MODEL}
    whole = read_share(Data(source="npz", path=str(tmp_path / "examples.npz")))
    mean, std = (tuple(getattr(whole.inputs.astype(np.float64), name)(axis=0).tolist()) for name in ("mean", "std"))
    runs = {}
    for name, keys in {
        "federated": 'normalise = "federated"',
        "central": f"mean = {list(mean)}\nstd = {list(std)}",
        "raw": "",
    }.items():
        path = write_plan(tmp_path, data=f"{section}\n{keys}", **parts)
        runs[name] = replay(path, devices=3, data_dir=tmp_path / name, data_root=tmp_path, progress=False)
    federated, central, raw = (runs[name].model().state_dict() for name in ("federated", "central", "raw"))
    for name, leaf in federated.items():
        np.testing.assert_allclose(leaf.numpy(), central[name].numpy(), rtol=1e-5, atol=1e-6)
    assert any(not np.allclose(leaf.numpy(), raw[name].numpy(), rtol=1e-2) for name, leaf in federated.items())
    accuracies = [[closed.accuracy for closed in runs[name].rounds] for name in ("federated", "central")]
    assert accuracies[0] == accuracies[1]
    prepared = read_model(StoredRun(runs["federated"].folder, runs["federated"].records)).preprocessing
    np.testing.assert_allclose(prepared.mean, mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(prepared.std, std, rtol=1e-6)
