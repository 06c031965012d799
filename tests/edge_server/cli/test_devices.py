"""`edge-server devices` from the broker, from the history, and from neither."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess  # noqa: TID251 - the command as a user runs it
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from edge_server.fleet import broker
from edge_server.fleet.view import watch_site
from edge_server.gateway.enrolment.accounts import SiteAccount
from edge_server.gateway.state import SiteState, write_state
from edge_server.journal.report_history import FILE, ReportHistory, StoredReport, latest_reports
from edge_server.journal.sqlite import JOURNAL, readable_records
from shared.protocol import wire
from shared.protocol.measurements import Absent
from shared.protocol.messages import Report, Status
from shared.protocol.topics import topic
from shared.runtime.clock import utc_seconds
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.mqtt_connection import Connection, Incoming
from shared.transport.tcp_info import Traffic
from tests.device_agent.sources import report
from tests.edge_server.processes import ROOT, Ended, captured
from tests.machine import free_port
from tests.naming import names_all

SITE = "hall"


@pytest.fixture(autouse=True)
def _wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def run(*words: object) -> Ended:
    return captured("devices", *words)


def kept(folder: Path, *reports: Report, age_s: float = 60.0) -> None:
    """Leave a history."""
    readings, now = ReportHistory(folder, 14, 1 << 20), utc_seconds()
    for number, one in enumerate(reports):
        readings.write([StoredReport(now - age_s + number, one)])
    readings.close()


@contextmanager
def a_site(folder: Path) -> Iterator[Path]:
    """Run a broker that has retained a device that is here and one that is gone; yield the server's file."""
    folder.mkdir()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            port = runner.run(_publish(stack, folder))
            config = folder / "server.json"
            config.write_text(
                json.dumps({"plan": "p", "site": SITE, "data_dir": str(folder / "runs"), "broker": {"port": port}})
            )
            yield config
        finally:
            runner.run(stack.aclose())


async def _publish(stack: AsyncExitStack, folder: Path) -> int:
    port = (await stack.enter_async_context(broker.run_private_broker(folder))).port
    transport = await stack.enter_async_context(MqttTransport(Broker(port=port), "publisher").running())
    await transport.connected.wait()
    here, gone = (
        report(Random(1), 100.0, "here"),
        Report(device="gone", at=1.0, absent={"power": Absent(lack="denied")}),
    )
    statuses = (Status(device=one.device, session=1, instance=one.instance, online=one is here) for one in (here, gone))
    for message, channel in ((here, "report"), (gone, "report"), *((status, "status") for status in statuses)):
        await transport.publish(topic(SITE, message.device, channel), wire.encode(message), retain=True)
    await transport.publish(topic(SITE, "noise", "report"), b"\xff" * 100, retain=True)
    await transport.publish(topic("other", "far", "report"), wire.encode(Report(device="far", at=1.0)), retain=True)
    return port


@pytest.mark.broker
def test_the_fleet_as_the_broker_has_it(tmp_path):
    """As JSON with every unit, as a table with marks and absences; noise and other sites are not devices."""
    with a_site(tmp_path / "site") as config:
        code, out, _ = run("--config", config, "--format", "json")
        gone, here = json.loads(out)["devices"]
        assert code == 0
        assert (here["device"], here["online"], here["board"]) == ("here", True, "nvidia-orin-nano-8gb")
        assert here["readings"]["power.total_watts"]["quality"] == "corrected"
        assert here["spent"]["cost"]["compute_joules"] == 31.25
        assert (gone["device"], gone["online"], gone["age_s"]) == ("gone", False, None)
        assert gone["absent"] == {"power": {"lack": "denied"}}
        kept(config.parent / "runs", report(Random(1), 100.0, "here"), age_s=60)
        code, out, _ = run("--config", config)
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        assert code == 0
        assert "yes" in lines["here"]
        assert "4.5/0.5  31.2/-" in lines["here"]
        assert re.search(r" (\d+ s|\d+ min)$", lines["here"].rstrip())
        assert "- denied" in lines["gone"]
        watts = report(Random(1), 100.0, "here").readings["power.total_watts"].value
        assert f" {watts:.2f}~ " in lines["here"]
        config.write_text(json.dumps({**json.loads(config.read_text()), "gateway": "."}))
        for denied in (False, True):  # the birth of who was revoked is retained still
            write_state(config.parent, SiteState(site=SITE, accounts={"here": SiteAccount(denied=denied)}))
            code, out, _ = run("--config", config, "--format", "json")
            assert [one["online"] for one in json.loads(out)["devices"]] == [False, not denied]


@pytest.mark.broker
def test_a_device_that_is_gone_for_good_is_forgotten(tmp_path):
    """By the broker and by the history; one that is connected is not, except where it is revoked."""
    with a_site(tmp_path / "site") as config:
        kept(config.parent / "runs", *(report(Random(1), 100.0, name) for name in ("here", "gone", "long-gone")))

        def listed() -> list[str]:
            out = run("--config", config, "--format", "json")[1]
            return [one["device"] for one in json.loads(out)["devices"]]

        assert listed() == ["gone", "here", "long-gone"]
        code, out, _ = run("forget", "gone", "--config", config)
        assert code == 0
        assert names_all(out, "gone", 1, 2)
        code, out, _ = run("forget", "long-gone", "--data-dir", config.parent / "runs")
        assert code == 0
        assert names_all(out, "long-gone", 1, 0)
        code, _, err = run("forget", "here", "--config", config)
        assert code == 2
        assert names_all(err, "here")
        assert listed() == ["here"]
        config.write_text(json.dumps({**json.loads(config.read_text()), "gateway": "."}))
        write_state(config.parent, SiteState(site=SITE, accounts={"here": SiteAccount(denied=True)}))
        assert run("forget", "here", "--config", config)[0] == 0
        assert listed() == []
        for words in (("forget",), ("forget", "nobody", "--config", config), ("forget", "../x", "--config", config)):
            assert run(*words)[0] == 2


@pytest.mark.broker
async def test_a_look_hears_what_comes_and_leaves_nothing_behind(tmp_path):
    """A report made meanwhile has a time; the broker keeps no session of a client that will not come again."""
    async with AsyncExitStack() as stack, asyncio.timeout(300):
        port = await _publish(stack, tmp_path)
        publisher = await stack.enter_async_context(MqttTransport(Broker(port=port), "board").running())
        await publisher.connected.wait()
        for version in (5, 3):
            async with watch_site(Broker(port=port, version=version), SITE) as look:
                assert look.fleet.online == ("here",)
                assert look.heard_now == {}
                news = report(Random(2), 130.0 - version, "here")
                await publisher.publish(topic(SITE, "here", "report"), wire.encode(news), retain=True)
                while "here" not in look.heard_now:  # noqa: ASYNC110 - a look has no reader that waits
                    await asyncio.sleep(0.01)
                assert look.fleet.reports["here"] == news


async def test_a_client_without_a_session_is_clean_in_the_older_version_too():
    """3.1.1 has no expiry: what asks for no session must not leave a queue that nobody will empty."""
    brokers = (Broker(version=3, session_expiry_s=0), Broker(version=3, session_expiry_s=60))
    assert [
        Connection(one, "x", None, Incoming(lambda *_: None, Traffic())).client._clean_session for one in brokers
    ] == [True, False]


def test_a_history_is_shown_where_no_broker_answers(tmp_path, monkeypatch):
    """With a word on it; where there is none either, that is the error."""
    keys = {"plan": "p", "site": "lab", "data_dir": str(tmp_path / "runs"), "broker": {"port": free_port()}}
    (tmp_path / "server.json").write_text(json.dumps(keys))
    monkeypatch.setattr("edge_server.fleet.view.CONNECT_S", 0.3)
    code, out, err = run("--config", tmp_path / "server.json")
    assert (code, out) == (1, "")
    address = f"127.0.0.1:{keys['broker']['port']}"
    assert names_all(err, address)
    kept(tmp_path / "runs", report(Random(1), 1.0))
    code, out, err = run("--config", tmp_path / "server.json")
    assert code == 0
    assert names_all(err, address)
    assert "orin" in out


def test_all_of_one_device_and_a_plot(tmp_path):
    """Value, uncertainty, quality and source; absences with their cause; facts; a line of bars."""
    kept(tmp_path, *(report(Random(number), 100.0 + number) for number in range(50)))
    code, out, _ = run("orin", "--data-dir", tmp_path, "--plot", "power.total_watts", "--hours", 1)
    assert code == 0
    last = report(Random(49), 149.0).readings["power.total_watts"]
    [line] = [line.split() for line in out.splitlines() if line.startswith("power.total_watts ")]
    assert line[1:6] == [f"{last.value:.4g}", "W", f"{last.uncertainty:.4g}", "W", "corrected"]
    assert names_all(out, "no wireless interface", "governor", "schedutil")
    assert names_all(out.partition("power.total_watts, ")[2], 60, 50)
    code, out, _ = run("orin", "--data-dir", tmp_path, "--plot", "power.total_watts", "--format", "json")
    assert len(json.loads(out)["history"]) == 50


def test_what_a_device_says_is_no_markup_and_moves_no_cursor(tmp_path):
    """A name or text from the wire is shown as it is."""
    kept(tmp_path, Report(device="pi", at=1.0, board="[red]x\x1b[2J", facts={"[b]": "[/nothing]\x1b[2J"}))
    code, out, _ = run("pi", "--data-dir", tmp_path)
    assert code == 0
    assert "[red]x?[2J" in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--data-dir", "nowhere"], ("nowhere", "data_dir")),
        (["nobody"], ("nobody", "orin")),
        (["orn"], ("orn", "orin")),
        (["--plot", "x"], ("--plot", "DEVICE")),
        (["orin", "--plot", "power.total_wats"], ("power.total_wats", "power.total_watts")),
        (["--watch", "0"], ("--watch",)),
        (["--watch", "nan"], ("--watch",)),
        (["orin", "--plot", "x", "--hours", "-1"], ("--hours",)),
        (["--config", "nowhere.toml"], ("nowhere.toml",)),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, words, named):
    kept(tmp_path / "runs", report(Random(1), 1.0))
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert names_all(err, *named)
    assert err.count("\n") == 1


def test_watching_goes_on_until_it_is_interrupted(tmp_path):
    """One line of JSON each time; Ctrl-C ends it with 130."""
    kept(tmp_path, report(Random(1), 1.0))
    words = ["-m", "edge_server", "devices", "--data-dir", str(tmp_path), "--watch", "0.05", "--format", "json"]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:  # noqa: S603
        seen = [json.loads(watch.stdout.readline())["devices"][0]["age_s"] for _ in range(3)]
        watch.send_signal(2)
        assert watch.wait(300) == 130
    assert seen == sorted(seen)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"


def test_a_history_of_views_without_end_is_refused(tmp_path):
    """A file of somebody else's: the command hung, and so did a server that was to write there."""
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        columns = "'d' || i AS device, i AS seq, 0.0 AS heard_utc_s, -1 AS template, x'' AS body"
        connection.executescript(f"CREATE VIEW reports AS {ENDLESS} {columns} FROM n")
    command = [sys.executable, "-m", "edge_server", "devices", "--data-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)  # noqa: S603 - ours
    assert ended.returncode == 1
    assert names_all(ended.stderr.decode(), tmp_path / FILE, "table of reports")
    assert ended.stderr.count(b"\n") == 1
    kept(tmp_path, report(Random(1), 100.0, "here"))
    assert list(latest_reports(tmp_path / FILE)) == ["here"]


def test_a_journal_that_is_a_view_without_end_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL)) as connection:
        connection.executescript(f"CREATE VIEW records AS {ENDLESS} i AS seq, '' AS body, 0 AS mark FROM n")
    assert not readable_records(tmp_path / "run")
