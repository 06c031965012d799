"""Run folder of a newer version: every command refuses it and changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_server.__main__ import build_parser
from edge_server.cli.gateway.examine import examine_machine
from edge_server.journal import checkpoints, plan_queue, report_history
from edge_server.journal.rollouts import file as rollouts
from edge_server.journal.runs import all_runs, create_runs_folder
from edge_server.journal.sqlite import JOURNAL, SqliteJournal
from edge_server.plan.data_folder import FORMATS, KINDS, check_data_folder, claim_data_folder
from edge_server.plan.server_config import ServerConfig
from edge_server.release import store
from edge_server.release.rollout.orders import begin_rollout
from edge_server.release.top_server.service import serve_site
from edge_server.replay.study import result
from edge_server.rounds.check_plan import load
from edge_server.sites import model_files
from edge_server.trial.live import serve
from shared.errors import ConfigError
from shared.runtime.state_formats import FILE, encode_formats, read_formats
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import captured
from tests.edge_server.release.boards import make_release
from tests.edge_server.report.journals import small
from tests.naming import names_all, naming

NEWER = encode_formats({**FORMATS, "journals": FORMATS["journals"] + 1}, "9.1.0")
NAMED = "9.1.0", KINDS["journals"].holds
TERMS = rollouts.RolloutPlan(deployment="", release="", sha256="")
BY_FOLDER = (
    "runs",
    "runs rm run",
    "runs prune --keep 0 --unfinished",
    "sites run",
    "show run",
    "explain run 1",
    "replay PLAN",
    "replay run",
    "trial run PLAN",
    "trial run PLAN --local 2",
    "flower-app APP",
    "chaos PLAN --kills 1",
    "study PLAN",
    "report run --out OUT",
    "export run --format onnx --out OUT",
    "release create run",
    "release list",
    "release show net/1",
    "release export net/1 OUT",
    "release delete --force net/1",
    "rollout start net",
    "rollout status",
    "rollout pause",
    "rollout resume",
    "rollout abort",
    "rollout back",
    "trace export run --out OUT",
    "trace import OUT",
    "devices",
)
BY_CONFIG = ("run", "run --again", "serve-tops", "trial run PLAN", "devices", "show run", "rollout start net")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with a run, a release and a rollout under way, which a newer version wrote in last."""
    runs = tmp_path / "runs"
    begin_rollout(runs, make_release(runs, {"layer0": b"\1" * 100}), TERMS)
    write_run(runs)
    (runs / FILE).write_bytes(NEWER)
    return runs


def write_run(runs: Path) -> None:
    journal = SqliteJournal(runs / "run", durable=False)
    journal.extend(small())
    journal.close()


def content(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Return all that lies in a folder, with the times of its last changes."""
    found = sorted((folder, *folder.rglob("*")))
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


def words_of(command: str, folder: Path) -> list[str]:
    places = {"PLAN": str(folder.parent / "plan.toml"), "OUT": str(folder.parent / "out")}
    return [places.get(word, word) for word in command.split()]


def commands_with_folders(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the commands that take a folder of runs, with their verbs."""
    for action in parser._actions:
        if "--data-dir" in action.option_strings:
            yield " ".join(words)
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                yield from commands_with_folders(verb, (*words, name))


def test_every_command_refuses_it_and_changes_nothing(folder, tmp_path):
    write_plan(tmp_path)
    before = content(folder)
    for command in BY_FOLDER:
        found = captured(*words_of(command, folder), "--data-dir", folder)
        assert (command, found.code, found.out) == (command, 2, "")
        assert names_all(found.err, *NAMED), (command, found.err)
    config = tmp_path / "server.toml"
    config.write_text(f'plan = "plan.toml"\nsite = "lab"\ndata_dir = "{folder}"\n')
    for command in BY_CONFIG:
        found = captured(*words_of(command, folder), "--config", config)
        assert (command, found.code) == (command, 2)
        assert names_all(found.err, *NAMED), (command, found.err)
    assert content(folder) == before
    assert not (tmp_path / "out").exists()


def test_no_command_that_takes_a_folder_is_left_out_above():
    known = set(commands_with_folders(build_parser()))
    assert {one for one in known if not any(f"{tried} ".startswith(f"{one} ") for tried in BY_FOLDER)} == set()
    assert len(known) > 20


def test_a_run_that_is_named_by_its_path_is_judged_by_the_folder_that_it_lies_in(folder, tmp_path):
    before = content(folder)
    for command in ("show", "replay", "report"):
        found = captured(command, folder / "run", "--data-dir", tmp_path / "other")
        assert (found.code, names_all(found.err, *NAMED)) == (2, True), found
    assert content(folder) == before
    assert all_runs(folder) == []


def test_what_writes_there_without_the_command_line_is_refused_too(folder, tmp_path):
    config = ServerConfig(plan="plan.toml", data_dir=str(folder))
    shutil.rmtree(folder / rollouts.FOLDER)  # else the rollout under way is the fault that is told first
    before = content(folder)
    with pytest.raises(ConfigError, match=naming("9.1.0")):
        create_runs_folder(folder)
    with pytest.raises(ConfigError, match=naming("9.1.0")):
        make_release(folder, {"layer0": b"\2" * 100})
    with pytest.raises(ConfigError, match=naming("9.1.0")):
        asyncio.run(serve_site(config))
    with pytest.raises(ConfigError, match=naming("9.1.0")):
        asyncio.run(serve(config, load(write_plan(tmp_path), tmp_path), "run"))
    with pytest.raises(ConfigError, match=naming("9.1.0")):
        begin_rollout(folder, store.find_release(folder, "net"), TERMS)
    assert content(folder) == before


def test_doctor_says_so(folder):
    found = list(examine_machine(ServerConfig(plan="none", data_dir=str(folder))))
    [told] = [one for one in found if one.about == "data_dir"]
    assert (told.state, names_all(told.told, *NAMED)) == ("bad", True)
    (folder / FILE).unlink()
    found = list(examine_machine(ServerConfig(plan="none", data_dir=str(folder))))
    assert "data_dir" not in [one.about for one in found]


def test_forms_are_written_with_what_first_writes_there_and_older_folders_are_read(tmp_path):
    write_run(tmp_path / "old")  # as a version did that knew of no forms
    assert captured("show", "run", "--data-dir", tmp_path / "old").code == 0
    assert not (tmp_path / "old" / FILE).exists()
    for folder in (create_runs_folder(tmp_path / "old"), create_runs_folder(tmp_path / "new")):
        assert read_formats(folder).formats == FORMATS
    make_release(tmp_path / "third", {"layer0": b"\1"})
    assert read_formats(tmp_path / "third").formats == FORMATS
    assert captured("show", "run", "--data-dir", tmp_path / "old").code == 0


def test_of_several_versions_the_highest_forms_stay_and_unknown_kinds_are_left_alone(tmp_path):
    written = encode_formats({"journals": 1, "moons": 7}, "9.1.0")
    (tmp_path / FILE).write_bytes(written)
    claim_data_folder(tmp_path)
    assert read_formats(tmp_path).formats == {**FORMATS, "moons": 7}
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match=naming(tmp_path / FILE)):
        check_data_folder(tmp_path)


def test_the_table_names_what_lies_there():
    assert FORMATS.keys() == KINDS.keys()
    places = JOURNAL, checkpoints.FOLDER, model_files.FOLDER, report_history.FILE, store.FOLDER, rollouts.FOLDER
    assert {name for kind in KINDS.values() for name in kind.files} == {
        *places,
        result.RESULT,
        plan_queue.QUEUES,
        "session",
        "updates",
    }
