"""Report history: readable after interruptions, bounded in size."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess  # noqa: TID251 - a writer that is killed
import sys
import threading
from pathlib import Path
from random import Random

import msgspec
import pytest

from edge_server.journal.report_history import (
    DAY_S,
    FILE,
    FULL_EVERY,
    SWEEP_S,
    ReportHistory,
    StoredReport,
    latest_reports,
    reading_history,
)
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.measurements import Reading
from shared.protocol.messages import Report
from tests.device_agent.sources import report
from tests.edge_server.processes import ROOT, until
from tests.machine import as_nobody, open_to_all
from tests.naming import log_messages, naming

BEGIN, STEP_S = 1.8e9, 30.0
WATTS = "power.total_watts"


@pytest.fixture
def readings(tmp_path):
    opened = ReportHistory(tmp_path / "site", keep_days=14, max_bytes=256 << 20)
    yield opened
    opened.close()


def fill(
    readings: ReportHistory, count: int, *devices: str, first: int = 0, batch: int = 1
) -> dict[str, list[StoredReport]]:
    """Write what devices say every 30 s; return it."""
    random = Random(first)
    said = {device: [] for device in devices or ("orin",)}
    for start in range(first, first + count, batch):
        news = []
        for number in range(start, min(start + batch, first + count)):
            for device, heard in said.items():
                heard.append(StoredReport(BEGIN + number * STEP_S, report(random, 100.0 + number * STEP_S, device)))
                news.append(heard[-1])
        readings.write(news)
    return said


def figures(said: list[StoredReport], name: str = WATTS) -> list[tuple[float, Reading]]:
    return [(one.heard_utc_s, one.report.readings[name]) for one in said]


def test_every_figure_is_read_back_as_it_was_said(readings):
    """Over more than two full rows, of several devices, those that change and those that do not."""
    said = fill(readings, 2 * FULL_EVERY + 5, "orin", "nano", batch=7)
    assert latest_reports(readings.path) == {device: heard[-1] for device, heard in said.items()}
    for device, heard in said.items():
        for name in heard[0].report.readings:
            assert reading_history(readings.path, device, name) == figures(heard, name)


def test_a_history_goes_on_after_a_restart(readings):
    """In any process, also where two write at once: each row is told against the one before it."""
    other = ReportHistory(readings.folder, keep_days=14, max_bytes=256 << 20)
    said = fill(readings, 3)["orin"]
    said += fill(other, 3, first=3)["orin"]
    said += fill(readings, 3, first=6)["orin"]
    other.close()
    assert reading_history(readings.path, "orin", WATTS) == figures(said)
    assert latest_reports(readings.path)["orin"] == said[-1]


def test_a_retained_report_is_kept_once(readings):
    """It is heard again after every restart of the server; what a rebooted board says is another."""
    [one] = fill(readings, 1)["orin"]
    again = StoredReport(one.heard_utc_s + 100, one.report)
    readings.write([again])
    readings.close()
    readings.write([again])
    assert latest_reports(readings.path)["orin"] == one
    reborn = msgspec.structs.replace(one.report, instance="another")
    readings.write([StoredReport(one.heard_utc_s + 200, reborn)])
    assert latest_reports(readings.path)["orin"].report == reborn
    assert len(reading_history(readings.path, "orin", WATTS)) == 2


def test_a_history_since_a_moment(readings):
    """From within a run of changed rows, whose full row lies before it."""
    said = fill(readings, 100)["orin"]
    since = said[37].heard_utc_s
    assert reading_history(readings.path, "orin", "cpu.online_count", since) == figures(said[37:], "cpu.online_count")
    assert reading_history(readings.path, "orin", WATTS, BEGIN * 2) == []
    assert reading_history(readings.path, "orin", "no.such_thing") == []
    assert reading_history(readings.path, "nobody", WATTS) == []


def test_a_report_takes_few_bytes(readings):
    """Of a board with 30 figures: a twelfth of what it is on the wire, and a tenth of a millisecond."""
    fill(readings, 1000, batch=50)
    readings.close()
    assert readings.path.stat().st_size / 1000 < 350


def test_what_is_too_old_is_forgotten(readings):
    """And figures that are told by their changes alone are known again from the next full row on."""
    readings.keep_days = 1.0
    fill(readings, 100)
    late = fill(readings, 1, first=int((DAY_S + 50 * STEP_S) / STEP_S))["orin"][0]
    kept = reading_history(readings.path, "orin", WATTS)
    assert kept[0][0] >= late.heard_utc_s - DAY_S
    assert len(kept) == 51
    assert reading_history(readings.path, "orin", "cpu.online_count")[-1] == figures([late], "cpu.online_count")[0]
    readings.write([StoredReport(late.heard_utc_s + 2 * DAY_S + SWEEP_S, report(Random(0), 1.0, "nano"))])
    assert list(latest_reports(readings.path)) == ["nano"]


def test_the_file_stays_as_small_as_it_was_told(readings):
    """And its content is the newest reports, which are read as they were said."""
    readings.max_bytes = 1 << 20
    said = fill(readings, 6000, batch=100)["orin"]
    readings.close()
    assert readings.path.stat().st_size < 1.2 * (1 << 20)
    kept = reading_history(readings.path, "orin", WATTS)
    assert len(kept) > 1500
    assert kept == figures(said[-len(kept) :])
    assert latest_reports(readings.path)["orin"] == said[-1]


def test_a_device_that_says_much_leaves_the_others_their_share(readings):
    """New names in every report, as many as fit: the file is bounded, and nothing of an honest device is lost."""
    readings.max_bytes = 2 << 20
    honest = fill(readings, 300, "honest", batch=50)["honest"]
    for number in range(400):
        noise = {
            f"{number}.{i}": Reading(value=0.1 * i, unit="x", source="y", quality="measured", at=0.0)
            for i in range(300)
        }
        readings.write([StoredReport(BEGIN + number, Report(device="hostile", at=float(number), readings=noise))])
    honest += fill(readings, 50, "honest", first=300)["honest"]
    readings.close()
    assert readings.path.stat().st_size < 1.2 * (2 << 20)
    assert reading_history(readings.path, "honest", WATTS) == figures(honest)


def test_reading_while_another_process_writes(readings):
    """Each answer is a whole history, from its beginning to some moment."""
    writer = threading.Thread(target=fill, args=(readings, 200))
    writer.start()
    seen = 0
    while writer.is_alive():
        if readings.path.exists():
            try:
                found = reading_history(readings.path, "orin", WATTS)
            except CorruptFile as error:
                assert "no such table" in str(error)  # noqa: PT017 - it has just been made
                continue
            assert len(found) >= seen
            seen = len(found)
    writer.join()
    assert len(reading_history(readings.path, "orin", WATTS)) == 200


WRITER = """
import sys
from itertools import count
from pathlib import Path
import msgspec
from edge_server.journal.report_history import StoredReport, ReportHistory
from shared.protocol.messages import Report
folder = Path(sys.argv[1])
reports = msgspec.msgpack.decode((folder / "reports").read_bytes(), type=list[Report])
readings = ReportHistory(folder, 14, 1 << 22)
for number in count(int(sys.argv[2])):
    told = msgspec.structs.replace(reports[number % len(reports)], at=float(number))
    readings.write([StoredReport(1.8e9 + number, told)])
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_history(tmp_path):
    """kill -9 at any moment: what is there reads, and the next process goes on with it."""
    path, random = tmp_path / FILE, Random(1)
    told = [report(random, float(number)) for number in range(200)]  # here: what makes them needs torch
    (tmp_path / "reports").write_bytes(msgspec.msgpack.encode(told))
    for first in (1_000, 100_000):
        before = _count(path)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(first)], cwd=ROOT)  # noqa: S603
        try:
            until(lambda: _count(path) > before + 130, "rows")  # noqa: B023 - at once
        finally:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        assert _count(path) > before + 130
    assert [one.name for one in tmp_path.iterdir() if "corrupt" in one.name] == []
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def _count(path: Path) -> int:
    try:
        return len(reading_history(path, "orin", WATTS))
    except (ConfigError, CorruptFile):  # there is none yet, or no table in it
        return 0


STATEMENTS = {
    "a row": "UPDATE reports SET body = x'c1'",
    "a time": "UPDATE reports SET at = NULL",
    "another table": "ALTER TABLE reports RENAME body TO b",
}


@pytest.mark.parametrize("damage", ["header", "no database", "a row", "a time", "a page", "another table"])
def test_a_damaged_history_is_set_aside_and_a_new_one_begun(readings, damage, caplog):
    """One of them is kept to be looked at; nothing of it stops who writes."""
    fill(readings, 150)
    readings.close()
    _damage(readings.path, damage)
    said = fill(readings, 3, first=1000)["orin"]
    assert latest_reports(readings.path)["orin"] == said[-1]
    assert reading_history(readings.path, "orin", WATTS)[-3:] == figures(said)
    assert [one.name for one in readings.folder.glob("*corrupt*")] == [f"{FILE}.corrupt-1"]
    assert len(log_messages(caplog, f"{FILE}.corrupt-1")) == 1


def test_of_damaged_histories_the_newest_is_kept(readings):
    """They may be large."""
    for number in range(3):
        fill(readings, 3, first=10 * number)
        readings.close()
        _damage(readings.path, "no database")
    fill(readings, 1, first=100)
    assert len(list(readings.folder.glob("*corrupt*"))) == 1


def _damage(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[:100] = bytes(100)
    elif damage == "no database":
        data = bytearray(b"x" * 1000)
    elif damage == "a page":
        data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    if damage in STATEMENTS:
        connection = sqlite3.connect(path)
        connection.execute(STATEMENTS[damage])
        connection.commit()
        connection.close()


def test_a_full_disk_refuses_by_name_and_what_is_there_stays(disk):
    """And it goes on once there is room, without what was refused."""
    readings = ReportHistory(disk.path, keep_days=14, max_bytes=256 << 20)
    said = fill(readings, 20)["orin"]
    disk.fill()
    with pytest.raises(Unwritable):
        fill(readings, 500, first=20, batch=500)
    assert reading_history(readings.path, "orin", WATTS) == figures(said)
    disk.make_room()
    said += fill(readings, 5, first=1000)["orin"]
    assert reading_history(readings.path, "orin", WATTS) == figures(said)
    readings.close()


def test_there_is_no_history(tmp_path):
    """Said with what to do."""
    with pytest.raises(ConfigError, match=naming(tmp_path / FILE, "data_dir")):
        latest_reports(tmp_path / FILE)


def test_who_may_only_read_sees_what_the_writer_wrote_last():
    """It lies beside the database as long as the writer lives; and an address may need no quotes."""
    with open_to_all() as folder:
        readings = ReportHistory(folder / "50%20 #1?", keep_days=14, max_bytes=256 << 20)
        said = fill(readings, 3)["orin"]
        with as_nobody():
            assert reading_history(readings.path, "orin", WATTS) == figures(said)
        readings.close()
        with as_nobody():
            assert reading_history(readings.path, "orin", WATTS) == figures(said)


@pytest.mark.parametrize("gone", ["the file alone", "the file and its log", "the folder"])
def test_a_history_that_is_deleted_under_its_writer_is_written_anew_with_every_report(readings, caplog, gone):
    """It was written on into the deleted file without a word, until the server ended."""
    said = fill(readings, 5)["orin"]
    if gone == "the folder":
        shutil.rmtree(readings.folder)
    else:
        for path in readings.folder.glob(f"{FILE}*" if "log" in gone else FILE):
            path.unlink()
    said += fill(readings, 5, first=5)["orin"]
    found = reading_history(readings.path, "orin", WATTS)
    assert [at for at, _ in found] == [one.heard_utc_s for one in said]
    assert len(log_messages(caplog, readings.path)) == 1
    assert not list(readings.folder.glob("*.part"))


def test_a_history_that_is_put_in_the_place_of_the_open_one_is_gone_on_with(readings, tmp_path):
    """A copy from before, say."""
    said = fill(readings, 3)["orin"]
    readings.close()
    shutil.copy(readings.path, tmp_path / "copy")
    fill(readings, 3, first=3)
    shutil.move(tmp_path / "copy", readings.path)
    for suffix in ("-wal", "-shm"):
        readings.path.with_name(readings.path.name + suffix).unlink(missing_ok=True)
    said += fill(readings, 1, first=9)["orin"]
    assert [at for at, _ in reading_history(readings.path, "orin", WATTS)] == [one.heard_utc_s for one in said]
