"""Broker access table, verified at a real broker for each topic and account."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from edge_server.fleet.view import watch_site
from edge_server.gateway.access import GENERATION, OWN, ROLES, RULES, Role, acl, is_allowed, rights_table
from edge_server.gateway.state import read_state
from edge_server.release.rollout.drive import CLIENT
from shared.errors import Unreachable
from shared.protocol import topics as topics_module
from shared.protocol.topics import PEERS, ROOT, SERVER, TOPS
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.edge_server.gateway.sites import LiveSite, live_site, make_site
from tests.machine import needs_mosquitto
from tests.naming import naming

PAGE = Path(__file__).parents[3] / "shared/protocol/PROTOCOL.md"
PLACES = (
    "pi-03",
    "pi-04",
    "edge-server",
    "probe",
    "_all",
    "_server",
    "_tops",
    "_peers",
    "_peer-attic",
    "_peer-barn",
    "_probe",
)
CHANNELS = (
    *sorted({one for rule in RULES for one in rule.channels} - {GENERATION}),
    "doctor",
    "0",
    "1",
    "task/below",
    "",
)
REVOKED = "pi-09"
"""A board that the access list denies everything, and whose certificate no list names yet: its session is there."""
ALL = "overseer"
"""An account that the test adds to the access list, which may do everything: it says what others may hear."""


def test_the_page_has_the_table_that_the_access_list_is_made_from() -> None:
    assert rights_table() in PAGE.read_text()


def test_every_channel_of_the_protocol_is_in_it_by_the_same_speakers() -> None:
    """The page's list of channels says who speaks on which; whoever adds one there adds it here."""
    section = PAGE.read_text().partition("## Topics")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([a-z]+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert {channel for channel, _ in listed} == {one for rule in RULES for one in rule.channels} - {GENERATION}
    assert {channel for channel, _ in listed} == topics_module.CHANNELS
    with pytest.raises(ValueError, match=naming("new")):  # so that none is used that nobody decided on
        topics_module.topic("roof", "pi-03", "new")
    for channel, speaker in listed:
        role = "peer" if speaker.startswith("peer") else "device" if speaker.startswith("device") else "server"
        assert any("publish" in rule.verbs(role) for rule in RULES if channel in rule.channels), (channel, speaker)  # type: ignore[arg-type]


def test_a_device_has_no_more_than_its_own_and_what_is_everybodys() -> None:
    assert is_allowed("device", "pi-03", "publish", "pi-03", "update")
    assert not is_allowed("device", "pi-03", "publish", "pi-03", "task")
    assert not is_allowed("device", "pi-03", "receive", "pi-04", "task")
    assert not any(
        is_allowed("device", "pi-03", "publish", place, channel) for place in PLACES[1:] for channel in CHANNELS
    )
    assert all(rule.place == OWN or rule.device <= {"receive"} for rule in RULES)


def test_who_is_denied_has_no_other_lines() -> None:
    text = acl("roof", ["attic"], ["pi-03", "_peer-attic"])
    for name in ("pi-03", "_peer-attic"):
        [block] = [part for part in text.split("\n\n") if part.startswith(f"user {name}")]
        assert block.split("\n")[1:] in (["topic deny #"], ["topic deny #", ""])


@dataclass
class Guest:
    """An account with its connection."""

    role: Role
    account: str
    transport: MqttTransport


@asynccontextmanager
async def guests(site: LiveSite, pairs: dict[str, Path]) -> AsyncIterator[dict[str, Guest]]:
    """Connect one of each role, and who may do everything."""
    state = read_state(site.path)
    async with AsyncExitStack() as stack:
        found = {}
        for account, pair in pairs.items():
            role: Role = "peer" if account.startswith("_peer") else "device"
            role = {"edge-server": "server", "probe": "probe"}.get(account, role)  # type: ignore[assignment]
            port = state.servers_port if role == "server" else state.port
            transport = MqttTransport(at(site, pair, port), f"roof.{account}")
            found[account] = Guest(role, account, await stack.enter_async_context(transport.running()))
        for guest in found.values():
            await guest.transport.connected.wait()
        yield found


def at(site: LiveSite, pair: Path, port: int) -> Broker:
    """Return a site's broker for whoever has a pair and leaves no session behind."""
    return msgspec.structs.replace(site.at(pair, port), session_expiry_s=0)


def topics() -> list[tuple[str, str, str]]:
    """Return site, place and channel of every topic to be tried."""
    return list(itertools.product(("roof", "barn"), PLACES, CHANNELS))


def allowed(guest: Guest, verb: str, where: tuple[str, str, str], generation: int) -> bool:
    """Tell what the table says; of who was revoked and is connected still, that there is nothing."""
    if guest.account == REVOKED:
        return False
    site, place, channel = where
    if place == "_probe" and channel == str(generation):
        channel = GENERATION
    return site == "roof" and is_allowed(guest.role, guest.account, verb, place, channel)  # type: ignore[arg-type]


async def took(guest: Guest, where: tuple[str, str, str]) -> bool:
    """Tell whether the broker takes a publication."""
    try:
        await guest.transport.publish("/".join((ROOT, *where)), b"tried")
    except Unreachable:
        return False
    return True


async def heard(guests_: list[Guest], overseer: Guest) -> dict[str, set[str]]:
    """Have everything said at every topic; return what each hears of it, though each asks for all."""
    names = ["/".join((ROOT, *where)) for where in topics()]
    found: dict[str, set[str]] = {guest.account: set() for guest in guests_}
    async with AsyncExitStack() as stack:
        inboxes = [(one, await stack.enter_async_context(one.transport.subscribe("#"))) for one in guests_]
        for name in names:
            await overseer.transport.publish(name, b"said")
        for guest, inbox in inboxes:
            hearing = [name for name, where in zip(names, topics(), strict=True) if allowed(guest, "receive", where, 1)]
            if not hearing:  # an answer of the broker's comes behind whatever it had delivered before
                assert not await took(guest, topics()[0])
                assert not list(inbox.drain())
                continue
            last = hearing[-1]
            await overseer.transport.publish(last, b"end")
            while (came := await anext(inbox)) != (last, b"end"):
                found[guest.account].add(came[0])
    return found


@needs_mosquitto
@pytest.mark.broker
async def test_every_topic_and_verb_for_every_account(tmp_path, caplog) -> None:
    """Both sites' topics, those of the table and others, by devices, peer, server, probe and who was revoked.

    Others are not let in: who has no certificate, a revoked one, or the same name's at another site.
    """
    caplog.set_level(logging.CRITICAL)
    site, other = make_site(tmp_path), make_site(tmp_path / "barn", "barn")
    pairs = {name: site.enrol(name) for name in ("pi-03", "pi-04", REVOKED, ALL)} | {
        "_peer-attic": site.enrol("_peer-attic", "peer"),
        "edge-server": site.folder.gateway("own-server"),
        "probe": site.folder.gateway("probe"),
    }
    site.tell_refusals()
    (site.path / "acl").write_text(
        acl("roof", ["attic"], [REVOKED], generation=1) + f"\nuser {ALL}\ntopic readwrite #\n"
    )
    async with live(site), guests(site, pairs) as there:
        overseer = there.pop(ALL)
        assert {guest.role for guest in there.values()} == set(ROLES)
        refused = 0
        for guest in there.values():
            for where in topics():
                refused += not allowed(guest, "publish", where, 1)
                assert await took(guest, where) == allowed(guest, "publish", where, 1), (guest.account, where)
        assert len(site.refusals()) == refused  # as system tests look for them
        found = await heard(list(there.values()), overseer)
        for guest in there.values():
            expected = {"/".join((ROOT, *where)) for where in topics() if allowed(guest, "receive", where, 1)}
            assert found[guest.account] == expected, guest.account
        for nobody in (None, site.folder.gateway("revoked"), *(other.enrol(name) for name in ("pi-03", "probe-3"))):
            assert not await site.lets_in(nobody)


@asynccontextmanager
async def live(site: LiveSite) -> AsyncIterator[None]:
    """Run a site's broker with the files that are there."""
    await site.start()
    try:
        yield
    finally:
        await site.stop()


@needs_mosquitto
@pytest.mark.broker
async def test_nobody_is_parted_by_what_an_operator_looks_at(tmp_path) -> None:
    """A server and a board stay connected beside a look, a rollout, who serves upper halves, and links to peers."""
    async with live_site(tmp_path) as site, AsyncExitStack() as stack:
        state = read_state(site.path)
        server, board = site.folder.gateway("own-server"), site.enrol("pi-03")
        own = at(site, server, state.servers_port)
        names = [f"roof.{one}" for one in (SERVER, PEERS, TOPS, CLIENT)]
        there = [MqttTransport(own, name) for name in names]
        there.append(MqttTransport(at(site, board, state.port), "roof.pi-03"))
        for one in there:
            await stack.enter_async_context(one.running())
            await one.connected.wait()
        for _ in range(2):
            async with watch_site(own, "roof"), watch_site(own, "roof") as look:
                assert look.is_settled
        for one in there:  # each is still heard, on the connection that it began with
            await one.publish(f"{ROOT}/roof/pi-03/{'task' if 'pi-03' not in one.client_id else 'report'}", b"here")
            assert one.connections == 1, one.client_id


@needs_mosquitto
@pytest.mark.broker
async def test_no_account_takes_anothers_session_by_its_client_id(tmp_path) -> None:
    """A board that presents another client's id ends no connection but its own; on loopback it is not let in."""
    async with live_site(tmp_path) as site, AsyncExitStack() as stack:
        state = read_state(site.path)
        server = MqttTransport(at(site, site.folder.gateway("own-server"), state.servers_port), "roof._server")
        board = MqttTransport(at(site, site.enrol("pi-03"), state.port), "roof.pi-03")
        for one in (server, board):
            await stack.enter_async_context(one.running())
            await one.connected.wait()
        for name in ("roof._server", "roof.pi-03", "pi-03"):
            thief = MqttTransport(at(site, site.enrol("thief"), state.port), name)
            async with thief.running():
                await thief.connected.wait()
                await thief.publish(f"{ROOT}/roof/thief/report", b"here")
            near = MqttTransport(at(site, site.enrol("thief"), state.servers_port), name)
            async with near.running():
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(near.connected.wait(), 1)
        for one, channel in ((server, "task"), (board, "report")):
            await one.publish(f"{ROOT}/roof/pi-03/{channel}", b"still here")
            assert one.connections == 1
