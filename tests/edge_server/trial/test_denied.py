"""Revoked devices lose their tasks and messages at a running server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import pytest

from edge_server.gateway.enrolment.accounts import SiteAccount
from edge_server.gateway.revocation.denied import POLL_S, watch_denied
from edge_server.gateway.state import SiteState, write_state
from edge_server.plan.server_config import ServerConfig, load
from shared.runtime.executor import background
from tests.edge_server.harness import moved, site, virtual
from tests.naming import log_messages

pytestmark = pytest.mark.virtual_time


def note(folder, *, denied):
    """Write a site's state in which those accounts are denied."""
    accounts = {name: SiteAccount(denied=name in denied) for name in "abc"}
    write_state(folder, SiteState(site="roof", accounts=accounts))


async def test_a_revoked_device_is_out_of_the_round_and_in_again_when_it_was_enrolled_anew(tmp_path, caplog):
    config = ServerConfig(plan="", gateway=str(tmp_path / "gateway"))
    (tmp_path / "gateway").mkdir()
    note(tmp_path / "gateway", denied=())
    limits = {"cohort": "min_devices = 1", "round": "deadline_s = 60.0"}
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(site(tmp_path, rounds=3, **limits))
        await stack.enter_async_context(background(watch_denied(config, here.server.presence.deny)))
        a, b = [await here.device(name) for name in "ab"]
        task, other = await a.task(), await b.task()
        note(tmp_path / "gateway", denied=("a",))
        await asyncio.sleep(2 * POLL_S)
        assert here.server.fleet.online == ("b",)
        await a.say(b"nobody decodes this")
        await a.status(online=True, session=2)  # as a broker that kept its birth tells it again
        await b.answer(other, moved(here.plan, 0.5))
        second = await b.task()
        assert here.server.fleet.online == ("b",)
        assert not here.server.flood.refused
        note(tmp_path / "gateway", denied=())
        await asyncio.sleep(2 * POLL_S)
        await a.status(online=True, session=3)
        await b.answer(second, moved(here.plan, 0.5))
        for puppet in (a, b):
            await puppet.answer(await puppet.task(), moved(here.plan, 0.5))
        arrived = [one.arrived for one in (await here.ended())[1]]
    assert task.round == 1
    assert arrived == [("b",), ("b",), ("a", "b")]
    assert log_messages(caplog, "a", level="WARNING")


@dataclass
class Told:
    """What was handed on, in order."""

    words: list[frozenset[str]]

    async def take(self, denied):
        self.words.append(denied)


async def test_what_cannot_be_read_leaves_those_denied_who_were(tmp_path, caplog):
    told, config = Told([]), ServerConfig(plan="", gateway=str(tmp_path))
    async with background(watch_denied(config, told.take)):
        await asyncio.sleep(3 * POLL_S)  # no site yet
        note(tmp_path, denied=("a",))
        await asyncio.sleep(2 * POLL_S)
        (tmp_path / "state.json").write_bytes(b"{")
        await asyncio.sleep(3 * POLL_S)
        note(tmp_path, denied=("a", "b"))
        await asyncio.sleep(2 * POLL_S)
    assert told.words == [frozenset("a"), frozenset("ab")]
    assert len([one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]) == 2


def test_a_server_without_a_gateway_watches_nothing(tmp_path):
    virtual(watch_denied(ServerConfig(plan=""), Told([]).take))
    (tmp_path / "server.toml").write_text('plan = "p"\nsite = "lab"\ngateway = "site"\n')
    assert load(tmp_path / "server.toml").gateway == str(tmp_path / "site")
    assert msgspec.structs.asdict(ServerConfig(plan=""))["gateway"] == ""
