"""Broker reachability check against real brokers that accept, refuse or are absent."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext

import msgspec
import pytest

from device_agent.commands.diagnosis.checks import Check, check_broker
from device_agent.commands.diagnosis.examine import examine_broker
from device_agent.config import AgentConfig
from device_agent.measurement.account_lock import IN_USE, block_agent_connection
from device_agent.measurement.link_test import Schedule, probe_link
from edge_server.fleet.broker import run_private_broker
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.folder_lock import FOLDER_LOCK, hold_lock
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.reach import find_refusal
from tests.edge_server.gateway.enrolments import Authority
from tests.machine import configured, free_port
from tests.naming import names_all, naming

TOPIC = "fieldfleet/v1/lab/board/doctor"
NAME = "lab.board.doctor-1"


def sessions(port: int, name: str) -> bool:
    """Tell whether an MQTT 3.1.1 broker keeps a session under that name: it says so when one goes on with it."""
    packet = b"\x00\x04MQTT\x04\x00\x00\x3c" + len(name).to_bytes(2, "big") + name.encode()
    with socket.create_connection(("127.0.0.1", port), 5) as link:
        link.settimeout(5)
        link.sendall(bytes([0x10, len(packet)]) + packet)
        answer = link.recv(4)
    assert answer[:1] == b"\x20"
    assert answer[3] == 0
    return bool(answer[2] & 1)


@pytest.mark.broker
@pytest.mark.parametrize("version", [5, 3])
async def test_a_broker_that_serves_us_keeps_nothing_of_it(tmp_path, version) -> None:
    """Neither under MQTT 5 nor under 3.1.1 is a session left, though the agent's own would last for a day."""
    async with run_private_broker(tmp_path) as broker:
        assert await find_refusal(Broker(port=broker.port, version=version), NAME, TOPIC) == ""
        assert not sessions(broker.port, NAME)
        assert sessions(broker.port, NAME)  # the question itself leaves one: so it can tell


@pytest.mark.broker
async def test_one_that_knows_only_the_older_version_serves_too(tmp_path) -> None:
    async with run_private_broker(tmp_path, embedded=True) as broker:
        assert await find_refusal(Broker(port=broker.port), NAME, TOPIC, 1.0) == ""


@pytest.mark.broker
@pytest.mark.parametrize("version", [5, 3])
async def test_one_that_wants_a_login_says_so(tmp_path, version) -> None:
    (tmp_path / "passwords").write_text("")
    async with configured(tmp_path, "allow_anonymous false", f"password_file {tmp_path}/passwords") as broker:
        check = check_broker(Broker(), await find_refusal(Broker(port=broker.port, version=version), NAME, TOPIC))
    assert (check.state, "`password_file`" in check.remedy) == ("bad", True), check


@pytest.mark.broker
async def test_one_whose_access_list_leaves_us_out(tmp_path) -> None:
    (tmp_path / "acl").write_text("topic readwrite other/#\n")
    async with configured(tmp_path, "allow_anonymous true", f"acl_file {tmp_path}/acl") as broker:
        check = check_broker(Broker(), await find_refusal(Broker(port=broker.port), NAME, TOPIC))
    assert TOPIC in check.finding
    assert "edge_server/README.md" in check.remedy


def test_a_port_where_nobody_listens() -> None:
    said = asyncio.run(find_refusal(Broker(port=free_port()), NAME, TOPIC))
    assert check_broker(Broker(), said).remedy == check_broker(Broker(), "Connection refused").remedy


def test_a_server_that_answers_nothing() -> None:
    """It takes the connection and stays silent, whichever version is spoken."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = asyncio.run(find_refusal(Broker(port=silent.getsockname()[1]), NAME, TOPIC, 0.2))
    assert check_broker(Broker(), said).remedy == check_broker(Broker(), "timed out").remedy


def test_an_address_that_swallows_what_is_sent_to_it() -> None:
    """A listener whose queue is full: the kernel drops what else would connect, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with socket.create_connection(address, 5):
            said = asyncio.run(find_refusal(Broker(port=address[1]), NAME, TOPIC, 0.2))
    assert check_broker(Broker(), said).remedy == check_broker(Broker(), "timed out").remedy


async def test_what_is_no_broker() -> None:
    """It answers, in a language of its own."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        outcome = await find_refusal(Broker(port=server.sockets[0].getsockname()[1]), NAME, TOPIC, 1.0)
    assert check_broker(Broker(), outcome).state == "bad"


@pytest.mark.broker
async def test_an_agent_that_is_connected_by_an_account_stays_so(tmp_path) -> None:
    """The broker puts the account in the place of the client id: whoever connects by it ends the one before."""
    site = Authority(tmp_path / "site")
    tls = site.issue("pi-03")
    (tmp_path / "state").mkdir()
    async with configured(tmp_path, *site.lines(), "use_username_as_clientid true") as place:
        at = Broker(port=place.port, tls=tls)
        data = Data(source="digits")
        config = AgentConfig(device="pi-03", state_dir=str(tmp_path / "state"), data=data, broker=at)

        def examined() -> list[Check]:
            return list(examine_broker(config))

        first, can = await asyncio.to_thread(examined)
        assert (first.state, can.state) == ("ok", "ok")
        assert names_all(can.finding, "QoS 1", "KiB")
        agent = MqttTransport(at, "lab.pi-03")
        with hold_lock(tmp_path / "state"):
            async with agent.running():
                await agent.connected.wait()
                [check] = await asyncio.to_thread(examined)
                assert check == check_broker(at, "", is_agents=True)
                link = await probe_link(config)
                assert {lack.lack for lack in link.absent.values()} == {"busy"}
                assert {lack.cause for lack in link.absent.values()} == {IN_USE}
                await agent.publish("a/word", b"still here")
                assert agent.connections == 1
            away = msgspec.structs.replace(config, broker=Broker(port=free_port(), tls=tls))
            assert [one.state for one in await asyncio.to_thread(lambda: list(examine_broker(away)))] == ["bad"]
        quick = Schedule(skipped_s=0.0, least_s=0.1, most_s=0.3)
        link = await probe_link(config, quick)
        assert IN_USE not in {lack.cause for lack in link.absent.values()}


@pytest.mark.parametrize("kind", ["free", "held", "another user's"])
def test_who_may_connect_is_asked_of_the_agents_lock_alone_where_there_is_an_account(tmp_path, kind) -> None:
    """Where an agent cannot begin meanwhile; a lock that may not be opened is taken for one that is held."""
    data, lock = Data(source="digits"), tmp_path / FOLDER_LOCK
    nobodys = AgentConfig(device="pi-03", state_dir=str(tmp_path), data=data)
    config = msgspec.structs.replace(nobodys, broker=Broker(user="pi-03"))
    with block_agent_connection(config) as alone:
        assert alone
    assert not lock.exists()
    if kind == "another user's":
        lock.mkdir()  # root may open any file
    agent = hold_lock(tmp_path) if kind == "held" else nullcontext()
    with agent, block_agent_connection(config) as alone, block_agent_connection(nobodys) as always:
        assert (alone, always) == (kind == "free", True)
    if kind == "free":
        lock.touch()
        with block_agent_connection(config) as alone:
            assert alone
            with pytest.raises(ConfigError, match=naming(tmp_path)), hold_lock(tmp_path):
                pass
