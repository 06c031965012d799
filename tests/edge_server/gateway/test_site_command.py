"""`edge-server site` and `revoke` as an operator types them; what `check` finds, and that its mends mend."""

from __future__ import annotations

import asyncio
import json
import os
import pwd

import pytest

from edge_server.gateway.authority import make_key
from edge_server.gateway.packages.store import read_index
from edge_server.gateway.state import read_state
from shared.runtime.processes import terminate
from tests.edge_server.gateway.sites import GUARD_S, live_site, make_site, put_deb
from tests.edge_server.processes import called
from tests.machine import needs_mosquitto
from tests.naming import names_all

USER = pwd.getpwuid(os.geteuid()).pw_name
MINE = ("--broker-user", USER) if os.geteuid() == 0 else ()


def run(routine):
    return asyncio.run(asyncio.wait_for(routine, GUARD_S))


def check(path, capsys):
    """Return the exit code and what is not good, by what it is about."""
    capsys.readouterr()
    code = called("site", "check", "--folder", path, "--format", "json")
    found = json.loads(capsys.readouterr().out)
    return code, {one["about"]: one for one in found if one["state"] != "good"}


def test_init_says_what_it_wrote_and_what_is_next(tmp_path, capsys):
    folder = ("--folder", tmp_path / "site", *MINE)
    assert called("site", "init", "--name", "roof", "--address", "gateway.local", *folder) == 0
    assert names_all(capsys.readouterr().out, tmp_path / "site/ca/root.key", "edge-server site check")
    assert called("site", "init", *folder) == 0
    assert "gateway/server.crt" not in capsys.readouterr().out
    assert called("site", "init", "--address", "10.0.0.7", *folder) == 0
    assert "gateway/server.crt" in capsys.readouterr().out
    for wrong in (("--name", "barn"), ("--address", "a b"), ("--port", "70000")):
        assert called("site", "init", *wrong, *folder) == 2
    assert called("site", "init", "--packages", tmp_path, "--name", "barn", "--folder", tmp_path / "barn", *MINE) == 2
    assert not (tmp_path / "barn").exists()  # no package of the agent lies there
    assert called("site", "check", "--folder", tmp_path / "other") == 2
    assert called("revoke", "pi-03", *folder[:2]) == 2


def test_init_takes_in_what_a_folder_has_for_boards(tmp_path, capsys):
    put_deb(tmp_path)
    (tmp_path / "numpy-2-py3-none-any.whl").write_bytes(b"wheel")
    folder = ("--folder", tmp_path / "site", *MINE)
    assert called("site", "init", "--name", "roof", "--packages", tmp_path, *folder) == 0
    told = capsys.readouterr().out
    assert names_all(told, "fieldfleet-agent", "0.4.0", "arm64", 1)
    assert [one.version for one in read_index(tmp_path / "site").manifests()] == ["0.4.0"]
    assert called("site", "init", "--packages", tmp_path, *folder) == 0  # again is no harm
    assert "0.4.0" in capsys.readouterr().out


@pytest.mark.broker
@needs_mosquitto
async def test_a_site_that_is_in_order_is_found_so(tmp_path, capsys):
    async with live_site(tmp_path) as site:
        board = site.enrol("pi-03")
        code, found = await asyncio.to_thread(check, site.path, capsys)
        assert (code, list(found)) == (0, ["ca/root.key"])  # advice: it belongs elsewhere
        (site.path / "ca/root.key").unlink()
        assert await asyncio.to_thread(check, site.path, capsys) == (0, {})
        assert await asyncio.to_thread(called, "revoke", "pi-03", "--folder", site.path) == 0
        assert "pi-03" in capsys.readouterr().out
        assert not await site.lets_in(board)
        assert await asyncio.to_thread(called, "site", "reload", "--folder", site.path) == 0
        assert await asyncio.to_thread(check, site.path, capsys) == (0, {})
        await terminate(site.process)
        code, found = await asyncio.to_thread(check, site.path, capsys)
        assert (code, list(found)) == (1, ["broker"])
        assert await asyncio.to_thread(called, "site", "reload", "--folder", site.path) == 0


def another(path):
    path.write_bytes(make_key())


FAULTS = {
    "acl": lambda path: path.write_bytes(b"topic readwrite #\n"),
    "mosquitto.conf": lambda path: path.write_bytes(b"allow_anonymous true\n"),
    "crl.pem": lambda path: path.write_bytes(b""),
    "gateway/server.crt": lambda path: path.unlink(),
    "gateway/probe.key": lambda path: path.chmod(0o644),
    "gateway/edge-server.key": another,
    "gateway/own-server.key": another,
    "server.toml": lambda path: path.write_bytes(b'plan = "p"\nsite = "barn"\n'),
    "ca/site.key": another,
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_with_its_mend(tmp_path, capsys, name):
    site = make_site(tmp_path)
    FAULTS[name](site.path / name)
    code, found = check(site.path, capsys)
    found.pop("broker")  # which does not run
    found.pop("ca/root.key", None)
    about = name.replace("server.key", "server.crt")
    assert code == 1
    assert found[about]["state"] == "bad"
    assert found[about]["mend"]
    if "site init" in found[about]["mend"] and not name.endswith((".key", ".toml")):
        assert called("site", "init", "--folder", site.path) == 0
        assert about not in check(site.path, capsys)[1]


def test_a_certificate_that_the_loopback_listener_refuses_is_found(tmp_path, capsys):
    site = make_site(tmp_path)
    path = site.path / "server.toml"
    path.write_text(path.read_text().replace("own-server", "edge-server"))
    found = check(site.path, capsys)[1]["server.toml"]
    assert found["state"] == "bad"
    assert names_all(found["told"], "edge-server.crt")
    assert "own-server.crt" in found["mend"]


@pytest.mark.broker
@needs_mosquitto
async def test_a_broker_that_is_open_is_found_and_stopped(tmp_path, capsys):
    """One that was told to take an access list that it cannot read, by somebody who did not look."""
    async with live_site(tmp_path) as site:
        before = (site.path / "acl").read_bytes()
        (site.path / "acl").write_bytes(before + b"what is this\n")
        site.process.send_signal(1)
        while not await site.is_open():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.02)
        (site.path / "acl").write_bytes(before)
        code, found = await asyncio.to_thread(check, site.path, capsys)
        assert code == 1
        assert found["broker"]["state"] == "bad"
        assert names_all(found["broker"]["mend"], "edge-server site init")
        assert not await site.listens()
        assert await asyncio.to_thread(called, "site", "reload", "--folder", site.path) == 0
        await site.start()
        assert (await asyncio.to_thread(check, site.path, capsys))[0] == 0
        assert read_state(site.path).generation == 1
