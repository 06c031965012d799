"""Report history: readable after interruptions, bounded in size."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import signal
import sqlite3
import subprocess  # noqa: TID251 - a writer that is killed
import sys
import threading
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.fleet.history import BATCH_S
from edge_server.fleet.tables import COLUMNS, FREE, LINK
from edge_server.journal.report_history import (
    DAY_S,
    FILE,
    MOST_BYTES,
    SWEEP_S,
    ReportHistory,
    StoredReport,
    latest_reports,
    reading_history,
)
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.clip import MOST_ENTRIES, clip
from shared.protocol.measurements import Absent, Cost, Lack, Quality, Reading, TaskCost
from shared.protocol.messages import Report
from tests.device_agent.sources import report
from tests.edge_server.processes import ROOT, until
from tests.machine import as_nobody, open_to_all
from tests.naming import log_messages, naming

BEGIN, STEP_S = 1.8e9, 30.0
WATTS = "power.total_watts"
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
READINGS = st.builds(
    Reading,
    value=NUMBERS,
    unit=st.sampled_from(["hertz", "watts"]),
    source=st.sampled_from(["a", "b"]),
    quality=st.sampled_from(["measured", "corrected", "modelled"]),
    at=st.sampled_from([0.0, 9.0, 100.0]),
    uncertainty=st.none() | st.floats(0, 1e9),
)
SPENT = st.builds(TaskCost, run=st.just("run"), round=st.integers(0, 3), cost=st.builds(Cost, upload_s=st.floats(0, 9)))
REPORTS = st.builds(
    Report,
    device=st.just("pi"),
    at=st.just(100.0),
    readings=st.dictionaries(st.sampled_from("abcd"), READINGS),
    absent=st.dictionaries(st.sampled_from("ef"), st.builds(Absent, lack=st.sampled_from(["busy", "denied"]))),
    facts=st.dictionaries(st.sampled_from("gh"), st.text("aé ", max_size=9)),
    spent=st.none() | SPENT,
    instance=st.sampled_from("xy"),
)


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
    """Of several devices, figures that change and those that do not."""
    said = fill(readings, 125, "orin", "nano", batch=7)
    assert latest_reports(readings.path) == {device: heard[-1] for device, heard in said.items()}
    for device, heard in said.items():
        for name in heard[0].report.readings:
            assert reading_history(readings.path, device, name) == figures(heard, name)


def test_a_history_goes_on_after_a_restart(readings):
    """In any process, also where two write at once."""
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
    """From within the rows; their template lies before it."""
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
    """And the rest still reads, though the report that was its template is gone."""
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
                assert "is missing" in str(error)  # noqa: PT017 - it has just been made
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


def test_the_file_of_an_earlier_version_is_set_aside_with_one_message_and_its_last_reports_stay(readings, caplog):
    """Also who reads it before the server has written sees them."""
    readings.folder.mkdir()
    readings.path.write_bytes(gzip.decompress((ROOT / "tests" / "fixtures" / "readings-0.1.sqlite.gz").read_bytes()))
    random = Random(0)
    told = [[report(random, 100.0 + STEP_S * n, name) for name in ("orin", "nano")] for n in range(63)]
    last = {one.device: StoredReport(BEGIN + 62 * STEP_S, one) for one in told[-1]}
    assert latest_reports(readings.path) == last
    assert reading_history(readings.path, "orin", WATTS)[-1] == figures([last["orin"]])[0]
    [[said]] = fill(readings, 1, "pi", first=100).values()
    assert latest_reports(readings.path) == last | {"pi": said}
    assert len(log_messages(caplog, "earlier version")) == 1
    assert [path.name for path in readings.folder.glob("*corrupt*")] == [f"{FILE}.corrupt-1"]


STATEMENTS = {
    "a row": "UPDATE reports SET body = x'c1'",
    "a time": "UPDATE reports SET heard_utc_s = NULL",
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
def test_a_history_that_is_deleted_under_its_writer_begins_again_and_says_so(readings, caplog, gone):
    """It was written on into the deleted file without a word, until the server ended."""
    fill(readings, 5)
    if gone == "the folder":
        shutil.rmtree(readings.folder)
    else:
        for path in readings.folder.glob(f"{FILE}*" if "log" in gone else FILE):
            path.unlink()
    said = fill(readings, 5, first=5)["orin"]
    assert reading_history(readings.path, "orin", WATTS) == figures(said)
    assert len(log_messages(caplog, readings.path)) == 1


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


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(REPORTS, min_size=2, max_size=4))
def test_whatever_changes_from_report_to_report_is_read_back(reports):
    """Values, uncertainties that come and go, moments, names, facts."""
    with TemporaryDirectory() as folder:
        readings = ReportHistory(Path(folder), keep_days=14, max_bytes=1 << 20)
        for number, each in enumerate(reports):
            stored = StoredReport(BEGIN + number, msgspec.structs.replace(each, instance=str(number)))
            readings.write([stored])
            assert latest_reports(readings.path) == {"pi": stored}
        readings.close()


def hostile() -> dict[str, Report]:
    """Return reports of up to a MiB."""
    one = Reading(value=0.1, unit="", source="", quality="measured", at=1.0)
    long = Reading(value=0.1, unit="u" * 10**5, source="é" * 10**5, quality="measured", at=1.0)
    spent = TaskCost(run="../../etc/passwd", round=1, cost=Cost())
    return {
        "many": Report(device="pi", at=1.0, readings={f"{i:x}": one for i in range(16_000)}),
        "long": Report(device="pi", at=1.0, board="b" * 10**6, readings={str(i): long for i in range(300)}),
        "names": Report(device="pi", at=1.0, readings={"n" * (90 + i): long for i in range(300)}, instance="i" * 999),
        "absent": Report(
            device="pi", at=1.0, absent={f"{i:x}": Absent(lack="busy", cause="c" * 999) for i in range(500)}
        ),
        "facts": Report(device="pi", at=1.0, facts={f"{i:x}": "f" * 999 for i in range(500)}, spent=spent),
    }


@pytest.mark.parametrize("kind", hostile())
def test_whatever_a_device_says_is_bounded(readings, kind):
    """Names, texts and their number; a part of what the hub lets through is kept, and reads back."""
    readings.write([StoredReport(BEGIN, clip(hostile()[kind]))])
    kept = latest_reports(readings.path)["pi"].report
    readings.close()
    assert readings.path.stat().st_size < 4 * MOST_BYTES
    assert kept.readings or kept.absent or kept.facts
    assert kept.spent is None


def test_the_protocol_page_says_what_is_kept_and_which_words_there_are():
    """Numbers and words that a second implementation would copy from it."""
    page = (ROOT / "shared" / "protocol" / "PROTOCOL.md").read_text()
    found = re.search(r"^## Reports\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert found
    assert f"at most {MOST_ENTRIES} readings and {MOST_BYTES >> 10} KiB" in found[1]
    assert f"at most a report each {BATCH_S:.0f} s" in found[1]
    assert {word for word in (*get_args(Quality), *get_args(Lack)) if f"`{word}`" not in found[1]} == set()
    shown = {column.reading for column in (*COLUMNS, *LINK, FREE)}
    assert {name for name in shown if f"`{name}`" not in found[1]} == set()
