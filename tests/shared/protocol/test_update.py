"""Update state table: allowed transitions, invariants, record on disk."""

from __future__ import annotations

import json
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, CorruptFile
from shared.protocol.update import (
    ENDED,
    FORMAT,
    MOST_REMEMBERED,
    PENDING,
    TRANSITIONS,
    Event,
    NewVersion,
    Phase,
    UpdateRecord,
    UpdateTerms,
    advance,
    count_start,
    next_phase,
    read_record,
    take_offer,
    write_record,
)
from tests.naming import naming

PHASES, EVENTS = typing.get_args(Phase), typing.get_args(Event)
EMPTY = UpdateRecord(name="digits")


def offer(version: int, attempt: int = 1) -> NewVersion:
    return NewVersion(version=version, release=f"{version:064x}", deployment=f"to-{version}", attempt=attempt)


def led(*events: Event, record: UpdateRecord = EMPTY, version: int = 1) -> UpdateRecord:
    """Return a record after an offer and some events."""
    record = take_offer(record, offer(version), 0.0)
    for event in events:
        record = advance(record, event, 0.0, "because" if event in ("refused", "worse") else "")
    return record


TO_TRIAL: tuple[Event, ...] = ("fetched", "verified", "staged", "switched")
TO_COMMITTED: tuple[Event, ...] = (*TO_TRIAL, "passed")


def test_every_phase_is_in_the_table_and_can_be_reached():
    assert TRANSITIONS.keys() == set(PHASES)
    assert {event for row in TRANSITIONS.values() for event in row} == set(EVENTS)
    reached = {"none"} | {phase for row in TRANSITIONS.values() for phase in row.values()}
    assert reached == set(PHASES)
    assert {"none", "trial"} == set(PHASES) - PENDING - ENDED


def test_a_newer_offer_supersedes_any_state_but_a_trial():
    assert {phase for phase, row in TRANSITIONS.items() if "superseded" in row} == PENDING
    assert {phase for phase, row in TRANSITIONS.items() if "offered" in row} == {"none", *ENDED}
    for event in set(EVENTS) - TRANSITIONS["trial"].keys():
        with pytest.raises(ValueError, match=naming(repr(event), "trial")):
            next_phase("trial", event)


def test_a_version_answers_from_its_switch_on_and_the_one_before_it_stays():
    first = led(*TO_COMMITTED)
    assert (first.committed, first.previous, first.serving, first.retained_versions) == (1, 0, 1, {1})
    trial = led(*TO_TRIAL, record=first, version=2)
    assert (trial.committed, trial.serving, trial.retained_versions) == (1, 2, {1, 2})
    second = advance(trial, "passed", 5.0)
    assert (second.committed, second.previous, second.serving, second.retained_versions) == (2, 1, 2, {1, 2})
    third = led(*TO_TRIAL, record=second, version=3)
    assert (third.serving, third.retained_versions) == (3, {1, 2, 3})
    worse = advance(third, "worse", 6.0, "errors")
    assert (worse.committed, worse.previous, worse.serving, worse.phase) == (2, 1, 2, "rolled-back")
    assert (worse.retained_versions, worse.reason, worse.since) == ({1, 2}, "errors", 6.0)


def test_going_back_from_what_was_committed_brings_the_one_before_it():
    second = led(*TO_COMMITTED, record=led(*TO_COMMITTED), version=2)
    back = advance(second, "back", 1.0, "taken back")
    assert (back.committed, back.previous, back.candidate, back.phase) == (1, 0, 2, "rolled-back")
    assert back.retained_versions == {1, 2}  # the last two versions stay
    assert back.failure(second.release, 1) == ""  # nobody said that it failed here


def test_what_failed_is_remembered_until_somebody_asks_anew():
    refused = led("fetched", "refused", version=7)
    assert refused.failure(refused.release, 1) == "because"
    assert refused.failure(refused.release, 2) == ""
    assert refused.failure("another", 1) == ""
    full = advance(take_offer(EMPTY, offer(1), 0.0), "refused", 0.0, "disk: full", lasting=False)
    assert (full.reason, full.failed) == ("disk: full", ())
    for version in range(1, MOST_REMEMBERED + 3):
        refused = led("fetched", "refused", record=refused, version=version)
    assert len(refused.failed) == MOST_REMEMBERED
    assert refused.failed[-1].release == offer(MOST_REMEMBERED + 2).release


def test_starts_count_for_the_gates_and_for_the_trial_apart():
    record = count_start(count_start(led("fetched")))
    assert record.starts == 2
    for event in ("verified", "staged"):
        record = advance(record, event, 0.0)
    assert record.starts == 2
    assert advance(record, "switched", 0.0).starts == 0
    assert take_offer(advance(record, "superseded", 0.0), offer(2), 0.0).starts == 0


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_whatever_happens_a_working_version_answers(events):
    """Walks of events as they come, those left out that the table does not have; what committed once is never lost."""
    record, version = EMPTY, 0
    for event in events:
        if event not in TRANSITIONS[record.phase] or (
            event == "back" and not record.previous and record.phase in ENDED
        ):
            continue
        before = record
        if event == "offered":
            version += 1
            record = take_offer(record, offer(version), 0.0)
        elif event != "known" or record.candidate == record.committed:
            record = advance(record, event, 0.0, "because")
        assert bool(record.committed) >= bool(before.committed)
        assert record.committed in {before.committed, before.candidate, before.previous}
        assert {record.committed, record.serving} - {0} <= record.retained_versions
        assert record.serving == (record.candidate if record.phase == "trial" else record.committed)
        assert record.committed != record.previous or not record.committed
        assert len(record.retained_versions) <= 3
        assert read_record(write_record(record), "it") == record


def test_a_record_is_read_as_it_was_written_and_no_other_way():
    record = led(*TO_TRIAL)
    data = write_record(record)
    assert read_record(data, "it") == record
    assert write_record(read_record(data, "it")) == data
    for damaged in (b"", data[:-1], data[1:], data.replace(b'"trial"', b'"final"'), b"\xff" * 100):
        with pytest.raises(CorruptFile, match=naming("it")):
            read_record(damaged, "it")


def test_a_record_of_a_newer_format_is_told():
    record = led(*TO_TRIAL)
    with pytest.raises(ConfigError, match=naming("it", FORMAT + 1)):
        read_record(write_record(msgspec.structs.replace(record, format=FORMAT + 1)), "it")
    assert json.loads(write_record(record).partition(b"\n")[2])["phase"] == "trial"


@pytest.mark.parametrize("field", ["soak_s", "max_drop", "max_latency_ms"])
def test_terms_that_nothing_keeps_to_are_refused(field):
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=field):
            UpdateTerms(**{field: value})
    assert UpdateTerms(soak_s=10.0).deadline_s > 10.0
