"""Reports on their way into the history: nothing that happens to it is felt by a run."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from edge_server.fleet import history
from edge_server.fleet.history import BATCH_S, MAX_DEVICES, HistoryWriter
from edge_server.fleet.hub import Server
from edge_server.journal.report_history import FILE, ReportHistory, latest_reports, reading_history
from shared.protocol import wire
from shared.protocol.messages import Report, Status
from shared.protocol.topics import topic
from shared.runtime.executor import inline
from shared.transport.memory import MemoryTransport
from tests.device_agent.sources import report
from tests.edge_server.harness import SITE

pytestmark = pytest.mark.virtual_time

NAME = "power.total_watts"


def kept_by(folder) -> HistoryWriter:
    return HistoryWriter(
        ReportHistory(folder, 14, 1 << 20), inline, calendar=lambda: 1e9 + asyncio.get_running_loop().time()
    )


async def test_what_a_server_hears_is_kept_with_the_time_it_was_heard(tmp_path):
    """Once, however often the broker repeats it; what is heard last is written as the server ends."""
    broker, kept = MemoryTransport(), kept_by(tmp_path)
    server = Server(SITE, broker, asyncio.get_running_loop().time, inline)
    server.presence.report_listeners.append(kept.hear)

    async def say(message: Report | Status, channel: str = "report") -> None:
        await broker.publish(topic(SITE, "orin", channel), wire.encode(message), retain=True)

    first, second = report(Random(1), 100.0), report(Random(2), 130.0)
    await say(Status(device="orin", session=1, instance=first.instance, online=True), "status")
    async with kept.running(), server.listening():
        await say(first)
        await asyncio.sleep(30)
        await say(first)
        await say(second)
        await say(report(Random(3), 160.0, instance="superseded"))
        await asyncio.sleep(1)
    assert [at for at, _ in reading_history(tmp_path / FILE, "orin", NAME)] == [1e9, 1e9 + 30]
    assert latest_reports(tmp_path / FILE)["orin"].report == second


async def test_of_a_device_that_reports_all_the_time_one_report_a_batch_is_kept(tmp_path):
    """The last; and of ten thousand names that one client may invent, no more than a site can have."""
    kept = kept_by(tmp_path)
    async with kept.running():
        for number in range(1000):
            kept.hear(report(Random(0), float(number)))
            await asyncio.sleep(BATCH_S / 100)
    assert 9 <= len(reading_history(tmp_path / FILE, "orin", NAME)) <= 11
    assert latest_reports(tmp_path / FILE)["orin"].report.at == 999.0
    for number in range(3 * MAX_DEVICES):
        kept.hear(Report(device=f"d{number}", at=1.0))
    await kept.write()
    assert len(latest_reports(tmp_path / FILE)) <= MAX_DEVICES + 1
    kept.readings.close()


async def test_a_full_disk_is_said_once_and_stops_nothing(disk, caplog):
    """What came meanwhile is not kept; what comes when there is room again is."""
    caplog.set_level("INFO")
    kept = kept_by(disk.path / "site")
    async with kept.running():
        disk.fill()
        for number in range(20):
            kept.hear(report(Random(0), float(number)))
            await asyncio.sleep(BATCH_S)
        disk.make_room()
        await asyncio.sleep(BATCH_S)
        kept.hear(report(Random(0), 100.0))
        await asyncio.sleep(2 * BATCH_S)
        kept.hear(report(Random(0), 101.0))
    assert [one.at for _, one in reading_history(disk.path / "site" / FILE, "orin", NAME)] == [100.0, 101.0]
    records = [(one.levelname, one.name) for one in caplog.records]
    assert records == [("WARNING", history.__name__), ("INFO", history.__name__)], "the disk is full; it has room again"
