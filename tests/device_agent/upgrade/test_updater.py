"""Upgrades of a board in a folder, with real packages, signatures and processes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from device_agent.upgrade.agent_folder import AgentFolder
from device_agent.upgrade.inputs import find_start_error
from device_agent.upgrade.proof import mark_busy
from device_agent.upgrade.record import FOLDER, RECORD, WANTED, read_upgrade, write_upgrade
from device_agent.upgrade.state_formats import FORMATS, raise_formats
from device_agent.upgrade.versions import MARK
from shared.errors import ConfigError, CorruptFile
from shared.protocol.packages import decode_manifest, decode_signed_manifest, encode_signed_manifest
from shared.runtime.state_formats import FILE
from tests.device_agent.upgrade.packages import authorities, manifest_of, package, tree_of
from tests.naming import names_all, naming

GUARD_S = 300.0


def go(work):
    return asyncio.run(asyncio.wait_for(work, GUARD_S))


def take(board, **more):
    updater = board.updater()
    updater.resume()
    return go(updater.install(board.request(updater, **more)))


async def staged(updater):
    while updater.record.state != "staged":  # noqa: ASYNC110 - there is nobody who would tell
        await asyncio.sleep(0.01)


def test_a_good_version_is_laid_runs_proves_itself_and_is_kept(board):
    board.fetch("2")
    board.want("2")
    record = take(board)
    assert (record.state, record.from_, record.to, record.previous, record.reason) == ("committed", "1", "2", "1", "")
    assert (board.current(), board.service.running()) == ("2", "2")
    assert (board.home / "updater").readlink().name == "2"
    assert read_upgrade(board.home) == record
    assert (board.home / "2/agent.sh").stat().st_mode & 0o7777 == 0o755
    assert (board.home / "2/lib/data").stat().st_mode & 0o7777 == 0o644
    assert list((board.home / "2/lib").rglob("*.pyc"))
    assert take(board) == record  # said again, nothing is done again


def test_the_last_two_versions_are_kept_and_what_dpkg_laid(board):
    for version in ("2", "3", "4"):
        board.fetch(version)
        board.want(version)
        assert take(board).state == "committed"
    assert board.versions() == {"1", "3", "4"}
    assert read_upgrade(board.home).serials == {"3": 3, "4": 4}


@pytest.mark.parametrize(("behaviour", "probation_s"), [("crashing", 60.0), ("mute", 0.2), ("giving-up", 60.0)])
def test_a_version_that_fails_is_gone_and_the_one_before_runs_again(board, behaviour, probation_s):
    board.fetch("2", behaviour)
    board.want("2", probation_s=probation_s)
    record = take(board)
    assert (record.state, names_all(record.reason, "version 2")) == ("rolled-back", True), record.reason
    assert (f"{probation_s:g} s" in record.reason) == (behaviour == "mute"), record.reason
    assert (board.current(), board.service.running()) == ("1", "1")
    assert board.versions() == {"1"}
    assert take(board) == record
    board.want("2", deployment="other")
    again = take(board)
    assert (again.state, record.reason in again.reason) == ("refused", True)
    board.fetch("2")
    board.want("2", attempt=2)
    assert take(board).state == "committed"


def test_a_version_that_does_not_start_is_not_even_tried(board):
    board.fetch("2")
    board.want("2")
    updater = board.updater(find_start_error)  # there is no module of ours in such a package
    updater.resume()
    record = go(updater.install(board.request(updater)))
    assert (record.state, names_all(record.reason, "version 2")) == ("refused", True)
    assert board.current() == board.service.running() == "1"
    assert board.versions() == {"1"}


def build_of(board, **more):
    signed = decode_signed_manifest((board.state / FOLDER / "2.json").read_bytes())
    return (msgspec.structs.replace(decode_manifest(signed.manifest).builds[0], **more),)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def spoil_signature(path):
    signed = decode_signed_manifest(path.read_bytes())
    path.write_bytes(
        encode_signed_manifest(msgspec.structs.replace(signed, manifest=signed.manifest.replace(b"roof", b"barn")))
    )


SPOILT = {
    "other package": lambda board, deb, signed: deb.write_bytes(package("2", tree_of("2", "mute"))),
    "longer package": lambda board, deb, signed: deb.write_bytes(deb.read_bytes() + bytes(1)),
    "no package": lambda board, deb, signed: deb.unlink(),
    "link": lambda board, deb, signed: make_link(deb),
    "pipe": lambda board, deb, signed: make_pipe(deb),
    "signature": lambda board, deb, signed: spoil_signature(signed),
    "other site": lambda board, deb, signed: signed.write_bytes(manifest_of("2", deb.read_bytes(), site="barn")),
    "other version": lambda board, deb, signed: signed.write_bytes(manifest_of("3", deb.read_bytes())),
    "other arch": lambda board, deb, signed: board.fetch("2", builds=build_of(board, arch="amd64")),
    "other python": lambda board, deb, signed: board.fetch("2", builds=build_of(board, python="3.13")),
    "damaged": lambda board, deb, signed: board.fetch("2", data=deb.read_bytes()[:-200] + bytes(200)),
    "none of ours": lambda board, deb, signed: board.fetch("2", data=package("3", tree_of("3"))),
    "no root": lambda board, deb, signed: (board.folder / "roots.pem").unlink(),
    "root of others": lambda board, deb, signed: (board.folder / "roots.pem").write_bytes(authorities("barn")[0]),
}
REFUSALS = {
    "other package": ["SHA-256"],
    "longer package": ["SHA-256"],
    "no package": ["2.deb"],
    "link": ["Too many levels of symbolic links"],
    "pipe": ["2.deb"],
    "signature": ["manifest"],
    "other site": ["upgrade trust"],
    "other version": ["manifest", 3, 2],
    "other arch": ["arm64", "3.11"],
    "other python": ["arm64", "3.11"],
    "damaged": ["package"],
    "none of ours": ["opt/fieldfleet/2"],
    "no root": ["roots.pem"],
    "root of others": ["upgrade trust"],
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_the_site_did_not_sign_for_this_board_is_refused_and_the_agent_goes_on(board, what):
    board.fetch("2")
    SPOILT[what](board, board.state / FOLDER / "2.deb", board.state / FOLDER / "2.json")
    board.want("2")
    running = (board.kept / "pid").read_text()
    record = take(board)
    assert record.state == "refused"
    assert names_all(record.reason, *REFUSALS[what])
    assert (board.current(), board.versions()) == ("1", {"1"})
    assert (board.kept / "pid").read_text() == running


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version":"2","attempt":0}', b"[" * 99_999, b" " * 99_999])
def test_a_wish_that_is_none_is_passed_over_by_name(board, data):
    (board.state / FOLDER / WANTED).write_bytes(data)
    with pytest.raises(CorruptFile):
        board.updater().agent.read_target()


def test_a_wish_of_the_agent_leads_out_of_no_folder(board):
    (board.state / FOLDER / WANTED).write_bytes(b'{"version":"../../2","deployment":"d"}')
    with pytest.raises(CorruptFile):
        take(board)
    assert read_upgrade(board.home).state == "none"


def test_an_older_version_is_refused_but_the_one_before_by_a_rollout_and_any_by_hand(board):
    for version in ("2", "3"):
        board.fetch(version)
        board.want(version)
        assert take(board).state == "committed"
    board.fetch("1.5")
    board.want("1.5")
    record = take(board)
    assert (record.state, names_all(record.reason, "1.5", 3)) == ("refused", True)
    raise_formats(board.state, "9", {**FORMATS, "outbox": 2})
    board.fetch("1.5", formats=dict(FORMATS))
    board.want("1.5", deployment="says what it costs")
    record = take(board)
    assert names_all(record.reason, "1.5", 3, "outbox", "`sudo device-agent upgrade install FILE.deb --lose`")
    (board.state / FILE).unlink()
    board.fetch("1.5")
    board.want("3", deployment="again")
    assert take(board).state == "committed"
    board.want("2", deployment="back")
    record = take(board)
    assert (record.state, record.deployment, board.current()) == ("rolled-back", "back", "2")
    assert take(board) == record
    assert board.service.running() == "2"
    board.want("1.5", deployment="by hand")
    assert take(board, by_hand=True).state == "committed"


def test_going_back_by_hand_and_no_further(board):
    board.fetch("2")
    board.want("2")
    take(board)
    updater = board.updater()
    updater.resume()
    record = updater.roll_back("asked for")
    assert (record.state, record.from_, record.to, board.current()) == ("rolled-back", "1", "2", "1")
    assert board.service.running() == "1"
    assert (board.home / "updater").readlink().name == "1"
    with pytest.raises(ConfigError, match="apt install"):
        updater.roll_back("asked for")


def test_nobody_goes_back_to_a_version_that_cannot_read_what_the_one_after_wrote(board):
    """Its agent would end at once, and nobody would start it again: it stays, unless that may be set aside."""
    raise_formats(board.state, "1", {"outbox": 1, "state": 1})
    for version in ("2", "3"):
        board.fetch(version)
        board.want(version)
        assert take(board).state == "committed"
    raise_formats(board.state, "3", {"outbox": 2, "state": 1, "of version 3": 1})
    (board.state / "outbox").mkdir()
    (board.state / "outbox/update").write_text("waits")
    updater = board.updater()
    updater.resume()
    with pytest.raises(ConfigError, match=naming("version 2", "outbox", "--lose")):
        updater.roll_back("asked for")
    board.want("2", deployment="back")
    record = take(board)
    assert (record.state, record.deployment, record.previous, board.current()) == ("refused", "back", "2", "3")
    assert names_all(record.reason, "version 2", "outbox")
    assert take(board) == record
    board.fetch("2", formats={"outbox": 1, "state": 1})
    board.want("2", deployment="by hand")
    assert take(board, by_hand=True, lose=True).state == "committed"
    assert (board.state / FOLDER / "aside-2/outbox/update").read_text() == "waits"
    board.want("3", deployment="and on")
    assert take(board).state == "rolled-back", "to version 3, which reads all of it, by the version before"
    assert (board.state / "outbox/update").read_text() == "waits"


def test_a_version_that_cannot_read_what_is_there_is_refused_unless_that_may_be_set_aside(board):
    raise_formats(board.state, "9", {**FORMATS, "outbox": 2})
    (board.state / "outbox").mkdir()
    (board.state / "outbox/update").write_text("waits")
    board.fetch("2", formats=dict(FORMATS))
    board.want("2")
    record = take(board)
    assert record.state == "refused"
    assert names_all(record.reason, "version 2", "outbox")
    assert take(board, by_hand=True, lose=True).state == "committed"
    assert not (board.state / "outbox").exists()
    assert (board.state / FOLDER / "aside-2/outbox/update").read_text() == "waits"
    assert "outbox" not in json.loads((board.state / FILE).read_bytes())["formats"]


def test_what_was_set_aside_comes_back_with_the_version_before(board):
    raise_formats(board.state, "9", {**FORMATS, "outbox": 2})
    before = (board.state / FILE).read_bytes()
    (board.state / "outbox").mkdir()
    (board.state / "outbox/update").write_text("waits")
    board.fetch("2", "crashing", formats=dict(FORMATS))
    board.want("2")
    assert take(board, by_hand=True, lose=True).state == "rolled-back"
    assert (board.state / "outbox/update").read_text() == "waits"
    assert (board.state / FILE).read_bytes() == before


def test_no_task_is_interrupted_unless_somebody_says_so(board):
    board.fetch("2")
    wanted = board.want("2")
    updater = board.updater()
    updater.resume()

    async def story():
        with mark_busy(board.state):
            taking = asyncio.create_task(updater.install(board.request(updater)))
            await staged(updater)
            await asyncio.sleep(0.1)
            assert updater.record.state == "staged"
        return await taking

    assert go(story()).state == "committed"
    board.fetch("3")
    board.want("3")
    with mark_busy(board.state):
        assert take(board, by_hand=True, force=True).state == "committed"
    assert wanted.version == "2"


def test_a_newer_wish_takes_the_place_of_one_that_waits(board):
    board.fetch("2")
    board.want("2")
    updater = board.updater()
    updater.resume()

    async def story():
        with mark_busy(board.state):
            taking = asyncio.create_task(updater.install(board.request(updater)))
            await staged(updater)
            board.fetch("3")
            board.want("3")
            return await taking

    assert go(story()).state == "superseded"
    assert take(board).to == "3"
    assert (board.current(), board.versions()) == ("3", {"1", "3"})


def test_a_board_that_is_started_too_often_during_a_trial_goes_back(board):
    """As with a version that takes the whole board down before it can prove itself."""
    board.fetch("2", "mute")
    board.want("2")
    updater = board.updater()
    updater.resume()
    taking = updater.install(board.request(updater))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(taking, 0.5))
    boots = 0
    while read_upgrade(board.home).state == "trial":
        assert board.current() == "2"
        board.service.kill()
        board.reboot()
        boots += 1
        board.updater().resume()
    assert boots == 3
    record = read_upgrade(board.home)
    assert (record.state, names_all(record.reason, 4, "version 2")) == ("rolled-back", True)
    assert board.service.running() == "1"


def test_what_dpkg_puts_in_place_during_a_trial_stays(board):
    board.fetch("2", "mute")
    board.want("2")
    updater = board.updater()
    updater.resume()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(updater.install(board.request(updater)), 0.5))
    board.trees["7"] = {}
    (board.home / "7").mkdir()
    (board.home / "current").unlink()
    (board.home / "current").symlink_to("7")
    record = board.updater().resume()
    assert (record.state, names_all(record.reason, "version 7")) == ("rolled-back", True)
    assert board.current() == "7"


def test_a_damaged_record_is_set_aside_and_what_runs_goes_on(board):
    (board.home / RECORD).write_bytes(b"\0" * 100)
    assert board.updater().resume().state == "none"
    assert (board.home / f"{RECORD}.corrupt-1").exists()
    board.fetch("2")
    board.want("2")
    assert take(board).state == "committed"


def test_what_was_pending_when_the_power_went_is_begun_anew(board):
    board.fetch("2")
    wanted = board.want("2")
    before = read_upgrade(board.home)
    write_upgrade(
        board.home,
        msgspec.structs.replace(before, state="verified", from_="1", to="2", deployment="d", attempt=wanted.attempt),
    )
    (board.home / ".new").mkdir()
    (board.home / ".new" / "half").write_text("")
    assert take(board).state == "committed"
    assert not (board.home / ".new").exists()


def test_another_package_of_a_version_that_lies_there_is_laid_anew(board):
    board.fetch("2", "crashing")
    board.want("2")
    take(board)
    (board.home / "2").mkdir()
    (board.home / "2" / MARK).write_text("0" * 64)
    board.fetch("2")
    board.want("2", attempt=2)
    assert take(board).state == "committed"
    assert board.current() == "2"


def test_a_version_is_refused_where_the_disk_has_no_room(board, monkeypatch):
    monkeypatch.setattr("device_agent.upgrade.versions.SPARE_BYTES", 1 << 60)
    board.fetch("2")
    board.want("2")
    record = take(board)
    assert (record.state, names_all(record.reason, board.home, "MiB")) == ("refused", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read what the agent's user cannot")
def test_root_reads_nothing_there_that_the_agents_user_could_not():
    with TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        secret, state = base / "secret", base / "state"
        secret.mkdir(mode=0o700)
        (secret / WANTED).write_text('{"version":"1"}')
        state.mkdir(mode=0o700)
        (state / FOLDER).symlink_to(secret)
        assert AgentFolder(state).read_target() is not None
        os.chown(state, 65534, 65534)
        with pytest.raises(ConfigError, match="Permission denied"):
            AgentFolder(state).read_target()
        assert os.geteuid() == 0
