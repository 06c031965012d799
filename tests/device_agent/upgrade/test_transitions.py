"""What becomes of a trial, by hand-sized numbers, and that every way of a record leads to an end."""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.upgrade import transitions
from device_agent.upgrade.record import UpgradeRecord, UpgradeTarget
from device_agent.upgrade.transitions import TrialObservation, judge_trial
from shared.protocol.update import ENDED, MOST_REMEMBERED, find_failure

WANTED = UpgradeTarget(version="2", deployment="d", attempt=1, probation_s=120)
STAGED = replace(transitions.begin_upgrade(UpgradeRecord(), WANTED, "1"), state="staged")
TRIAL = transitions.apply_event(STAGED, "switched", nonce="n", boot="a", boots=1)


def test_a_trial_goes_on_until_it_is_proven_or_something_speaks_against_it():
    assert judge_trial(TRIAL, TrialObservation("2", 119.9, restarts=2)) is None
    assert judge_trial(TRIAL, TrialObservation("2", 119.9, is_proven=True)) == ("passed", "")
    assert judge_trial(TRIAL, TrialObservation("2", 200.0, is_proven=True)) == ("passed", "")
    events = {
        judge_trial(TRIAL, sight)[0]
        for sight in (
            TrialObservation("2", 120.0),
            TrialObservation("2", restarts=3),
            TrialObservation("2", has_failed=True),
        )
    }
    assert events == {"worse"}
    assert judge_trial(replace(TRIAL, boots=4), TrialObservation("2", is_proven=True))[0] == "worse"
    assert judge_trial(replace(TRIAL, starts=2), TrialObservation("2", restarts=1, is_proven=True))[0] == "worse"
    assert judge_trial(TRIAL, TrialObservation("9", is_proven=True))[0] == "back"


def test_boots_and_starts_are_counted_apart():
    again = transitions.count_restart(TRIAL, "b")
    assert (again.boots, again.starts, again.boot) == (2, 0, "b")
    assert (transitions.count_restart(again, "b").boots, transitions.count_restart(again, "b").starts) == (2, 1)


def test_a_condemned_version_is_left_by_whoever_reads_the_record():
    assert not transitions.is_rolling_back(TRIAL)
    assert transitions.target_version(TRIAL) == "2"
    condemned = transitions.mark_rollback(TRIAL, "it is mute")
    assert transitions.is_rolling_back(condemned)
    assert transitions.target_version(condemned) == "1"
    kept = transitions.apply_event(TRIAL, "passed")
    assert (kept.previous, transitions.target_version(kept)) == ("1", "2")
    assert transitions.target_version(transitions.mark_rollback(kept, "asked for")) == "1"
    gone = transitions.apply_event(transitions.mark_rollback(kept, "asked for"), "back", "asked for")
    assert (gone.state, gone.from_, gone.previous) == ("rolled-back", "1", "")
    assert gone.state in ENDED


def test_what_failed_is_remembered_by_version_and_attempt():
    record = transitions.apply_event(replace(TRIAL, attempt=3), "worse", "it is mute")
    assert find_failure(record.failed, WANTED.version, 3) == "it is mute"
    assert find_failure(record.failed, WANTED.version, 4) == ""
    assert find_failure(record.failed, "3", WANTED.attempt) == ""
    assert transitions.next_attempt_number(record, "2") == 4
    for number in range(MOST_REMEMBERED):
        record = transitions.apply_event(replace(TRIAL, to=f"3.{number}"), "worse", "too")
        record = replace(record, state="trial")
    assert len(record.failed) <= MOST_REMEMBERED


def test_versions_that_may_be_needed_stay():
    assert transitions.select_retained_versions(TRIAL, "2") == {"1", "2"}
    kept = transitions.apply_event(TRIAL, "passed")
    assert transitions.select_retained_versions(kept, "2") == {"1", "2"}
    next_one = replace(transitions.begin_upgrade(kept, replace(WANTED, version="3"), "2"), state="staged")
    assert transitions.select_retained_versions(next_one, "2") == {"1", "2", "3"}
    assert transitions.select_retained_versions(replace(next_one, state="refused"), "2") == {"1", "2"}
    assert transitions.filter_serials({"1": 1, "2": 2, "3": 3}, frozenset({"1", "3"})) == {"1": 1, "3": 3}
