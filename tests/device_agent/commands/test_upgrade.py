"""`device-agent upgrade` as people type it: what it says, and its exit codes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from device_agent.__main__ import main
from device_agent.commands import upgrade as command
from device_agent.identity.credentials import CA, CURRENT, FOLDER, MEMBERSHIP, Membership
from device_agent.upgrade.record import FOLDER as UPGRADE
from device_agent.upgrade.record import HOME_VARIABLE
from device_agent.upgrade.updater import Updater
from shared.runtime.folder_lock import hold_lock
from tests.device_agent.upgrade import services
from tests.device_agent.upgrade.packages import UpgradeBoard, authorities

NAMES = r"\b\d\b|committed|rolled-back"
"""Versions and states in what the command prints."""


@pytest.fixture
def board(tmp_path):
    made = UpgradeBoard(tmp_path / "board")
    made.service.start()
    (made.folder / "agent.toml").write_text('state_dir = "state"\n[data]\nsource = "digits"\n')
    yield made
    made.service.stop()


@pytest.fixture
def typed(board, capsys, monkeypatch):
    """Return a function that runs a verb of the command; returns its code, what it says and what it complains of."""

    class Quick(Updater):
        def __init__(self, place, service):
            super().__init__(replace(board.place(), find_start_error=lambda _: "", look_s=0.01), service)

    monkeypatch.setattr(command, "Updater", Quick)

    def run(*words):
        service = f"{sys.executable} {services.__file__} {board.home} {board.state} {board.kept}"
        told = ["--home", board.home, "--config", board.folder / "agent.toml", "--roots", board.folder / "roots.pem"]
        told += ["--systemctl", service] if words[0] in ("install", "wanted", "back") else []
        monkeypatch.setattr(sys, "argv", ["device-agent", "upgrade", *map(str, words), *map(str, told)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


def test_a_version_is_installed_from_a_file_and_given_up_again(board, typed):
    board.fetch("2")
    deb = board.state / UPGRADE / "2.deb"
    code, out, err = typed("install", deb)
    assert (code, re.findall(NAMES, out)) == (0, ["2", "1", "2", "committed"]), err
    code, out, _ = typed("back")
    assert (code, re.findall(NAMES, out)) == (0, ["1", "2", "rolled-back"])
    assert typed("back")[0] == 2


def test_one_that_fails_ends_with_1_and_one_that_is_refused_with_2(board, typed):
    board.fetch("2", "giving-up")
    deb = board.state / UPGRADE / "2.deb"
    code, out, _ = typed("install", deb)
    assert (code, re.findall(NAMES, out)[:3]) == (1, ["1", "2", "rolled-back"])
    deb.write_bytes(b"!<arch>\n")
    code, out, _ = typed("install", deb, "--manifest", deb.with_suffix(".json"))
    assert (code, "SHA-256" in out) == (2, True)
    deb.with_suffix(".json").write_text("{}")
    code, _, err = typed("install", deb)
    assert (code, str(deb.with_suffix(".json")) in err) == (2, True)
    assert typed("install", deb, "--probation", "0")[0] == 2


def test_only_one_upgrade_is_under_way(board, typed):
    with hold_lock(board.home):
        code, _, err = typed("back")
    assert (code, str(board.home) in err) == (3, True)


def test_who_may_not_write_versions_is_told_to_be_root(board, typed, monkeypatch):
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)
    code, _, err = typed("back")
    assert (code, str(board.home) in err) == (2, True)


def test_what_is_wanted_is_taken_and_systemd_is_told_before_it_is_watched(board, typed, monkeypatch):
    told = []

    class Told:
        def tell(self, state):
            told.append(state)

    monkeypatch.setattr(command, "find_supervisor", Told)
    assert typed("wanted")[0] == 0
    board.fetch("2")
    board.want("2")
    assert typed("wanted")[0] == 0
    assert told == [b"READY=1"] * 2
    code, out, _ = typed("status", "--format", "json")
    found = json.loads(out)
    assert (code, found["current"], found["state"], found["deployment"]) == (0, "2", "committed", "d")
    board.fetch("3", "giving-up")
    board.want("3")
    assert typed("wanted")[0] == 0
    found = json.loads(typed("status", "--format", "json")[1])
    assert [found[key] for key in ("current", "state", "to", "from")] == ["2", "rolled-back", "3", "2"]
    assert found["reason"] in typed("status")[1]
    (board.state / UPGRADE / "wanted.json").write_text("{")
    assert typed("wanted")[0] == 0


def test_the_root_of_the_joined_site_is_written_down(board, typed, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, "")
    roots, (root, _, chain) = board.folder / "roots.pem", authorities("roof")
    roots.unlink()
    assert "upgrade trust`" in typed("status")[1]
    code, _, err = typed("trust")
    assert (code, "`device-agent join`" in err) == (2, True)
    folder = board.state / FOLDER / CURRENT
    folder.mkdir(parents=True)
    pin = x509.load_pem_x509_certificate(root).fingerprint(SHA256()).hex()
    told = {"token": "abc", "host": "h", "port": 1, "broker_host": "h", "broker_port": 1}
    dates = {"not_before_utc_s": 0.0, "not_after_utc_s": 1.0}
    membership = Membership(device="pi", site="roof", root=pin, **told, **dates)
    (folder / MEMBERSHIP).write_bytes(msgspec.json.encode(membership))
    (folder / CA).write_bytes(chain)
    assert typed("trust")[0] == 2  # its own root is not among them
    (folder / CA).write_bytes(chain + root)
    code, out, _ = typed("trust")
    assert (code, pin in out) == (0, True)
    assert x509.load_pem_x509_certificate(roots.read_bytes()) == x509.load_pem_x509_certificate(root)
    assert pin[:16] in typed("status")[1]
    roots.write_text("none")
    assert typed("status")[0] == 2
