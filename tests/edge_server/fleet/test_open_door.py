"""A server warns of a broker that anybody on the network may use, and of no other."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.fleet.broker import describe_exposure
from edge_server.plan.server_config import ServerConfig
from edge_server.rounds.check_plan import load
from edge_server.trial import live
from shared.transport.base import Broker
from shared.transport.tls import TlsSettings
from tests.edge_server.harness import write_plan
from tests.naming import log_messages, names_all

PAIR = TlsSettings(ca="ca", cert="c", key="k")


@pytest.mark.parametrize(
    ("broker", "is_exposed"),
    [
        (Broker(), False),
        (Broker(host="localhost"), False),
        (Broker(host="::1"), False),
        (Broker(host="10.0.0.7", tls=PAIR), False),
        (Broker(host="10.0.0.7", tls=TlsSettings(ca="ca"), user="roof"), False),
        (Broker(host="10.0.0.7"), True),
        (Broker(host="gateway.local"), True),
        (Broker(host="gateway.local", user="roof"), True),
        (Broker(host="gateway.local", tls=TlsSettings(ca="ca")), True),
    ],
)
def test_an_exposed_broker_is_described_by_its_address(broker, is_exposed):
    warning = describe_exposure(broker)
    assert names_all(warning, f"{broker.host}:{broker.port}") if is_exposed else not warning


def test_each_kind_of_exposure_has_its_own_description():
    exposed = (Broker(host="h"), Broker(host="h", user="roof"), Broker(host="h", tls=TlsSettings(ca="ca")))
    assert len({describe_exposure(broker) for broker in exposed}) == len(exposed)


def test_a_server_says_it(tmp_path, monkeypatch, caplog):
    def stop(*_):
        raise KeyError("far enough")

    monkeypatch.setattr(live, "open_history", stop)
    plan = load(write_plan(tmp_path, rounds=1), tmp_path)
    config = ServerConfig(plan="", data_dir=str(tmp_path), broker=Broker(host="10.0.0.7"))
    with pytest.raises(KeyError):
        asyncio.run(live.serve(config, plan, "run"))
    assert len(log_messages(caplog, "10.0.0.7", level="WARNING")) == 1
