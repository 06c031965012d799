"""Runs of a folder as the commands list, name and remove them."""

from __future__ import annotations

import json
import os
import pty
import subprocess  # noqa: TID251 - runs the command on a terminal
import sys
from io import StringIO
from pathlib import Path

import pytest

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, RunClosed, RunOpened
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.runtime.folder_lock import hold_lock
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import called
from tests.machine import on_terminal
from tests.naming import names_all


@pytest.fixture
def plan(tmp_path) -> Plan:
    return load(write_plan(tmp_path, rounds=2), tmp_path)


@pytest.fixture
def folder(tmp_path, plan) -> Path:
    """Return a folder with a finished run, an unfinished one and one that no device ever took part in."""
    leave(tmp_path / "runs", plan, "first-20260101T000000Z-aaaa", "20260101T000000Z", accuracy=0.5)
    leave(tmp_path / "runs", plan, "second-20260102T000000Z-bbbb", "20260102T000000Z", ends=False)
    leave(tmp_path / "runs", plan, "second-20260103T000000Z-cccc", "20260103T000000Z", outcome="missed")
    return tmp_path / "runs"


def leave(
    runs: Path, plan: Plan, name: str, started: str, *, outcome: str = "aggregated", ends: bool = True, **figures: float
) -> None:
    """Leave a run of two rounds behind."""
    closed = [
        RoundClosed(round=number, outcome=outcome, arrived=(), seconds=1.0, **figures)  # type: ignore[arg-type]
        for number in (1, 2)
    ]
    end = [RunClosed(outcome="finished")] if ends else []
    keep(runs / name, RunOpened(run=name, plan=plan, started=started), *closed, *end)


def keep(folder: Path, *records: AnyRecord) -> None:
    store = SqliteStore(folder, durable=False)
    store.extend(records)
    store.close()


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    assert called("runs", "--data-dir", folder, "--format", "json") == 0
    return {one["run"][-4:]: one for one in json.loads(capsys.readouterr().out)}


def test_the_newest_stands_first_and_one_whose_rounds_were_all_missed_is_not_finished(folder, capsys):
    there = listed(folder, capsys)
    outcomes = {name: one["outcome"] for name, one in there.items()}
    assert list(outcomes.items()) == [("cccc", "missed"), ("bbbb", "dead"), ("aaaa", "finished")]


def test_an_accuracy_that_devices_alone_measured_is_listed(folder, plan, capsys):
    """`show` prints it below its table, where the gateway has no test data."""
    name = "third-20260104T000000Z-dddd"
    leave(folder, plan, name, "20260104T000000Z", ends=False)
    keep(folder / name, Evaluated(accuracy=0.75, by_device={"a": {"eval_accuracy": 0.75}}, round=2))
    assert next(iter(listed(folder, capsys).values()))["accuracy"] == 0.75


def test_a_run_is_one_line_at_80_columns(folder):
    lines = on_terminal(lambda: called("runs", "--data-dir", folder) and None, 80)
    rows = [line for line in lines if line[:6] in ("first-", "second")]
    assert [line.split()[0][-4:] for line in rows] == ["cccc", "bbbb", "aaaa"]
    assert all("2/2" in line for line in rows)


@pytest.mark.parametrize(("name", "stands_for"), [("last", "cccc"), ("fir", "aaaa"), ("second-20260102", "bbbb")])
def test_a_run_is_named_by_what_its_name_begins_with(folder, capsys, name, stands_for):
    assert called("show", name, "--data-dir", folder) == (0 if stands_for else 2)
    assert capsys.readouterr().out.splitlines()[-1].endswith(stands_for)


@pytest.mark.parametrize("name", ["last", "fir", "second-20260102"])
def test_every_command_takes_a_run_by_the_same_names(folder, tmp_path, capsys, monkeypatch, name):
    """A replay that is told to play a plan that is not there has found its run before."""
    monkeypatch.chdir(tmp_path)
    begun = [one.name for one in folder.iterdir()]
    assert called("trace", "export", name, "--data-dir", folder) == 0
    (written,) = tmp_path.glob("*.trace")
    assert written.stem in begun
    assert called("replay", name, "absent.toml", "--data-dir", folder) == 2
    assert names_all(capsys.readouterr().err, "absent.toml")
    assert called("report", name, "--data-dir", folder, "--format", "csv") == 0
    assert called("explain", name, 1, "--data-dir", folder) == 2
    assert names_all(capsys.readouterr().err, 1, "edge-server show")


def test_a_beginning_of_several_names_is_refused_with_the_names(folder, capsys):
    assert called("show", "second", "--data-dir", folder) == 2
    said = capsys.readouterr().err
    assert names_all(said, "second", "bbbb", "cccc")
    assert "aaaa" not in said


FIRST, SECOND, THIRD = "first-20260101T000000Z-aaaa", "second-20260102T000000Z-bbbb", "second-20260103T000000Z-cccc"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rm_removes_whole_names_and_leaves_a_run_in_use(folder, capsys):
    with hold_lock(folder / SECOND):
        assert called("runs", "rm", FIRST, SECOND, "--data-dir", folder) == 1
    assert names(folder) == [SECOND, THIRD]
    error = capsys.readouterr().err
    assert SECOND in error
    assert FIRST not in error


@pytest.mark.parametrize("name", ["first", "last", FIRST[:-1]])
def test_rm_without_a_terminal_refuses_an_abbreviated_name(folder, capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "stdin", StringIO("y\n"))
    assert called("runs", "rm", FIRST, name, "--data-dir", folder) == 2
    assert names(folder) == [FIRST, SECOND, THIRD]
    assert "--yes" in capsys.readouterr().err


def test_rm_takes_an_abbreviated_name_with_yes(folder):
    assert called("runs", "rm", "first", "last", "--yes", "--data-dir", folder) == 0
    assert names(folder) == [SECOND]


@pytest.mark.parametrize("extra", [[], ["--yes"]])
def test_rm_dry_run_removes_nothing(folder, capsys, extra):
    assert called("runs", "rm", "first", THIRD, "--dry-run", *extra, "--data-dir", folder) == 0
    assert names(folder) == [FIRST, SECOND, THIRD]
    out = capsys.readouterr().out
    assert FIRST in out
    assert THIRD in out


@pytest.mark.parametrize(
    ("answer", "left"), [("y", [SECOND, THIRD]), ("", [FIRST, SECOND, THIRD]), ("n", [FIRST, SECOND, THIRD])]
)
def test_rm_on_a_terminal_asks_before_it_removes_an_abbreviated_name(folder, answer, left):
    """A child process with a real pseudo-terminal as standard input."""
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "edge_server", "runs", "rm", "first", "--data-dir", str(folder)]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    os.close(theirs)
    os.close(ours)
    assert FIRST in done.stderr
    assert done.returncode == (0 if answer == "y" else 1)
    assert names(folder) == left


def test_prune_keeps_the_newest_and_what_can_be_gone_on_with(folder, capsys):
    keep(folder / "refused-20260105T000000Z-eeee")
    assert called("runs", "prune", "--keep", 1, "--data-dir", folder, "--dry-run") == 0
    assert len(list(folder.iterdir())) == 4
    assert called("runs", "prune", "--keep", 1, "--data-dir", folder) == 0
    assert [one.name[-4:] for one in sorted(folder.iterdir())] == ["bbbb", "cccc"]
    assert "--unfinished" in capsys.readouterr().out
    assert called("runs", "prune", "--keep", 0, "--unfinished", "--data-dir", folder) == 0
    assert list(folder.iterdir()) == []


def test_an_empty_journal_beside_checkpoints_is_not_taken_for_a_run_that_never_began(folder):
    keep(folder / "lost")
    checkpoint = folder / "lost" / "checkpoints" / "000060.safetensors"
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.write_bytes(b"a model")
    assert called("runs", "prune", "--keep", 9, "--data-dir", folder) == 0
    assert checkpoint.exists()


def test_the_folder_may_be_named_by_a_servers_file(folder, tmp_path, capsys):
    file = tmp_path / "server.toml"
    file.write_text(f'plan = "plan.toml"\nsite = "lab"\ndata_dir = "{folder}"\n')
    assert called("show", "last", "--config", file) == 0
    assert called("runs", "prune", "--keep", 9, "--config", file) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(str(folder / THIRD))
