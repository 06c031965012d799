"""A reload that would leave the broker open, or shut to everybody, ends with the broker stopped. Real mosquitto."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from edge_server.gateway import reload
from edge_server.gateway.broker_probe import open_probe
from edge_server.gateway.check import check_site
from edge_server.gateway.probe_access import OpenFault
from edge_server.gateway.reload import ReloadResult, find_broker, reload_broker
from edge_server.gateway.site_folder import make_broker_files
from edge_server.gateway.state import read_state
from shared.errors import ConfigError
from tests.edge_server.gateway.sites import GUARD_S, live_site, make_site, now, speaks
from tests.edge_server.processes import captured
from tests.machine import needs_mosquitto
from tests.naming import names_all, naming

pytestmark = [pytest.mark.broker, needs_mosquitto]


def run(routine):
    return asyncio.run(asyncio.wait_for(routine, GUARD_S))


async def test_a_site_lets_in_its_own_and_each_to_its_topics(tmp_path):
    async with live_site(tmp_path) as site:
        board = site.enrol("pi-03")
        assert not await site.lets_in(None)
        async with open_probe(site.door, board) as caller:
            assert await speaks(caller, "fieldfleet/v1/roof/pi-03/status")
            assert not await speaks(caller, "fieldfleet/v1/roof/pi-04/status")
            assert not await speaks(caller, "fieldfleet/v1/roof/_all/model")
        async with open_probe(site.door, site.folder.gateway("edge-server")) as server:
            assert await speaks(server, "fieldfleet/v1/roof/pi-03/task")


async def test_a_reload_is_heeded_and_nobody_notices(tmp_path):
    async with live_site(tmp_path) as site:
        board = site.enrol("pi-03")
        async with open_probe(site.door, board) as caller:
            for _ in range(3):
                assert (await reload_broker(site.folder)).faults == ()
                assert await speaks(caller, "fieldfleet/v1/roof/pi-03/status")
        assert read_state(site.path).generation == 3
        assert await site.lets_in(board)


def crl_of(site, begin, end):
    """Return a list of revoked certificates with dates of its own."""
    ca = x509.load_pem_x509_certificate(site.ca("site.crt").read_bytes())
    key = serialization.load_pem_private_key(site.ca("site.key").read_bytes(), None)
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.subject).last_update(begin).next_update(end)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


DAY = timedelta(days=1)
SPOILERS = {
    "no-crl": (lambda site: (site.path / "crl.pem").unlink(), True),
    "garbage-acl": (lambda site: spoil(site.path / "acl", b"what is this\n"), True),
    "no-acl": (lambda site: (site.path / "acl").unlink(), True),
    "empty-crl": (lambda site: (site.path / "crl.pem").write_bytes(b""), True),
    "expired-crl": (
        lambda site: (site.path / "crl.pem").write_bytes(crl_of(site, now() - 2 * DAY, now() - DAY)),
        False,
    ),
    "future-crl": (
        lambda site: (site.path / "crl.pem").write_bytes(crl_of(site, now() + DAY, now() + 2 * DAY)),
        False,
    ),
}
"""How to spoil a file that the broker reads, and whether that opens the broker to clients it must refuse."""


def spoil(path, data):
    path.write_bytes(path.read_bytes() + data)


@pytest.mark.parametrize("name", SPOILERS)
async def test_a_reload_that_fails_closes_the_listener(tmp_path, monkeypatch, caplog, name):
    """The file is spoiled between being written and being read."""
    how, opens = SPOILERS[name]

    def written(site, state):
        make_broker_files(site, state)
        how(site)

    async with live_site(tmp_path) as site:
        board = site.enrol("pi-03")
        with monkeypatch.context() as patch:
            patch.setattr(reload, "make_broker_files", written)
            found = await reload_broker(site.folder)
        assert found.running
        assert any(isinstance(fault, OpenFault) for fault in found.faults) == opens, found.faults
        assert not await site.listens()
        [record] = [record for record in caplog.records if record.name == reload.__name__]
        assert record.levelname == "ERROR"
        assert all(fault in record.getMessage() for fault in found.faults)
        assert await site.process.wait() == 0
        assert not (await reload_broker(site.folder)).running  # which makes the files anew
        await site.start()
        assert await site.lets_in(board)


async def test_a_broker_that_was_shut_to_everybody_is_mended_by_a_reload(tmp_path):
    async with live_site(tmp_path) as site:
        (site.path / "crl.pem").write_bytes(crl_of(site.folder, now() - 2 * DAY, now() - DAY))
        site.process.send_signal(1)
        board = site.enrol("pi-03")
        await site.shuts_out(board)
        found = await reload_broker(site.folder)
        assert found == ReloadResult(running=True), (site.process.returncode, site.log())
        assert await site.lets_in(board), (site.process.returncode, site.log())


async def test_another_program_at_the_port_is_left_alone(tmp_path):
    site = make_site(tmp_path)
    assert find_broker(site.door.port) is None
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", site.door.port)
    async with server:
        with pytest.raises(ConfigError, match=naming(site.door.port, reload.PROGRAM)):
            await reload_broker(site.folder)


async def test_the_listener_of_the_server_is_looked_at_too(tmp_path):
    """A broker that lets in boards there is stopped at the next reload, and `site check` says where."""
    site = make_site(tmp_path)
    conf, own = site.path / "mosquitto.conf", read_state(site.path).servers_port
    trusted, both = site.folder.gateway("own.pem"), site.path / "both.pem"
    both.write_bytes(trusted.read_bytes() + site.folder.ca("chain.pem").read_bytes())
    conf.write_text(conf.read_text().replace(str(trusted), str(both)))
    await site.start()
    try:
        told = [one.told for one in await check_site(site.folder, now()) if one.about == "broker"]
        assert [names_all(one, own) for one in told] == [True, True]
        found = await reload_broker(site.folder)
        assert found.faults == tuple(told)
        assert all(isinstance(fault, OpenFault) for fault in found.faults)
        assert not await site.listens()
    finally:
        await site.stop()


@pytest.mark.parametrize("name", SPOILERS)
async def test_a_broker_that_a_plain_sighup_has_opened_is_stopped_by_the_check(tmp_path, name):
    """Debian's unit and its logrotate send one; one that is shut to everybody is left as it is."""
    how, opens = SPOILERS[name]
    async with live_site(tmp_path) as site:
        site.enrol("pi-03")
        how(site.folder)
        site.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(1.0)  # mosquitto tells nobody that it has read its files
        ended = await asyncio.to_thread(captured, "site", "check", "--folder", site.path, "--format", "json")
        told = [one for one in json.loads(ended.out) if one["about"] == "broker"]
        assert ended.code == 1
        assert await site.listens() != opens
        assert told
        assert all(names_all(one["mend"], "edge-server site init" if opens else "site reload") for one in told), told


@pytest.mark.parametrize("opened", [True, False])
async def test_damage_to_the_sites_state_keeps_no_open_broker_running(tmp_path, opened):
    """What the state would say is not known, but a stranger is; a broker that lets none in goes on."""
    async with live_site(tmp_path) as site:
        if opened:
            (site.path / "crl.pem").unlink()
            site.process.send_signal(signal.SIGHUP)
            await asyncio.sleep(1.0)
        kept = (site.path / "state.json").read_text()
        (site.path / "state.json").write_text("{")
        ended = await asyncio.to_thread(captured, "site", "check", "--folder", site.path, "--format", "json")
        found = json.loads(ended.out)
        assert ended.code == 1
        assert found[0]["about"] == "state"
        assert [one["state"] for one in found if one["about"] == "broker"] == ["bad"] * opened, found
        (site.path / "state.json").write_text(kept)
        assert await site.listens() != opened
