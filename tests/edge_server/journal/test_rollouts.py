"""Journals of rollouts: several writers, torn and damaged lines, and which boards use what."""

from __future__ import annotations

import pytest

from edge_server.journal.rollouts.file import (
    BoardTold,
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

AT = "20260101T000000Z"
PLAN = RolloutPlan(deployment="0001-net-2-aaaa", release="net/2", sha256="0" * 64)
RECORDS = [
    RolloutStarted(at=AT, plan=PLAN),
    WaveOpened(at=AT, devices={"pi-1": "pi-4"}, canary=True),
    BoardTold(at=AT, device="pi-1", status=ModelStatus(name="net", committed=2, state="committed")),
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
    stored = len(journal.path.read_bytes())
    more = [RolloutOrdered(at=AT, order="pause", cause="x" * 5000)] * 40
    for left in (0, 20_000):
        disk.fill(left)
        with pytest.raises(Unwritable):
            journal.append(*more)
        assert len(journal.path.read_bytes()) == stored
    disk.make_room()
    journal.append(RECORDS[-1])
    assert read_rollout(disk.path, PLAN.deployment) == RECORDS


@pytest.mark.parametrize("torn", [1, 20, 60])
def test_a_torn_last_line_is_as_if_it_had_not_been_written(journal, tmp_path, torn):
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-torn])
    assert read_rollout(tmp_path, PLAN.deployment) == RECORDS[:-1]
    RolloutJournal(tmp_path, PLAN.deployment).append(RECORDS[-1])
    assert journal.path.read_bytes() == data


def test_every_damaged_byte_is_told(journal, tmp_path):
    data = journal.path.read_bytes()
    for place in range(0, len(data) - 1, 7):
        journal.path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CorruptFile):
            read_rollout(tmp_path, PLAN.deployment)


def test_a_line_that_is_missing_is_told(journal, tmp_path):
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(CorruptFile):
        read_rollout(tmp_path, PLAN.deployment)


def test_a_rollout_that_is_not_there_names_those_that_are(journal, tmp_path):
    with pytest.raises(ConfigError, match=PLAN.deployment):
        read_rollout(tmp_path, "0009-no")


def test_the_last_word_of_each_board_counts_over_all_rollouts(journal, tmp_path, caplog):
    newer = RolloutJournal(tmp_path, "0002-net-3-bbbb")
    known = ModelStatus(name="net", committed=3, previous=2, state="committed")
    newer.append(RolloutStarted(at=AT, plan=PLAN), BoardTold(at="20260102T000000Z", device="pi-1", status=known))
    (tmp_path / "rollouts" / "0003-damaged.jsonl").write_text("no record\n")
    assert read_model_statuses(tmp_path) == {"pi-1": {"net": known}}
    assert "0003-damaged" in caplog.text
