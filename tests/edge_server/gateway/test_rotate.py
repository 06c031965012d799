"""Keys of the gateway and the site CA are replaced under live connections, and nobody notices. Real mosquitto."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509

from edge_server.gateway import state
from edge_server.gateway.broker_probe import open_probe
from edge_server.gateway.check import check_site
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.probe_access import fetch_certificate
from edge_server.gateway.reload import ReloadResult, reload_broker
from edge_server.gateway.revocation.revoke import revoke
from edge_server.gateway.rotation import rotate
from edge_server.gateway.rotation.rotate import CaRotation, finish_ca, rotate_ca, rotate_server
from edge_server.gateway.state import read_state
from shared.errors import ConfigError
from tests.edge_server.gateway.sites import GUARD_S, live_site, make_site, now
from tests.edge_server.processes import called
from tests.machine import needs_mosquitto
from tests.naming import names_all, naming

pytestmark = [pytest.mark.broker, needs_mosquitto]

WELL = ReloadResult(running=True)


def run(routine):
    return asyncio.run(asyncio.wait_for(routine, GUARD_S))


@asynccontextmanager
async def talking(site, name, pair):
    """Have a board publish on one connection while the block lasts; nothing may be refused, nor the connection end."""
    stop, taken = asyncio.Event(), asyncio.Semaphore(0)

    async def talk():
        async with open_probe(site.door, pair) as caller:
            while not stop.is_set():
                assert not await caller.publish(f"fieldfleet/v1/roof/{name}/update")
                taken.release()
                await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        group.create_task(talk())
        await taken.acquire()
        yield
        while not taken.locked():  # what was taken before
            await taken.acquire()
        await taken.acquire()  # and it still talks
        stop.set()


def serial(pem):
    return x509.load_pem_x509_certificate(pem).serial_number


async def test_the_gateway_gets_new_keys_while_boards_talk(tmp_path):
    async with live_site(tmp_path) as site:
        board, files = site.enrol("pi-03"), [site.folder.gateway("server.key"), site.folder.gateway("server.crt")]
        before = [one.read_bytes() for one in files]
        async with talking(site, "pi-03", board):
            assert await rotate_server(site.folder, now()) == CaRotation(WELL)
        assert all(one.read_bytes() != was for one, was in zip(files, before, strict=True))
        shown = x509.load_der_x509_certificate(await fetch_certificate(site.door))
        assert shown.serial_number == serial(files[1].read_bytes()) != serial(before[1])
        assert await site.lets_in(board)


async def test_the_ca_is_replaced_while_boards_talk(tmp_path):
    async with live_site(tmp_path) as site, AsyncExitStack() as stack:
        old, bad, other = (site.enrol(name) for name in ("pi-03", "pi-04", "pi-06"))
        await stack.enter_async_context(talking(site, "pi-03", old))
        assert await rotate_ca(site.folder, now()) == CaRotation(WELL, ("pi-03", "pi-04", "pi-06"))
        assert await site.lets_in(bad)
        new = site.enrol("pi-05")
        assert await site.lets_in(new)
        with pytest.raises(ConfigError, match=naming("edge-server site rotate-ca --finish")):
            await rotate_ca(site.folder, now())
        assert await revoke(site.folder, "pi-04", now()) == WELL  # whom the CA before signed
        assert not await site.lets_in(bad)
        with pytest.raises(ConfigError, match=naming("pi-03", "pi-06", "--force")):
            await finish_ca(site.folder)
        site.enrol("pi-03")  # its connection stays, as a board's does that renews its certificate
        renewed = site.enrol("pi-06")
        assert await site.lets_in(other)
        assert await finish_ca(site.folder) == CaRotation(WELL)
        assert not await site.lets_in(old)
        assert not await site.lets_in(other)
        assert await site.lets_in(renewed)
        assert await site.lets_in(new)
        assert not await site.lets_in(bad)
        with pytest.raises(ConfigError, match=naming(site.path, "edge-server site rotate-ca")):
            await finish_ca(site.folder)
        assert await revoke(site.folder, "pi-05", now()) == WELL
        assert not await site.lets_in(new)


async def test_an_overlap_may_be_cut_short(tmp_path):
    async with live_site(tmp_path) as site:
        old = site.enrol("pi-03")
        assert (await rotate_ca(site.folder, now())).pending == ("pi-03",)
        assert (await finish_ca(site.folder, force=True)).reloaded == WELL
        assert not await site.lets_in(old)
        assert (await reload_broker(site.folder)) == WELL
        assert not await site.lets_in(old)


def test_without_the_roots_key_no_ca_is_made(tmp_path):
    site = make_site(tmp_path)
    before = site.folder.ca("site.crt").read_bytes()
    site.folder.ca("root.key").unlink()
    with pytest.raises(ConfigError, match=naming(site.folder.ca("root.key"))):
        run(rotate_ca(site.folder, now()))
    assert site.folder.ca("site.crt").read_bytes() == before
    assert not site.folder.ca("site-before.crt").exists()


async def test_a_broker_that_keeps_its_certificate_is_named(tmp_path, monkeypatch):
    async with live_site(tmp_path) as site:
        shown = await fetch_certificate(site.door)

        async def same(_door):
            return shown

        monkeypatch.setattr(rotate, "fetch_certificate", same)
        assert len((await rotate_server(site.folder, now())).reloaded.faults) == 1


def test_the_commands(tmp_path, capsys):
    site = make_site(tmp_path)
    folder = ("--folder", site.path)
    site.enrol("pi-03")
    assert called("site", "rotate-server", *folder) == 0
    assert called("site", "rotate-ca", "--force", *folder) == 2
    assert called("site", "rotate-ca", "--finish", *folder) == 2
    assert called("site", "rotate-ca", *folder) == 0
    assert names_all(capsys.readouterr().out, "pi-03", "edge-server site rotate-ca --finish")
    assert called("site", "check", *folder) == 1  # for want of a broker
    assert "rotate-ca --finish" in capsys.readouterr().out
    assert called("site", "rotate-ca", "--finish", *folder) == 2
    assert called("site", "rotate-ca", "--finish", "--force", *folder) == 0
    assert read_state(site.path).generation == 3


class PowerCut(BaseException):
    """Nothing after this is done: no handler of errors, as after a power cut."""


def cut_at(monkeypatch, number, deed):
    """Do a deed until just before its n-th change of the disk that others can see; tell whether it was cut there.

    Between two of these only files beside are written, and what is there is synchronised.
    """
    left = [number]

    def counted(change):
        def step(*args, **options):
            if left[0] == 0:
                raise PowerCut
            left[0] -= 1
            return change(*args, **options)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counted(Path.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr(state, "write_accounts", counted(state.write_accounts))
        try:
            run(deed())
        except PowerCut:
            return True
    return False


def faults_of(site):
    found = run(check_site(site.folder, now()))
    return {one.about: one.mend for one in found if one.state == "bad" and one.about != "broker"}


@pytest.mark.parametrize("name", ["server", "ca", "finish"])
def test_wherever_a_rotation_is_cut_check_names_a_mend_that_works(tmp_path, monkeypatch, name):
    site, kept, cuts = make_site(tmp_path), tmp_path / "kept", 0
    site.enrol("pi-03")
    if name == "finish":
        run(rotate_ca(site.folder, now()))
    shutil.copytree(site.path, kept)
    deeds = {
        "server": lambda: rotate_server(site.folder, now()),
        "ca": lambda: rotate_ca(site.folder, now()),
        "finish": lambda: finish_ca(site.folder, force=True),
    }
    while cut_at(monkeypatch, cuts, deeds[name]):
        mends = set(faults_of(site).values())
        if any("rotate-ca`" in one for one in mends):
            run(rotate_ca(site.folder, now()))
        elif mends:
            assert all("site init" in one for one in mends), mends
            initialise(site.folder, SiteSettings(), now())
        assert faults_of(site) == {}, cuts
        with suppress(ConfigError):  # in force, or finished, by now
            run(deeds[name]())
        assert faults_of(site) == {}, cuts
        aside = {path.name for path in site.path.glob("ca/site-before.*")}
        assert aside == ({"site-before.crt", "site-before.key"} if name == "ca" else set()), cuts
        shutil.rmtree(site.path)
        shutil.copytree(kept, site.path)
        cuts += 1
    assert faults_of(site) == {}
    assert cuts > 3
