"""`edge-server doctor` as an operator types it: at a site, without one, and what `--fix` mends."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import pytest

from edge_server.cli.gateway import examine, services
from edge_server.fleet import broker
from edge_server.gateway.authority import IssuedCertificate
from edge_server.gateway.state import SiteState, with_certificate
from edge_server.journal.sqlite import JOURNAL
from edge_server.plan.server_config import ServerConfig
from shared.runtime.folder_lock import hold_lock
from shared.runtime.support import units
from shared.transport.base import Broker
from tests.edge_server.gateway.sites import live_site, make_site, now
from tests.edge_server.processes import captured
from tests.machine import configured, needs_mosquitto
from tests.naming import names_all


def examined(*words):
    """Return the exit code and what is not good, by what it is about."""
    ended = captured("doctor", *words, "--format", "json")
    found = json.loads(ended.out)
    return ended.code, {one["about"]: one for one in found if one["state"] != "good"}, found


@pytest.mark.broker
@needs_mosquitto
async def test_a_site_in_order_has_no_fault_and_a_stopped_broker_is_one(tmp_path):
    async with live_site(tmp_path) as site:
        site.enrol("pi-03")
        code, _, found = await asyncio.to_thread(examined, "--folder", site.path)
        assert code == 0, found
        goods = {one["about"] for one in found if one["state"] == "good"}
        assert goods >= {"acl", "broker", "certificates", "disk", "keys"}
    code, wrong, _ = await asyncio.to_thread(examined, "--folder", site.path)
    assert code == 1
    bad = {name for name, one in wrong.items() if one["state"] == "bad"}
    assert "broker" in bad
    assert len(bad) == 2, "the broker, and the server's connection to it"
    ended = await asyncio.to_thread(captured, "doctor", "--folder", site.path)
    assert names_all(ended.out, *bad, 2)


@pytest.mark.broker
@needs_mosquitto
@pytest.mark.parametrize(("files", "state"), [(100, "bad"), (140, "advice"), (300, "good")])
async def test_a_broker_that_may_open_fewer_files_than_there_are_boards(tmp_path, monkeypatch, files, state):
    """A limit of 1,024, as Debian has it, refuses about the thousandth board; here 90 boards and a smaller limit."""
    limited = tmp_path / "limited"
    limited.write_text(f'#!/bin/sh\nulimit -Sn {files}\nexec {broker.find_mosquitto()} "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setattr(broker, "find_mosquitto", lambda: str(limited))
    async with broker.run_private_broker(tmp_path) as running:
        [found] = examine.examine_open_files(running.port, 90)
        assert found.state == state
        assert names_all(found.told, files)
        if state == "bad":
            assert "LimitNOFILE=65536" in found.mend
    assert list(examine.examine_open_files(running.port, 90)) == []


@pytest.mark.broker
async def test_without_a_site_it_looks_at_broker_and_machine(tmp_path):
    path, word = tmp_path / "server.toml", tmp_path / "word"
    word.write_text("pass")
    word.chmod(0o644)
    async with broker.run_private_broker(tmp_path) as running:
        path.write_text(
            f'plan = "plan.toml"\nsite = "lab"\n'
            f'[broker]\nport = {running.port}\nuser = "us"\npassword_file = "{word}"\n'
        )
        code, wrong, found = await asyncio.to_thread(examined, "--config", path, "--folder", tmp_path / "none", "--fix")
        assert (code, word.stat().st_mode & 0o777) == (0, 0o600), found
        assert {"site", "plan"} <= set(wrong)
        word.chmod(0o644)
        assert (await asyncio.to_thread(examined, "--config", path, "--folder", tmp_path / "none"))[0] == 1
    path.write_text("plan = 7\n")
    assert (await asyncio.to_thread(examined, "--config", path, "--folder", tmp_path / "none"))[0] == 2
    assert (await asyncio.to_thread(captured, "doctor", "--folder", tmp_path / "none")).code == 2


@pytest.mark.broker
@needs_mosquitto
@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("message_size_limit 100000", "max_packet_size 8388608"),
        ("retain_available false", "retain_available true"),
        ("max_qos 0", "max_qos 2"),
    ],
)
async def test_what_a_users_broker_lacks_is_found_by_publishing(tmp_path, line, setting):
    """With the line to add; `max_qos 0` and `retain_available false` were told to be in order."""
    path = tmp_path / "server.toml"
    async with configured(tmp_path, "allow_anonymous true", line) as place:
        path.write_text(f'plan = "plan.toml"\nsite = "lab"\n[broker]\nport = {place.port}\n')
        code, wrong, found = await asyncio.to_thread(examined, "--config", path, "--folder", tmp_path / "none")
        assert code == 1, found
        assert any(names_all(one["mend"], setting) for one in wrong.values())


def test_what_can_be_mended_without_harm_is(tmp_path):
    site = make_site(tmp_path)
    before = (site.path / "acl").read_bytes()
    (site.path / "acl").write_bytes(b"topic readwrite #\n")
    (site.path / "gateway/probe.key").chmod(0o644)
    (site.path / "gateway/server.crt").unlink()
    _, wrong, _ = examined("--folder", site.path)
    assert {"acl", "gateway/probe.key", "gateway/server.crt"} <= set(wrong)
    _, wrong, _ = examined("--folder", site.path, "--fix")
    assert {"acl", "gateway/probe.key", "gateway/server.crt"} & set(wrong) == set()
    assert "site reload" in wrong["--fix"]["mend"]
    assert (site.path / "acl").read_bytes() == before


@pytest.mark.parametrize(("days", "state_and_days"), [(400, None), (20, ("advice", 20)), (-3, ("advice", 3))])
def test_ends_of_certificates_that_are_near(days, state_and_days):
    issued = IssuedCertificate(b"", 7, now() + timedelta(days=days))
    state = with_certificate(SiteState(site="roof"), "pi-03", issued, authority="1", key="2")
    found = {one.about: one for one in examine.examine_certificates(state, now())}
    assert "certificates" in found
    findings = [one for about, one in found.items() if names_all(about, "pi-03")]
    if state_and_days is None:
        assert not findings
    else:
        [finding] = findings
        expected_state, expected_days = state_and_days
        assert finding.state == expected_state
        assert names_all(finding.told, expected_days)


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("max_queued_messages 0", ""),
        ("max_queued_messages 10", "max_queued_messages"),
        ("max_packet_size 1000", "max_packet_size"),
        ("max_queued_bytes 1000", "max_queued_bytes"),
    ],
)
def test_limits_that_lose_frames(line, setting):
    [found] = examine.examine_limits(["listener 1883", line], "a file")
    assert found.state == ("bad" if setting else "good")
    assert setting in found.about


def test_a_secret_that_is_gone_is_told(tmp_path):
    config = ServerConfig(plan="p", broker=Broker(user="us", password_file=str(tmp_path / "none")))
    assert [one.state for one in examine.examine_secrets(config)] == ["bad"]


def test_settings_of_included_files_count(tmp_path):
    (tmp_path / "own.conf").write_text("max_queued_messages 10\n")
    lines = examine.expand_includes([f"include_dir {tmp_path}"])
    assert [one.state for one in examine.examine_limits(lines, "a file")] == ["bad"]


@pytest.mark.parametrize(
    ("after_years", "state", "named"),
    [(0, "good", 5479), (11, "advice", "edge-server site rotate-ca"), (16, "bad", "edge-server site rotate-ca")],
)
def test_life_of_the_gateways_own_certificates(tmp_path, after_years, state, named):
    site, then = make_site(tmp_path), now() + timedelta(days=365.25 * after_years)
    found = list(examine.examine_own_certificates(site.folder, then))
    assert len(found) == 7
    [root] = [one for one in found if names_all(one.about, "ca/root.crt")]
    found.remove(root)
    assert (root.state, {one.state for one in found}) == ("good", {state})
    assert all(names_all(f"{one.told} {one.mend}", named) for one in found)


@pytest.mark.parametrize(
    ("name", "state", "judged", "command"),
    [
        ("mosquitto", "active", "good", ""),
        ("mosquitto", "failed", "advice", "journalctl -u mosquitto"),
        ("fieldfleet-enrolment", "inactive", "advice", "systemctl enable --now fieldfleet-enrolment"),
        ("fieldfleet-enrolment", "", "advice", "systemctl enable --now fieldfleet-enrolment"),
        ("fieldfleet-server", "inactive", "advice", "systemctl start fieldfleet-server"),
    ],
)
def test_services_as_systemd_has_them(name, state, judged, command):
    found = services.check_unit(name, state)
    assert found.state == judged
    assert names_all(found.mend, command) if command else not found.mend


@pytest.mark.parametrize("booted", [False, True])
def test_a_server_is_seen_by_systemd_or_by_the_run_that_it_holds(tmp_path, monkeypatch, booted):
    monkeypatch.setattr(units, "is_systemd_running", lambda: booted)

    async def told(*names):
        return dict.fromkeys(names, "active")

    monkeypatch.setattr(units, "query_states", told)
    config, run = ServerConfig(plan="p", data_dir=str(tmp_path)), tmp_path / "run-1"
    run.mkdir()
    (run / JOURNAL).touch()

    def states():
        return {one.about: one.state for one in asyncio.run(services.examine_services(config, None))}

    names = ("service fieldfleet-server", *(["service mosquitto"] if booted else []))
    with hold_lock(run):
        assert states() == dict.fromkeys(names, "good")
    assert states() == dict.fromkeys(names, "good" if booted else "advice")
