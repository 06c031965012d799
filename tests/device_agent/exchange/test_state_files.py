"""A device's states of before and after a round, whatever cuts the change between them short."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.exchange import state_files
from device_agent.exchange.outbox import STATE
from device_agent.trainer.task_files import read_state


@pytest.fixture
def promote(tmp_path: Path):
    """Promote a state as the outbox does; or be killed in it, right after the old state has got its new name."""
    folder = tmp_path / "state"
    folder.mkdir()

    def run(number: int, data: bytes, killed: str = "") -> None:
        entry = tmp_path / f"trial@{number:06d}"
        entry.mkdir(exist_ok=True)
        (entry / STATE).write_bytes(data)
        if killed:
            (folder / "trial").replace(folder / killed)
        else:
            state_files.promote(entry / STATE, folder)

    return run


def before(folder: Path, number: int) -> bytes:
    path = state_files.state_before(folder / "state", "trial", number)
    return path.read_bytes() if path.exists() else b"nothing"


def test_the_state_of_before_the_last_round_stays_and_none_older(promote, tmp_path) -> None:
    assert before(tmp_path, 1) == b"nothing"
    promote(1, b"one")
    promote(3, b"three")
    assert before(tmp_path, 3) == b"one"
    assert before(tmp_path, 4) == b"three"
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["trial", "trial@000003"]


def test_a_first_round_is_repeated_with_no_state(promote, tmp_path) -> None:
    """An empty file says so, and is read as no state rather than as a damaged one."""
    promote(1, b"one")
    kept = state_files.state_before(tmp_path / "state", "trial", 1)
    state, memory = read_state(kept)
    assert (state.tree, state.facts, memory) == ({}, {}, None)


def test_a_promotion_cut_short_between_its_two_steps_is_finished_later(promote, tmp_path) -> None:
    """Killed when the old state had its new name and the new one was not in its place: nothing of either is lost."""
    promote(1, b"one")
    promote(2, b"two", killed="trial@000002")
    assert before(tmp_path, 2) == b"one"
    promote(2, b"two")
    assert before(tmp_path, 2) == b"one"
    assert before(tmp_path, 3) == b"two"


def test_a_repeated_round_changes_the_newest_state_alone(promote, tmp_path) -> None:
    promote(1, b"one")
    promote(2, b"two")
    promote(2, b"two again")
    assert before(tmp_path, 2) == b"one"
    assert before(tmp_path, 3) == b"two again"


def test_what_is_kept_of_ended_runs_goes_but_the_newest_state(tmp_path) -> None:
    """Of the run that is going on everything stays; a name with a path in it is no run of ours."""
    folder = tmp_path / "state"
    folder.mkdir()
    kept = ["older", "older@000003", "newer", "newer@000002", "now", "now@000001"]
    for name in kept:
        (folder / name).write_bytes(b"a model")
    (tmp_path / "secret").write_bytes(b"not ours")
    state_files.forget_ended(folder, ["never-here", "newer", "../secret", "older"])
    assert sorted(path.name for path in folder.iterdir()) == ["newer", "now", "now@000001"]
    assert (tmp_path / "secret").exists()


def test_a_line_is_noted_once_a_device_and_no_run_is_touched_by_it(promote, tmp_path) -> None:
    states = tmp_path / "state"
    assert [state_files.remember_notice(states, what) for what in ("one", "two", "one", "on")] == [
        True,
        True,
        False,
        True,
    ]
    promote(1, b"one")
    state_files.forget_ended(states, ["trial"])
    assert not state_files.remember_notice(states, "two")
    assert state_files.remember_notice(tmp_path / "away", "one"), "a folder that is not there remembers nothing"
