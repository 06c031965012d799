"""Server states on disk: the last two, whole or not at all."""

from __future__ import annotations

import threading
from contextlib import closing, suppress

import pytest
import torch

from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import Origin, SqliteStore
from edge_server.journal.outcome import summarise_outcome
from edge_server.journal.records import AnyRecord, Rewound, RoundClosed, RunOpened
from edge_server.journal.runs import best_path, checkpoint_path
from edge_server.journal.sqlite import read_records
from edge_server.rounds.check_plan import load
from shared.tensors import file
from shared.tensors.tree import State
from tests.edge_server.harness import write_plan


def state(value: float) -> State:
    """Return a state that can be told from others."""
    return State({"w": torch.full((100,), value)}, {"value": value})


def test_the_last_two_are_kept_and_a_good_one_before_them(tmp_path):
    """One to go on from, one to fall back on, one that trains, one to be overwritten; the disk does not fill up."""
    for number in (1, 2, 3, 5):
        checkpoints.save(tmp_path, number, state(number), origin=Origin("run", number, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".spare",
        "good.safetensors",
        "round-000003.safetensors",
        "round-000005.safetensors",
    ]
    assert checkpoints.good_number(tmp_path) == 2
    for number in (2, 3, 5):
        assert checkpoints.load(tmp_path, number).facts == {"value": number}
    with pytest.raises(FileNotFoundError):
        checkpoints.load(tmp_path, 1)


def test_the_good_one_stays_when_the_run_goes_back_to_it(tmp_path):
    """What came after it is void and goes; nothing of before takes its place until newer ones have left."""
    for number in (1, 2, 3, 4, 3, 4):
        checkpoints.save(tmp_path, number, state(number), origin=Origin("run", number, 0))
    assert checkpoints.good_number(tmp_path) == 2
    checkpoints.save(tmp_path, 5, state(5), origin=Origin("run", 5, 0))
    assert checkpoints.good_number(tmp_path) == 3


def test_an_absent_state_is_told_from_a_damaged_one(tmp_path):
    """The remedies differ: go back, or set aside and go back."""
    with pytest.raises(FileNotFoundError):
        checkpoints.load(tmp_path, 1)


def test_a_write_that_fails_leaves_the_older_states(tmp_path):
    """The folder of the next state is not writable as a file: an error, and what was there is there."""
    checkpoints.save(tmp_path, 1, state(1.0))
    (tmp_path / "round-000002.safetensors.part").mkdir()
    with pytest.raises(OSError, match="round-000002"):
        checkpoints.save(tmp_path, 2, state(2.0))
    assert torch.equal(checkpoints.load(tmp_path, 1).tree["w"], state(1.0).tree["w"])


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_most_accurate_model_stays_beside_the_last(tmp_path, keep):
    """A process that goes on with the run knows of it too; one that was gone back from is none."""
    plan = load(write_plan(tmp_path, rounds=9, evaluation=f'every = 1\nkeep = "{keep}"'), tmp_path)
    folder = tmp_path / "run"

    def play(rounds: dict[int, float], *first: AnyRecord) -> None:
        with closing(SqliteStore(folder, durable=False)) as store:
            store.extend(first)
            for number, accuracy in rounds.items():
                store.save(number, state(float(number)))
                closed = RoundClosed(round=number, outcome="aggregated", arrived=(), seconds=1.0, accuracy=accuracy)
                store.append(closed)

    def kept() -> list[str]:
        return [path.stem for path in (folder / "checkpoints").glob("best-*")]

    play({1: 0.5, 2: 0.8, 3: 0.7, 4: 0.6}, RunOpened(run="run", plan=plan))
    assert kept() == (["best-000002"] if keep == "best" else [])
    play({5: 0.6})
    if keep == "best":
        assert torch.equal(file.load(best_path(folder / "checkpoints", 2)).tree["w"], state(2.0).tree["w"])
        last, best = (getattr(summarise_outcome(read_records(folder), folder), name) for name in ("last", "best"))
        assert (last.round, last.accuracy, best.round, best.accuracy) == (5, 0.6, 2, 0.8)
        assert best.model == str(best_path(folder / "checkpoints", 2))
        play({6: 0.9, 7: 0.1, 8: 0.2})
        assert kept() == ["best-000006"]
        play({4: 0.3, 5: 0.4}, Rewound(round=4, cause="lost"))
        assert kept() == []


def test_a_reader_of_a_live_run_never_sees_two_states_mixed(tmp_path):
    """Its server goes on meanwhile: what has the name is read, whole, and a file that is gone is no damaged one."""
    ended, seen = threading.Event(), set[float]()

    def write() -> None:
        for number in range(1, 400):
            tree = {"w": torch.full((30_000 + number,), float(number))}
            checkpoints.save(tmp_path, number, State(tree), durable=False, origin=Origin("run", number, 0))
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        for path in (tmp_path / checkpoints.GOOD, checkpoint_path(tmp_path, int(max(seen, default=0)) + 1)):
            with suppress(FileNotFoundError):
                leaf = file.load(path).tree["w"]
                seen.add(leaf[0].item())
                assert leaf.unique().tolist() == [leaf[0]]
                assert len(leaf) == 30_000 + int(leaf[0])
    writer.join()
    assert len(seen) > 1
