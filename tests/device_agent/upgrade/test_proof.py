"""What agent and updater tell each other: the record, the proof, the forms of state files."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import json
from pathlib import Path

import pytest

from device_agent.upgrade import record as records
from device_agent.upgrade import state_formats
from device_agent.upgrade.proof import TrialReporter, mark_busy
from device_agent.upgrade.record import (
    BUSY,
    FOLDER,
    PROOF,
    RECORD,
    UpgradeRecord,
    find_versions_folder,
    read_upgrade,
    running_version,
    write_upgrade,
)
from device_agent.upgrade.state_formats import (
    FORMATS,
    KINDS,
    check_formats,
    find_losses,
    raise_formats,
)
from shared.errors import ConfigError, CorruptFile
from shared.runtime.state_formats import FILE, MOST_BYTES, read_formats
from tests.naming import naming

pytestmark = pytest.mark.virtual_time

TRIAL = UpgradeRecord(state="trial", from_="1", to="2", nonce="abc", boots=1)
NEWER = {**FORMATS, "outbox": 2}


def test_a_record_comes_back_as_it_was_and_says_from_and_to(tmp_path):
    assert read_upgrade(tmp_path) == UpgradeRecord()
    write_upgrade(tmp_path, TRIAL)
    assert read_upgrade(tmp_path) == TRIAL
    assert json.loads((tmp_path / RECORD).read_bytes())["from"] == "1"
    assert (tmp_path / RECORD).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("data", [b"", b"{}", b'{"format":1,"state":"flying"}', b"[" * 99_999, b" " * (MOST_BYTES + 1)])
def test_a_damaged_record_is_refused(tmp_path, data):
    (tmp_path / RECORD).write_bytes(data)
    with pytest.raises(CorruptFile):
        read_upgrade(tmp_path)


def test_a_record_of_a_newer_form_is_left_alone(tmp_path):
    (tmp_path / RECORD).write_bytes(b'{"format":2,"state":"flying"}')
    with pytest.raises(ConfigError, match=naming(tmp_path / RECORD, 2)):
        read_upgrade(tmp_path)


def test_a_process_knows_the_folder_of_versions_that_it_is_one_of(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    (tmp_path / "current").symlink_to("1")
    monkeypatch.delenv(records.HOME_VARIABLE, raising=False)
    monkeypatch.setattr(records.sys, "prefix", str(tmp_path / "current"))
    assert find_versions_folder() == tmp_path
    assert running_version(tmp_path) == "1"
    monkeypatch.setattr(records.sys, "prefix", str(tmp_path / "elsewhere" / "venv"))
    assert find_versions_folder() is None
    monkeypatch.setenv(records.HOME_VARIABLE, str(tmp_path))
    assert find_versions_folder() == tmp_path
    assert running_version(tmp_path) == "1"


async def test_a_version_on_trial_proves_itself_once_it_was_heard_and_raises_forms_when_the_trial_is_over(tmp_path):
    home, state = tmp_path / "home", tmp_path / "state"
    home.mkdir()
    proof = state / FOLDER / PROOF
    write_upgrade(home, TRIAL)
    proving = TrialReporter(home, state, "2")
    task = asyncio.create_task(proving.run())
    await asyncio.sleep(100)
    assert not proof.exists()
    proving.report_accepted.set()
    await asyncio.sleep(100)
    assert json.loads(proof.read_bytes()) == {"version": "2", "nonce": "abc"}
    assert not (state / FILE).exists()
    write_upgrade(home, UpgradeRecord(state="committed", from_="1", to="2"))
    await task
    assert read_formats(state).version == "2"


@pytest.mark.parametrize("other", [None, "home"])
def test_a_version_that_is_not_on_trial_proves_nothing(tmp_path, virtually, other):
    home = tmp_path / other if other else None
    if home:
        home.mkdir()
        write_upgrade(home, TRIAL)
    virtually(TrialReporter(home, tmp_path, "1").run())
    assert not (tmp_path / FOLDER).exists()
    assert read_formats(tmp_path).formats == dict(FORMATS)


def test_that_a_task_runs_is_told_by_a_lock_that_falls_with_it(tmp_path):
    with mark_busy(tmp_path), (tmp_path / FOLDER / BUSY).open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / FOLDER / BUSY).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with mark_busy(blocked):  # a disk that takes nothing keeps nobody from work
        pass


def test_a_version_does_not_begin_where_a_newer_one_wrote_what_it_cannot_read(tmp_path):
    check_formats(tmp_path)
    assert raise_formats(tmp_path, "2", NEWER)
    assert not raise_formats(tmp_path, "1")
    check_formats(tmp_path, NEWER)
    with pytest.raises(ConfigError, match=naming("version 2", KINDS["outbox"].holds)):
        check_formats(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match=naming(tmp_path / FILE)):
        check_formats(tmp_path)


def test_kinds_that_a_version_does_not_know_are_no_loss():
    assert find_losses({"outbox": 2, "moon": 7}, {"outbox": 1}) == {"outbox": KINDS["outbox"].holds}
    assert list(find_losses({"moon": 7}, {"moon": 6})) == ["moon"]


def test_every_kind_has_a_form_and_a_gateway_can_read_them_off_the_source():
    assert FORMATS.keys() == KINDS.keys()
    [line] = [one for one in Path(state_formats.__file__).read_text().splitlines() if one.startswith("FORMATS")]
    assert ast.literal_eval(line.partition(" = ")[2]) == FORMATS
