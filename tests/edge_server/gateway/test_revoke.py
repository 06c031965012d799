"""Revoking a device that is connected: nothing of it passes any more, and the others see nothing. Real mosquitto."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from edge_server.gateway.broker_probe import open_probe
from edge_server.gateway.reload import ReloadResult
from edge_server.gateway.revocation import revoke as revoking
from edge_server.gateway.revocation.revoke import readmit, revoke
from edge_server.gateway.state import read_state
from shared.errors import ConfigError, Unreachable
from shared.runtime.processes import terminate
from tests.edge_server.gateway.sites import GUARD_S, live_site, make_site, now, speaks
from tests.machine import needs_mosquitto
from tests.naming import names_all, naming

pytestmark = [pytest.mark.broker, needs_mosquitto]

REVOKED, OTHER = "fieldfleet/v1/roof/pi-03/update", "fieldfleet/v1/roof/pi-04/update"


def run(routine):
    return asyncio.run(asyncio.wait_for(routine, GUARD_S))


async def talk(caller, topic, stop):
    """Publish again and again; return how often it was taken, and why it ended."""
    taken = 0
    try:
        while not stop.is_set():
            if await caller.publish(topic):
                return taken, "denied"
            taken += 1
            await asyncio.sleep(0.001)
    except Unreachable as error:
        return taken, f"cut off: {error}"
    return taken, "stopped"


async def publish_for_ever(caller, topic):
    while True:
        await caller.publish(topic)


async def test_a_live_session_is_cut_and_the_others_see_nothing(tmp_path):
    async with live_site(tmp_path) as site, AsyncExitStack() as stack:
        boards = {name: site.enrol(name) for name in ("pi-03", "pi-04")}
        callers = {name: await stack.enter_async_context(open_probe(site.door, pair)) for name, pair in boards.items()}
        server = await stack.enter_async_context(open_probe(site.door, site.folder.gateway("edge-server")))
        await server.subscribe("fieldfleet/v1/roof/+/update")
        stop = asyncio.Event()
        bad = asyncio.create_task(talk(callers["pi-03"], REVOKED, stop))
        good = asyncio.create_task(talk(callers["pi-04"], OTHER, stop))
        while {await server.receive_topic() for _ in range(4)} != {REVOKED, OTHER}:
            pass
        assert await revoke(site.folder, "pi-03", now()) == ReloadResult(running=True)
        _, why = await bad
        assert why != "stopped"
        await speaks(server, "fieldfleet/v1/roof/pi-04/ack")  # all that was heard before has come by now
        while not server.topics.empty():
            server.topics.get_nowait()
        assert {await server.receive_topic() for _ in range(20)} == {OTHER}
        stop.set()
        assert (await good)[1] == "stopped"
        with pytest.raises(Unreachable):  # the session is gone, and not only its rights
            await publish_for_ever(callers["pi-03"], REVOKED)
        assert not await site.lets_in(boards["pi-03"])
        assert await site.lets_in(boards["pi-04"])


async def test_a_restart_keeps_it_and_only_new_enrolment_ends_it(tmp_path):
    async with live_site(tmp_path) as site:
        old, other = site.enrol("pi-03"), site.enrol("pi-04")
        assert (await revoke(site.folder, "pi-03", now())).faults == ()
        await terminate(site.process)
        await site.start()
        assert not await site.lets_in(old)
        assert await site.lets_in(other)
        early = site.enrol("pi-03")
        async with open_probe(site.door, early) as caller:  # a certificate alone is not enough
            assert not await speaks(caller, REVOKED)
        assert (await readmit(site.folder, "pi-03")).faults == ()
        assert not await site.lets_in(early)  # all that the account had are revoked
        new = site.enrol("pi-03")
        async with open_probe(site.door, new) as caller:
            assert await speaks(caller, REVOKED)
        assert not await site.lets_in(old)


async def test_one_after_the_other_is_revoked(tmp_path):
    """Lists of one CA have the same dates; the broker takes the newest all the same."""
    async with live_site(tmp_path) as site:
        boards = [site.enrol(f"pi-{number}") for number in range(3)]
        for number in range(3):
            assert [await site.lets_in(one) for one in boards] == [one >= number for one in range(3)]
            assert (await revoke(site.folder, f"pi-{number}", now())).faults == ()
        assert not any([await site.lets_in(one) for one in boards])


async def test_without_a_broker_it_holds_from_its_start(tmp_path):
    site = make_site(tmp_path)
    board = site.enrol("pi-03")
    for _ in range(2):
        assert await revoke(site.folder, "pi-03", now()) == ReloadResult(running=False)
    await site.start()
    try:
        assert not await site.lets_in(board)
    finally:
        await terminate(site.process)


async def test_a_broker_that_lets_it_pass_all_the_same_is_stopped(tmp_path, monkeypatch):
    """As one would be that is told to hold other access lists."""
    async with live_site(tmp_path) as site:
        site.enrol("pi-03")

        async def reloaded(folder, change):
            found = await revoking_reload(folder, lambda state: readmitted(change(state)))
            assert found == ReloadResult(running=True)
            return found

        def readmitted(state):
            return revoking.with_account(state, "pi-03", revoking.replace(state.accounts["pi-03"], denied=False))

        revoking_reload = revoking.reload_broker
        monkeypatch.setattr(revoking, "reload_broker", reloaded)
        found = await revoke(site.folder, "pi-03", now())
        assert names_all(found.faults[0], "pi-03")
        assert not await site.listens()


def test_nobody_else_is_revoked(tmp_path):
    site = make_site(tmp_path)
    site.enrol("pi-04")
    before = dict(read_state(site.path).accounts)
    for name in ("pi-03", "edge-server", "gateway", "probe", "", "#"):
        with pytest.raises(ConfigError, match=naming(repr(name), "roof", "pi-04")):
            run(revoke(site.folder, name, now()))
    assert read_state(site.path).accounts == before
