"""`edge-server rollout` from the command line: over a real broker, and what it says of journals without one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from edge_server.fleet import broker
from edge_server.journal.rollouts.file import BoardReported, PartsSent, RolloutEnded, RolloutPlan, WaveOpened
from edge_server.release.rollout import drive
from edge_server.release.rollout.orders import LoadedRollout, begin_rollout, open_rollout
from edge_server.report.page import render_page
from edge_server.report.summarise import digest_run
from shared.protocol.inference.rollout import ModelStatus
from shared.runtime.folder_lock import hold_lock
from shared.runtime.text_table import table_lines
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.edge_server.processes import captured
from tests.edge_server.release.boards import SITE, FieldBoard, make_release
from tests.edge_server.report.journals import small
from tests.machine import free_port
from tests.naming import names_all

AT = "20260101T000000Z"
TERMS = RolloutPlan(deployment="", release="", sha256="", soak_s=0.0)
LAYERS = {"layer0": b"\1" * 5000, "layer1": b"\2" * 5000}


@contextmanager
def a_site(folder: Path, count: int) -> Iterator[Path]:
    """Run a broker and boards in a thread of their own; yield the server's file."""
    folder.mkdir()
    ready, over, ports = threading.Event(), threading.Event(), list[int]()

    async def live() -> None:
        async with AsyncExitStack() as stack:
            ports.append((await stack.enter_async_context(broker.run_private_broker(folder))).port)
            boards = []
            for number in range(count):
                name = f"pi-{number}"
                transport = MqttTransport(Broker(port=ports[0]), f"{SITE}.{name}")
                await stack.enter_async_context(transport.running())
                await transport.connected.wait()
                boards.append(FieldBoard(name, transport, folder / name))
                boards[-1].rule = lambda manifest: "finite: NaN in layer1" if manifest.version == 2 else ""
                await boards[-1].switch_on()
            ready.set()
            await asyncio.to_thread(over.wait)
            for board in boards:
                await board.switch_off()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert ready.wait(300)
        config = folder / "server.json"
        told = {"plan": "p", "site": SITE, "data_dir": str(folder / "runs"), "broker": {"port": ports[0]}}
        config.write_text(json.dumps(told))
        yield config
    finally:
        over.set()
        thread.join(300)


@pytest.mark.broker
def test_a_good_release_reaches_all_and_a_bad_one_stops_at_the_first_board(tmp_path):
    with a_site(tmp_path / "site", 3) as config:
        data_dir = config.parent / "runs"
        make_release(data_dir, LAYERS)
        start = ("rollout", "start", "net", "--config", config, "--soak", "0s", "--waves", "100%")
        good = captured(*start)
        assert good.code == 0, good
        assert names_all(good.out, "net/1", "finished", 3), good
        make_release(data_dir, {**LAYERS, "layer1": b"\3" * 5000})
        bad = captured(*start, "--on-failure", "back", "--format", "json")
        found = json.loads(bad.out)
        assert (bad.code, found["state"], [one["device"] for one in found["boards"]]) == (1, "taken-back", ["pi-0"])
        assert found["boards"][0]["reason"] == "finite: NaN in layer1"
        shown = captured("devices", "--config", config, "--format", "json")
        models = {one["device"]: one["models"][0] for one in json.loads(shown.out)["devices"]}
        assert {name: one["committed"] for name, one in models.items()} == {"pi-0": 1, "pi-1": 1, "pi-2": 1}
        assert models["pi-0"]["state"] == "refused"
        assert names_all(captured("devices", "--config", config).out, "net/1", "2 refused")
    refused = captured("release", "delete", "net/1", "--data-dir", data_dir)
    assert refused.code == 2
    assert "pi-0, pi-1, pi-2" in refused.err
    assert captured("release", "delete", "net/2", "--data-dir", data_dir).code == 0
    assert captured("release", "delete", "net/1", "--data-dir", data_dir, "--force").code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--min-rate", "0"),
        ("--min-rate", "nan"),
        ("--max-drop", "7"),
        ("--max-drop", "much"),
        ("--max-latency-ms", "-3"),
        ("--max-latency-ms", "inf"),
    ],
)
def test_a_figure_out_of_range_is_refused_by_the_name_of_its_option(option, value):
    ended = captured("rollout", "start", "net", option, value)
    assert ended.code == 2
    assert names_all(ended.err, f"argument {option}", repr(value))


@pytest.mark.broker
def test_a_site_without_boards_is_waited_for_no_longer_than_told(tmp_path):
    with a_site(tmp_path / "site", 0) as config:
        make_release(config.parent / "runs", LAYERS)
        start = ("rollout", "start", "net", "--config", config)
        ended = captured(*start, "--wait", "0s")
        assert ended.code == 1
        assert names_all(ended.err, "agent.toml", "[serve]")
        assert names_all(ended.out, "net/1", "stopped", "0 s", "[serve]")
        assert captured(*start, "--wait", "0s", "--min-rate", "0").code == 2
        assert captured("rollout", "resume", "--config", config, "--wait", "0s").code == 1


@pytest.fixture
def known(tmp_path) -> LoadedRollout:
    """A rollout of which one board has committed the release, another refused it, a third is away."""
    found = begin_rollout(tmp_path, make_release(tmp_path, LAYERS), TERMS)
    name = found.state.plan.deployment
    said = ModelStatus(name="net", candidate=1, deployment=name)
    done = msgspec.structs.replace(said, committed=1, state="committed")
    no = msgspec.structs.replace(said, state="refused", reason="latency: 95 % of its answers took up to 41.20 ms")
    found.journal.append(
        WaveOpened(at=AT, devices={"pi-in-the-far-corner": "raspberry-pi-4b"}, canary=True),
        PartsSent(at=AT, devices=("pi-in-the-far-corner",), size=11_000, sent=11_100),
        BoardReported(at=AT, device="pi-in-the-far-corner", status=done),
        WaveOpened(at=AT, devices={"jetson-1": "nvidia-orin-nano-8gb"}),
        BoardReported(at=AT, device="jetson-1", status=no),
    )
    return open_rollout(tmp_path)


def test_status_shows_progress_and_causes_in_eighty_columns(known, tmp_path):
    from edge_server.release.rollout import tables  # noqa: PLC0415

    shown = captured("rollout", "status", "--data-dir", tmp_path)
    assert shown.code == 0, "it is under way"
    assert names_all(shown.out, 1, 2, "11.1 kB")
    lines = table_lines(tables.boards_table(known.state), 80)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "1 canary" in text
    assert "refused" in text
    data = json.loads(captured("rollout", "status", "--data-dir", tmp_path, "--format", "json").out)
    assert data["counts"] == {"committed": 1, "failed": 1}
    assert [one["wave"] for one in data["boards"]] == [1, 2]


def test_pause_needs_nobody_and_a_rollout_that_is_over_takes_no_order(known, tmp_path):
    assert captured("rollout", "pause", "--data-dir", tmp_path).code == 0
    assert open_rollout(tmp_path).state.mode == "paused"
    known.journal.append(RolloutEnded(at=AT, outcome="finished"))
    assert captured("rollout", "pause", "--data-dir", tmp_path).code == 2
    assert captured("rollout", "status", "--data-dir", tmp_path).code == 0
    known.journal.append(RolloutEnded(at=AT, outcome="stopped"))
    assert captured("rollout", "status", "--data-dir", tmp_path).code == 1


def test_orders_go_to_the_process_that_drives_it(known, tmp_path):
    with hold_lock(known.journal.path.parent):
        ordered = captured("rollout", "back", "--data-dir", tmp_path)
    assert ordered.code == 0
    assert open_rollout(tmp_path).state.mode == "going-back"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("status",), ("rollouts", "edge-server rollout start")),
        (("status", "0007-no"), ("rollouts", "0007-no")),
        (("start", "net"), ("releases", "net")),
        (("resume",), ("rollouts", "edge-server rollout start")),
    ],
)
def test_a_rollout_or_release_that_does_not_exist_is_named(tmp_path, words, named):
    ended = captured("rollout", *words, "--data-dir", tmp_path, "--config", _file(tmp_path, 1))
    assert ended.code == 2
    assert names_all(ended.err, tmp_path, *named)


@pytest.mark.parametrize(
    "words",
    [
        ("--waves", "50%,10%"),
        ("--waves", "0%"),
        ("--waves", "120%"),
        ("--waves", "all"),
        ("--soak", "ten"),
        ("--canary", "-1"),
        ("--max-failures", "0"),
        ("--max-drop", "-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, words):
    make_release(tmp_path, LAYERS)
    ended = captured("rollout", "start", "net", "--data-dir", tmp_path, "--config", _file(tmp_path, 1), *words)
    assert ended.code == 2
    assert not (tmp_path / "rollouts").exists()


def test_a_server_without_a_broker_begins_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "CONNECT_S", 0.2)
    make_release(tmp_path, LAYERS)
    port = free_port()
    ended = captured("rollout", "start", "net", "--data-dir", tmp_path, "--config", _file(tmp_path, port))
    assert ended.code == 1
    assert names_all(ended.err, f"127.0.0.1:{port}")
    assert captured("rollout", "status", "--data-dir", tmp_path).code == 2


def test_a_rollout_needs_the_file_of_its_server(tmp_path):
    make_release(tmp_path, LAYERS)
    ended = captured("rollout", "start", "net", "--data-dir", tmp_path)
    assert ended.code == 2
    assert "--config" in ended.err


def test_a_release_is_rolled_out_although_its_run_is_deleted(tmp_path):
    """A release holds all that it needs: there never was a folder of its run here."""
    stored = make_release(tmp_path, LAYERS)
    assert not (tmp_path / stored.manifest.source.run).exists()
    assert begin_rollout(tmp_path, stored, TERMS).state.plan.run == stored.manifest.source.run


def test_the_report_shows_who_serves_what(known):
    text = render_page([digest_run(small())], (), [known.state])
    reason = "latency: 95 % of its answers"
    assert names_all(text, "0001-net-1", reason)
    without = render_page([digest_run(small())])
    assert "0001-net-1" not in without
    assert reason not in without


def _file(folder: Path, port: int) -> Path:
    config = folder / "server.json"
    config.write_text(json.dumps({"plan": "p", "site": SITE, "broker": {"port": port}}))
    return config
