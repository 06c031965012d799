"""A server's peers fit its plan, or are refused with what to edit."""

from __future__ import annotations

import asyncio
import hashlib
import json
from base64 import b64encode

import msgspec
import pytest

from edge_server.plan.plan import Plan
from edge_server.plan.server_config import PeerConfig, ServerConfig, load
from edge_server.sites.link import SitePresence
from edge_server.sites.neighbours import compute_allowance, require_peers
from edge_server.trial.peers import members_of
from shared.errors import ConfigError, Unreachable
from shared.protocol import wire
from shared.protocol.peers import Hello
from shared.protocol.topics import peer_topic
from shared.transport.base import Broker
from shared.transport.login import read_login
from shared.transport.mqtt import MqttTransport
from tests.machine import configured
from tests.naming import naming


def written(folder, **keys):
    path = folder / "server.json"
    path.write_text(json.dumps({"plan": "plan.toml", "site": "roof", **keys}))
    return path


def test_peers_have_brokers_of_their_own(tmp_path):
    peers = [{"site": "barn", "broker": {"host": "barn.local", "port": 1884}}]
    [peer] = load(written(tmp_path, peer=peers)).peer
    assert (peer.site, peer.broker.host, peer.broker.port) == ("barn", "barn.local", 1884)


@pytest.mark.parametrize(
    ("peers", "named"),
    [
        ([{"site": "roof"}], ("peer.site", "roof")),
        ([{"site": "barn"}, {"site": "barn"}], ("peer.site", "barn")),
        ([{"site": "../barn"}], ("peer.site", "../barn")),
        ([{"site": "barn", "password_file": "x"}], ("peer[0]", "password_file", "user")),
    ],
)
def test_peers_that_are_none(tmp_path, peers, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        load(written(tmp_path, peer=peers))


def planned(**more) -> Plan:
    keys = {"name": "x", "rounds": 2, "algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}, **more}
    keys |= {"sites": {"clusters": {"roof": ["a", "c"], "barn": ["b"]}}, "device": [{"name": one} for one in "abc"]}
    return msgspec.convert(keys, Plan)


@pytest.mark.parametrize(
    ("site", "peers", "named"),
    [
        ("shed", ["barn"], ("site", "shed", "x", "roof, barn")),
        ("roof", ["barn", "shed"], ("peer.site", "shed")),
        ("roof", [], ("[[peer]]", "barn")),
    ],
)
def test_peers_that_the_plan_does_not_have(site, peers, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        require_peers(planned(), site, peers)


def test_a_site_has_its_own_devices_and_its_share_of_the_joules():
    plan = planned(budget={"joules": 30.0})
    config = ServerConfig(plan="x", site="roof", peer=[PeerConfig(site="barn")])
    assert members_of(config, plan) == {"a", "c"}
    assert compute_allowance(plan, "roof") == 20.0
    assert compute_allowance(plan, "barn") == 10.0


@pytest.mark.parametrize("within", [False, True])
def test_a_login_is_read_when_it_is_needed(tmp_path, within):
    """Its path starts at the server's file; the password is in nobody's repr. Older files have it beside `broker`."""
    told = {"user": "roof", "password_file": "barn.password"}
    [peer] = load(written(tmp_path, peer=[{"site": "barn", **({"broker": told} if within else told)}])).peer
    with pytest.raises(Unreachable, match=r"barn\.password"):
        read_login(peer.broker)
    (tmp_path / "barn.password").write_text("pass\n")
    login = read_login(peer.broker)
    assert (login.user, login.password) == ("roof", "pass")
    assert "pass" not in repr(login)
    assert read_login(PeerConfig(site="barn").broker) is None


def test_two_logins_of_a_peer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=naming("user", "[peer.broker]")):
        load(written(tmp_path, peer=[{"site": "barn", "user": "roof", "broker": {"user": "attic"}}]))


def hashed(password: str) -> str:
    """Return a password as mosquitto keeps it."""
    salt, turns = b"0123456789ab", 101
    key = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, turns, 64)
    return f"$7${turns}${b64encode(salt).decode()}${b64encode(key).decode()}"


@pytest.mark.broker
def test_one_line_of_the_access_list_lets_a_peer_in_and_confines_it(tmp_path):
    """It logs in, is born, says and hears what is its own, and is denied the topics of others."""
    (tmp_path / "passwords").write_text(f"roof:{hashed('pass')}\nbarn:{hashed('own')}\n")
    lines = ["user barn", "topic readwrite fieldfleet/v1/barn/#", "user roof"]
    lines += ["topic readwrite fieldfleet/v1/barn/_peer-roof/#", ""]
    (tmp_path / "acl").write_text("\n".join(lines))
    settings = ["allow_anonymous false", f"password_file {tmp_path}/passwords", f"acl_file {tmp_path}/acl"]
    births = SitePresence("roof", "barn", "run-1", "f00d", b"{}")

    def known(user: str, password: str, port: int) -> Broker:
        (tmp_path / user).write_text(password)
        return Broker(port=port, user=user, password_file=str(tmp_path / user))

    async def story() -> None:
        async with configured(tmp_path, *settings) as real:
            barn = MqttTransport(known("barn", "own", real.port), "barn._peers")
            roof = MqttTransport(known("roof", "pass", real.port), "barn._peer-roof", births.presence)
            async with barn.running(), roof.running(), asyncio.timeout(60):
                await barn.connected.wait()
                await roof.connected.wait()
                async with barn.subscribe(peer_topic("barn", "roof", "status")) as inbox:
                    assert wire.decode_as(Hello, (await anext(inbox))[1]).online
                async with roof.subscribe(peer_topic("barn", "roof", "gossiped")) as inbox:
                    await barn.publish(peer_topic("barn", "roof", "gossiped"), b"word")
                    assert (await anext(inbox))[1] == b"word"
                with pytest.raises(Unreachable, match=naming(peer_topic("barn", "shed", "gossip"))):
                    await roof.publish(peer_topic("barn", "shed", "gossip"), b"in another's name")

    asyncio.run(story())
