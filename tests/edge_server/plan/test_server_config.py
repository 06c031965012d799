"""A mistake in a server's file is one line: the file, the key, what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.config import load as load_agent
from edge_server.fleet.membership import devices_of_plan
from edge_server.plan.server_config import LinkConfig, ReadingsConfig, ServerConfig, load
from edge_server.rounds import check_plan
from shared.data.load import load as load_data
from shared.errors import ConfigError
from shared.transport.base import Broker
from tests.machine import configured
from tests.naming import naming

GATEWAY = Path(__file__).parents[3] / "deploy" / "gateway"


def write(folder, text, name="server.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_every_key_is_read_and_paths_start_at_the_file(tmp_path):
    """The file may be named from any folder."""
    text = """
        plan = "plans/one.toml"
        run = "first"
        data_dir = "d"
        data_root = "r"
        site = "hall-2"
        threads = 3
        log_level = "debug"
        [broker]
        host = "gateway"
        port = 8883
        version = 3
        keepalive_s = 5
        session_expiry_s = 7
        [link]
        frame_bytes = 4096
        window = 4
        budget = 9
        patience_s = 2.5
        [readings]
        keep_days = 1.5
        max_mb = 8
    """
    assert load(write(tmp_path, text)) == ServerConfig(
        plan=str(tmp_path / "plans/one.toml"),
        run="first",
        data_dir=str(tmp_path / "d"),
        data_root=str(tmp_path / "r"),
        site="hall-2",
        threads=3,
        log_level="debug",
        broker=Broker(host="gateway", port=8883, version=3, keepalive_s=5, session_expiry_s=7),
        link=LinkConfig(frame_bytes=4096, window=4, budget=9, patience_s=2.5),
        readings=ReadingsConfig(keep_days=1.5, max_mb=8),
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ("site",)),
        ('plan = "p"\nhots = 1', ("hots", "plan", "run")),
        ('plan = "p"\n[broker]\nhots = 1', ("broker", "hots")),
        ("plan = 5", ("plan",)),
        ('plan = "p"\n[broker]\nport = "x"', ("broker.port",)),
        ('plan = "p"\n[broker]\nversion = 4', ("broker.version", 4)),
        ('plan = "p"\nsite = "a/b"', ("site", "a/b")),
        ('plan = "p"\nsite = "a"\nrun = "../x"', ("run", "../x")),
        ('plan = "p"\nsite = "a"\nlog_level = "loud"', ("log_level", "loud", "debug", "info", "warning", "error")),
        ('plan = "p"\n[link]\nframe_bytes = 10', ("link", "frame_bytes", 1024)),
        ('plan = "p"\n[link]\nwindow = 0', ("link", "window", 1, 64)),
        ('plan = "p"\n[link]\nbudget = 0', ("link", "budget")),
        ('plan = "p"\n[link]\npatience_s = 0.0', ("link", "patience_s")),
        ('plan = "p"\n[link]\npatience_s = nan', ("link", "patience_s")),
        ('plan = "p"\n[readings]\nkeep_days = nan', ("readings", "keep_days")),
        ('plan = "p"\n[readings]\nmax_mb = 0', ("readings", "max_mb")),
        ('plan = "p"\nthreads = -1', ("threads", 1024)),
        ('plan = "p"\nthreads = 5000000000', ("threads", 1024)),
        ("plan = p", ("line 1",)),
    ],
)
def test_a_mistake_names_file_and_key(tmp_path, text, named):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=naming(path, *named)) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=naming(tmp_path / "nowhere.toml")):
        load(tmp_path / "nowhere.toml")


def test_the_sample_gateway_fits_together():
    """Server, plan and board as they are shipped: one site, a board that the plan names, data that its model takes."""
    server, board = load(GATEWAY / "server.toml"), load_agent(GATEWAY / "agent.toml")
    plan = check_plan.load(Path(server.plan), GATEWAY)
    assert (board.site, board.broker.port) == (server.site, server.broker.port)
    assert board.device in devices_of_plan(plan)
    assert len(devices_of_plan(plan)) == plan.cohort.min_devices == board.data.partition.parts == 2
    assert len(load_data(board.data))


@pytest.mark.broker
async def test_the_sample_brokers_lines_are_taken(tmp_path):
    """By mosquitto itself; only the port is the test's own."""
    lines = [line for line in (GATEWAY / "mosquitto.conf").read_text().splitlines() if not line.startswith("listener")]
    async with configured(tmp_path, *lines) as broker:
        assert broker.process.returncode is None
