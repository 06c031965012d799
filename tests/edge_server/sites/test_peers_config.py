"""A server's peers fit its plan, or are refused with what to edit."""

from __future__ import annotations

import json

import msgspec
import pytest

from edge_server.plan.plan import Plan
from edge_server.plan.server_config import PeerConfig, ServerConfig, load
from edge_server.sites.neighbours import allowance_of, require_peers
from edge_server.trial.peers import members_of
from shared.errors import ConfigError


def written(folder, **keys):
    path = folder / "server.json"
    path.write_text(json.dumps({"plan": "plan.toml", "site": "roof", **keys}))
    return path


def test_peers_have_brokers_of_their_own(tmp_path):
    peers = [{"site": "barn", "broker": {"host": "barn.local", "port": 1884}}]
    [peer] = load(written(tmp_path, peer=peers)).peer
    assert (peer.site, peer.broker.host, peer.broker.port) == ("barn", "barn.local", 1884)


@pytest.mark.parametrize(
    ("peers", "wrong"),
    [
        ([{"site": "roof"}], "'roof' is this very site"),
        ([{"site": "barn"}, {"site": "barn"}], "'barn' stands there twice"),
        ([{"site": "../barn"}], r"peer.site '../barn'"),
    ],
)
def test_peers_that_are_none(tmp_path, peers, wrong):
    with pytest.raises(ConfigError, match=wrong):
        load(written(tmp_path, peer=peers))


def planned(**more) -> Plan:
    keys = {"name": "x", "rounds": 2, "algorithm": {"name": "fedavg"}, "model": {"name": "mlp"}, **more}
    keys |= {"sites": {"clusters": {"roof": ["a", "c"], "barn": ["b"]}}, "device": [{"name": one} for one in "abc"]}
    return msgspec.convert(keys, Plan)


@pytest.mark.parametrize(
    ("site", "peers", "wrong"),
    [
        ("shed", ["barn"], "site: 'shed': plan 'x' has the sites roof, barn"),
        ("roof", ["barn", "shed"], "peer.site: 'shed'"),
        ("roof", [], r"no \[\[peer\]\] with site = 'barn'"),
    ],
)
def test_peers_that_the_plan_does_not_have(site, peers, wrong):
    with pytest.raises(ConfigError, match=wrong):
        require_peers(planned(), site, peers)


def test_a_site_has_its_own_devices_and_its_share_of_the_joules():
    plan = planned(budget={"joules": 30.0})
    config = ServerConfig(plan="x", site="roof", peer=[PeerConfig(site="barn")])
    assert members_of(config, plan) == {"a", "c"}
    assert allowance_of(plan, "roof") == 20.0
    assert allowance_of(plan, "barn") == 10.0
