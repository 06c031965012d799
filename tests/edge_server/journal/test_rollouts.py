"""Journals of rollouts: several writers, torn and damaged lines, and which boards use what."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import xxhash

from edge_server.journal.rollouts.file import (
    BoardReported,
    RolloutEnded,
    RolloutJournal,
    RolloutOrdered,
    RolloutPlan,
    RolloutStarted,
    WaveOpened,
    read_model_statuses,
    read_rollout,
    rollout_names,
)
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.inference.rollout import ModelStatus
from tests.naming import names_all

NOBODY = 65534
AT = "20260101T000000Z"
PLAN = RolloutPlan(deployment="0001-net-2-aaaa", release="net/2", sha256="0" * 64)
RECORDS = [
    RolloutStarted(at=AT, plan=PLAN),
    WaveOpened(at=AT, devices={"pi-1": "pi-4"}, canary=True),
    BoardReported(at=AT, device="pi-1", status=ModelStatus(name="net", committed=2, state="committed")),
    RolloutEnded(at=AT, outcome="finished"),
]


@pytest.fixture
def journal(tmp_path):
    found = RolloutJournal(tmp_path, PLAN.deployment)
    found.append(*RECORDS)
    return found


def test_what_is_appended_is_read_and_news_are_told_once(journal, tmp_path):
    assert read_rollout(tmp_path, PLAN.deployment) == RECORDS
    assert journal.news() == []
    assert rollout_names(tmp_path) == [PLAN.deployment]


def test_two_processes_append_and_each_hears_of_the_other_in_order(journal, tmp_path):
    other = RolloutJournal(tmp_path, PLAN.deployment)
    pause, resume = (RolloutOrdered(at=AT, order=order) for order in ("pause", "resume"))
    assert other.append(pause) == [*RECORDS, pause]
    assert journal.append(resume) == [pause, resume]
    assert other.news() == [resume]
    assert read_rollout(tmp_path, PLAN.deployment) == [*RECORDS, pause, resume]


def test_on_a_full_disk_nothing_is_appended_and_it_goes_on_when_there_is_room(disk):
    """Where a part of what is to be written would have found room, too."""
    journal = RolloutJournal(disk.path, PLAN.deployment)
    journal.append(*RECORDS[:-1])
    more = [RolloutOrdered(at=AT, order="pause", cause="x" * 5000)] * 40
    for left in (0, 20_000):
        disk.fill(left)
        with pytest.raises(Unwritable):
            journal.append(*more)
        assert read_rollout(disk.path, PLAN.deployment) == RECORDS[:-1]
    disk.make_room()
    journal.append(RECORDS[-1])
    assert read_rollout(disk.path, PLAN.deployment) == RECORDS


def append_pairs(data_dir, acknowledged):
    pair = [RolloutOrdered(at=AT, order="pause"), RolloutOrdered(at=AT, order="resume")]
    while True:
        RolloutJournal(data_dir, "a").append(*pair)
        acknowledged.value += 1


def test_of_a_process_that_is_killed_while_it_appends_all_records_are_there_or_none(tmp_path):
    """It appends pairs, and is killed at some moment of that again and again."""
    context = multiprocessing.get_context("spawn")
    acknowledged = context.Value("i", 0, lock=False)
    for number in range(6):
        process, before = context.Process(target=append_pairs, args=(tmp_path, acknowledged)), acknowledged.value
        process.start()
        while acknowledged.value == before:
            process.join(0.01)
        process.join(0.007 * number)
        process.kill()
        process.join()
        records = RolloutJournal(tmp_path, "a").append()
        assert [record.order for record in records] == ["pause", "resume"] * (len(records) // 2)
        assert len(records) >= 2 * acknowledged.value


def die_within_transaction(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE records SET mark = 0")
        connection.executemany("INSERT INTO records (body, mark) VALUES (?, 1)", [("x" * 5000,)] * 50)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_takes_back_what_a_killed_process_had_not_committed(journal, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=die_within_transaction, args=(journal.path,))
    process.start()
    process.join()
    assert journal.path.with_name(f"{journal.path.name}-journal").stat().st_size
    assert read_rollout(tmp_path, PLAN.deployment) == RECORDS


@pytest.mark.skipif(os.geteuid() != 0, reason="root may write everywhere; it becomes a user who may not")
def test_a_reader_without_write_access_is_told_who_can_finish_a_killed_process():
    with TemporaryDirectory() as name:  # other users may not enter pytest's folder
        folder = Path(name)
        folder.chmod(0o755)
        found = RolloutJournal(folder, PLAN.deployment)
        found.append(*RECORDS)
        process = multiprocessing.get_context("spawn").Process(target=die_within_transaction, args=(found.path,))
        process.start()
        process.join()
        for path in (folder / "rollouts").iterdir():
            path.chmod(0o644)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(CorruptFile, match=r"its writer was killed; run the command once as a user who may"):
                read_rollout(folder, PLAN.deployment)
        finally:
            os.seteuid(0)
        assert read_rollout(folder, PLAN.deployment) == RECORDS
        os.seteuid(NOBODY)
        try:
            assert read_rollout(folder, PLAN.deployment) == RECORDS
        finally:
            os.seteuid(0)


def test_every_damaged_byte_is_told_or_changes_no_record(journal, tmp_path):
    data, results = journal.path.read_bytes(), []
    for place in range(0, len(data), 7):
        journal.path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            results.append(read_rollout(tmp_path, PLAN.deployment))
        except CorruptFile as error:
            results.append(names_all(str(error), journal.path))
    assert all(result in (RECORDS, True) for result in results)
    assert results.count(True) > 50


def test_a_row_that_is_missing_is_told(journal, tmp_path):
    with closing(sqlite3.connect(journal.path)) as connection, connection:
        connection.execute("DELETE FROM records WHERE rowid = 2")
    with pytest.raises(CorruptFile):
        read_rollout(tmp_path, PLAN.deployment)


@pytest.fixture
def lines(tmp_path):
    """Return the file of an earlier version: each line has a mark, which covers the one before it."""
    path, mark = tmp_path / "rollouts" / f"{PLAN.deployment}.jsonl", b""
    path.parent.mkdir()
    for record in RECORDS:
        body = msgspec.json.encode(record, order="deterministic")
        mark = xxhash.xxh3_64_hexdigest(mark + body).encode()
        path.write_bytes((path.read_bytes() if path.exists() else b"") + mark + b" " + body + b"\n")
    return path


def test_a_file_of_an_earlier_version_is_read_and_converted_by_what_appends(lines, tmp_path):
    journal, other = (RolloutJournal(tmp_path, PLAN.deployment) for _ in range(2))
    assert journal.news() == RECORDS
    assert journal.news() == []
    assert rollout_names(tmp_path) == [PLAN.deployment]
    (tmp_path / "rollouts" / f"{PLAN.deployment}.sqlite").touch()  # a process was killed before it converted it
    assert read_rollout(tmp_path, PLAN.deployment) == RECORDS
    back = RolloutOrdered(at=AT, order="back")
    assert other.append(back) == [*RECORDS, back]
    assert journal.append() == [back]
    assert not lines.exists()
    assert read_rollout(tmp_path, PLAN.deployment) == [*RECORDS, back]
    assert rollout_names(tmp_path) == [PLAN.deployment]


@pytest.mark.parametrize("torn", [1, 20, 60])
def test_a_torn_last_line_is_as_if_it_had_not_been_written(lines, tmp_path, torn):
    lines.write_bytes(lines.read_bytes()[:-torn])
    assert read_rollout(tmp_path, PLAN.deployment) == RECORDS[:-1]
    RolloutJournal(tmp_path, PLAN.deployment).append(RECORDS[-1])
    assert read_rollout(tmp_path, PLAN.deployment) == RECORDS


def test_a_damaged_byte_or_a_missing_line_of_an_earlier_version_is_told_and_nothing_is_converted(lines, tmp_path):
    data = lines.read_bytes()
    whole = data.splitlines(keepends=True)
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, len(data) - 1, 7)]
    for spoilt in [*damaged, b"".join([whole[0], *whole[2:]])]:
        lines.write_bytes(spoilt)
        for use in (read_rollout, lambda *which: RolloutJournal(*which).append(RECORDS[-1])):
            with pytest.raises(CorruptFile):
                use(tmp_path, PLAN.deployment)
    lines.write_bytes(data)
    assert RolloutJournal(tmp_path, PLAN.deployment).append() == RECORDS


def test_a_rollout_that_is_not_there_names_those_that_are(journal, tmp_path):
    with pytest.raises(ConfigError, match=PLAN.deployment):
        read_rollout(tmp_path, "0009-no")


def test_the_last_word_of_each_board_counts_over_all_rollouts(journal, tmp_path, caplog):
    newer = RolloutJournal(tmp_path, "0002-net-3-bbbb")
    known = ModelStatus(name="net", committed=3, previous=2, state="committed")
    newer.append(RolloutStarted(at=AT, plan=PLAN), BoardReported(at="20260102T000000Z", device="pi-1", status=known))
    (tmp_path / "rollouts" / "0003-damaged.jsonl").write_text("no record\n")
    assert read_model_statuses(tmp_path) == {"pi-1": {"net": known}}
    assert "0003-damaged" in caplog.text
