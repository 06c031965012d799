"""A server warns of a broker that anybody on the network may use, and of no other."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.fleet.broker import describe_exposure
from edge_server.plan.server_config import ServerConfig
from edge_server.rounds.check_plan import load
from edge_server.trial import live
from shared.transport.base import Broker
from shared.transport.tls import Tls
from tests.edge_server.harness import write_plan

PAIR = Tls(ca="ca", cert="c", key="k")


@pytest.mark.parametrize(
    ("broker", "told"),
    [
        (Broker(), ""),
        (Broker(host="localhost"), ""),
        (Broker(host="::1"), ""),
        (Broker(host="10.0.0.7", tls=PAIR), ""),
        (Broker(host="10.0.0.7", tls=Tls(ca="ca"), user="roof"), ""),
        (Broker(host="10.0.0.7"), "open to whoever reaches it"),
        (Broker(host="gateway.local"), "open to whoever reaches it"),
        (Broker(host="gateway.local", user="roof"), "unencrypted"),
        (Broker(host="gateway.local", tls=Tls(ca="ca")), "lets anybody in"),
    ],
)
def test_what_is_said_of_a_broker(broker, told):
    found = describe_exposure(broker)
    assert told in found
    assert bool(found) is bool(told)


def test_a_server_says_it(tmp_path, monkeypatch, caplog):
    def stop(*_):
        raise KeyError("far enough")

    monkeypatch.setattr(live, "open_history", stop)
    plan = load(write_plan(tmp_path, rounds=1), tmp_path)
    config = ServerConfig(plan="", data_dir=str(tmp_path), broker=Broker(host="10.0.0.7"))
    with pytest.raises(KeyError):
        asyncio.run(live.serve(config, plan, "run"))
    assert "open to whoever reaches it" in caplog.text
