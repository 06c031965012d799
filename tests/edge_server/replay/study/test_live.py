"""A study as processes: what is killed, and where, costs the cells that were at work and nothing else."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from edge_server.cli.study import study as run_study
from edge_server.journal.sqlite import JOURNAL
from edge_server.replay.run import replay_plan
from edge_server.replay.study.cell import run_cell
from edge_server.replay.study.pool import MEMORY, Tell, remove_leftovers, run_locally
from edge_server.replay.study.result import RESULT, CellEnded, CellStarted, Order, make_order, read_result
from edge_server.replay.study.run import PART, Runner, StudyRecord, complete_study
from edge_server.replay.study.summary import StudySummary
from shared.errors import ConfigError
from shared.runtime.folder_lock import hold_lock
from tests.edge_server.fleets import HEAD, grid_of
from tests.edge_server.processes import forked, until
from tests.naming import names_all, naming

NAME = "study"
NO_PROCESS = 1 << 30
GRID = f"{HEAD}[grid]\nseed = [1, 2, 3, 4]\n"
LONG = f"{HEAD}[grid]\nhyper.local_epochs = [5, 60, 61, 6]\n"
ENDLESS = f"{HEAD}[grid]\nhyper.local_epochs = [5, 100000]\n"


def study_of(folder: Path, text: str, run: Runner, tell: Tell = lambda news: None) -> StudySummary:
    """Run a study in its folder."""
    study, cells = grid_of(folder, text)
    return complete_study(study, {}, cells, folder / "runs" / NAME, run, tell)


def in_this_process(orders: Sequence[Order], place: Path, tell: Tell) -> None:
    """Run cells one after another."""
    for order in orders:
        run_cell(order)
        tell(CellEnded(order.cell, ""))


def command(folder: Path, jobs: int = 1) -> Any:
    """Run the command on the study that was written."""
    arguments = ("study", folder / "study.toml", "--jobs", jobs, "--data-root", folder, "--data-dir", folder / "runs")
    return forked(*arguments, log=folder / "log")


def done(folder: Path) -> dict[str, int]:
    """Return when the cells that have ended were written, by name."""
    return {path.parent.name: path.stat().st_mtime_ns for path in (folder / "runs" / NAME).glob(f"*/{RESULT}")}


def half_done(folder: Path, parent: int, count: int, jobs: int = 1) -> list[psutil.Process]:
    """Wait until so many cells have ended and one of so many processes is in the midst of another; return those."""
    part = folder / "runs" / NAME / PART

    def at_work() -> list[psutil.Process]:
        children = psutil.Process(parent).children(recursive=True)  # first: what an earlier call left is then gone
        is_at_work = len(children) == jobs and [*part.glob(f"*/{JOURNAL}")]
        return children if len(done(folder)) >= count and is_at_work else []

    return until(at_work, "a half cell")


def require_gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until processes have ended; what they had in memory is gone too."""
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert not alive
    assert not [left for one in processes for left in MEMORY.glob(f"fieldfleet-{one.pid}-*")]


@pytest.mark.slow
def test_a_cell_is_not_gone_on_with_once_nobody_waits_for_it(tmp_path):
    """It takes minutes: its process ends long before, by itself."""
    grid_of(tmp_path, ENDLESS)
    with command(tmp_path) as process:
        children = half_done(tmp_path, process.pid, 1)
        process.kill()
        require_gone(children)
    assert [*(tmp_path / "runs" / NAME / PART).glob(f"*/{JOURNAL}")]
    assert not [*(tmp_path / "runs" / NAME / PART).glob(f"*/{RESULT}")]


@pytest.mark.slow
def test_a_study_goes_on_after_whatever_ended_it(tmp_path, capsys):
    """Killed, interrupted, a process of it killed, a cell failed: the cells that had ended stay, the rest is run."""
    _, cells = grid_of(tmp_path, LONG)
    with command(tmp_path) as process:
        children = half_done(tmp_path, process.pid, 1)
        process.kill()
        require_gone(children)
    kept = done(tmp_path)

    interrupted(tmp_path, 2)
    assert kept.items() <= (kept := done(tmp_path)).items()
    assert 1 <= len(kept) < len(cells), "this machine is so quick that nothing was cut: give it more epochs"

    summary, causes = study_with_faults(tmp_path)
    [failed] = [row for row in summary.rows if row.state != "finished"]
    assert "SIGKILL" in failed.cause
    assert names_all(causes["broken"], 1, "name")
    assert names_all(causes["dataless"], "ConfigError", "/nowhere.npz")
    assert kept.items() <= (kept := done(tmp_path)).items()

    assert study_of(tmp_path, LONG, in_this_process).is_complete, "what failed is tried again"
    assert kept.items() <= done(tmp_path).items()
    assert done(tmp_path).keys() == {cell.name for cell in cells}
    assert run_study(options(tmp_path, jobs=1)) == 0
    assert capsys.readouterr().out.count("1/1") == len(cells)
    replay_plan(cells[0].plan, tmp_path / cells[0].name)
    journals = [folder / cells[0].name / "journal.jsonl" for folder in (tmp_path, tmp_path / "runs" / NAME)]
    assert journals[0].read_bytes() == journals[1].read_bytes()


def interrupted(folder: Path, jobs: int) -> None:
    """Run a study until a cell is half done, then let a Ctrl-C come."""
    with command(folder, jobs) as process:
        found = half_done(folder, process.pid, 1, jobs)
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
    require_gone(found)


def study_with_faults(folder: Path) -> tuple[StudySummary, dict[str, str]]:
    """Run a study in a process that is killed at its first cell, then in the next; and two cells that cannot be."""
    causes: dict[str, str] = {}
    victims: list[int] = []

    def kill_first(news: CellStarted | CellEnded) -> None:
        if isinstance(news, CellEnded):
            causes[news.cell] = news.cause
        elif not victims and news.process:
            victims.append(news.process)
            os.kill(news.process, signal.SIGKILL)

    def run(orders: Sequence[Order], place: Path, tell: Tell) -> None:
        plan = orders[0].plan
        missing = msgspec.structs.replace(plan, data=msgspec.structs.replace(plan.data, path="/nowhere.npz"))
        wrong = msgspec.structs.replace(plan, name=0)
        impossible = [
            Order(cell=name, plan=plan, devices=0, place=str(place))
            for name, plan in (("dataless", missing), ("broken", wrong))
        ]
        asyncio.run(run_locally([*orders, *impossible], 1, place, tell))

    return study_of(folder, LONG, run, kill_first), causes


def options(folder: Path, jobs: int = 1, form: str = "table", only: Sequence[str] = ()) -> argparse.Namespace:
    """Return the command's options."""
    where = {"study": folder / "study.toml", "data_root": folder, "data_dir": folder / "runs"}
    return argparse.Namespace(**where, ray="", format=form, jobs=jobs, only=list(only))


def test_only_a_whole_run_of_the_very_plan_counts(tmp_path):
    """Not one of another plan or fleet, not one whose journal was touched, not half of one."""
    [cell, *_] = grid_of(tmp_path, GRID)[1]
    folder = run_cell(make_order(cell, tmp_path))
    assert read_result(cell, folder)
    longer = msgspec.structs.replace(cell.plan, rounds=3)
    assert not read_result(msgspec.structs.replace(cell, plan=longer), folder)
    assert not read_result(msgspec.structs.replace(cell, devices=2), folder)
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b"\n")
    assert not read_result(cell, folder)
    (folder / RESULT).write_bytes(b"{")
    assert not read_result(cell, folder)
    (folder / RESULT).unlink()
    assert not read_result(cell, folder)


def test_a_changed_plan_runs_its_cells_again(tmp_path, capsys):
    """The grid and so the names are the same; what lies there is replaced, and the record says what was run."""
    study_of(tmp_path, GRID, in_this_process)
    was = done(tmp_path)
    study, cells = grid_of(tmp_path, GRID, rounds=1)
    summary = complete_study(study, {"rounds": 1}, cells, tmp_path / "runs" / NAME, in_this_process, lambda news: None)
    assert all(done(tmp_path)[name] > at for name, at in was.items())
    assert [row.whole.rounds.value for row in summary.rows] == [1.0] * 4
    record = msgspec.json.decode((tmp_path / "runs" / NAME / "study.json").read_bytes(), type=StudyRecord)
    assert (record.plan, record.study) == ({"rounds": 1}, study)
    assert record.versions.keys() >= {"python", "torch"}
    written = {path.name for path in (tmp_path / "runs" / NAME).iterdir() if path.is_file()}
    assert written >= {"summary.json", "summary.csv", "cells.csv", "report.html"}
    assert run_study(options(tmp_path, form="json")) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=StudySummary) == summary


def test_what_a_killed_process_had_in_memory_is_removed():
    """It could not do so itself; what others have there stays."""
    mine, other = (Path(tempfile.mkdtemp(prefix=f"fieldfleet-{name}-", dir=MEMORY)) for name in (NO_PROCESS, "test"))
    try:
        remove_leftovers(NO_PROCESS)
        assert (mine.exists(), other.exists()) == (False, True)
    finally:
        other.rmdir()


def test_a_study_is_run_once_at_a_time(tmp_path):
    """Two at one folder would remove each other's half cells."""
    folder = tmp_path / "runs" / NAME
    folder.mkdir(parents=True)
    with hold_lock(folder), pytest.raises(ConfigError, match=naming(folder)):
        study_of(tmp_path, GRID, in_this_process)


def test_some_cells_alone_are_run(tmp_path):
    """The others wait, and the exit code is of those that were asked for; the next command goes on from there."""
    _, cells = grid_of(tmp_path, GRID)
    assert run_study(options(tmp_path, only=["*seed-2*", "*seed-3*"])) == 0
    chosen = {cell.name for cell in cells if cell.seeds["seed"] in (2, 3)}
    assert done(tmp_path).keys() == chosen
    summary = msgspec.json.decode((tmp_path / "runs" / NAME / "summary.json").read_bytes(), type=StudySummary)
    assert [row.state for row in summary.rows] == ["waiting", "finished", "finished", "waiting"]
    with pytest.raises(ConfigError, match=naming("--only", "other")):
        run_study(options(tmp_path, only=["other"]))


def test_jobs_are_counted_from_one(tmp_path):
    """Before anything is made."""
    grid_of(tmp_path, GRID)
    with pytest.raises(ConfigError, match=naming("--jobs", -1)):
        run_study(options(tmp_path, jobs=-1))
    assert not (tmp_path / "runs").exists()
