"""What becomes of a trial, by hand-sized numbers, and that every way of a record leads to an end."""

from __future__ import annotations

from msgspec.structs import replace

from device_agent.upgrade import verdict
from device_agent.upgrade.record import UpgradeRecord, Wanted
from device_agent.upgrade.verdict import TrialSight, judge
from shared.protocol.update import ENDED, MOST_REMEMBERED

WANTED = Wanted(version="2", deployment="d", attempt=1, probation_s=120)
STAGED = replace(verdict.take_wish(UpgradeRecord(), WANTED, "1"), state="staged")
TRIAL = verdict.advance(STAGED, "switched", nonce="n", boot="a", boots=1)


def test_a_trial_goes_on_until_it_is_proven_or_something_speaks_against_it():
    assert judge(TRIAL, TrialSight("2", 119.9, restarts=2)) is None
    assert judge(TRIAL, TrialSight("2", 119.9, is_proven=True)) == ("passed", "")
    assert judge(TRIAL, TrialSight("2", 200.0, is_proven=True)) == ("passed", "")
    events = {
        judge(TRIAL, sight)[0]
        for sight in (TrialSight("2", 120.0), TrialSight("2", restarts=3), TrialSight("2", has_failed=True))
    }
    assert events == {"worse"}
    assert judge(replace(TRIAL, boots=4), TrialSight("2", is_proven=True))[0] == "worse"
    assert judge(replace(TRIAL, starts=2), TrialSight("2", restarts=1, is_proven=True))[0] == "worse"
    assert judge(TRIAL, TrialSight("9", is_proven=True))[0] == "back"


def test_boots_and_starts_are_counted_apart():
    again = verdict.count_resumed(TRIAL, "b")
    assert (again.boots, again.starts, again.boot) == (2, 0, "b")
    assert (verdict.count_resumed(again, "b").boots, verdict.count_resumed(again, "b").starts) == (2, 1)


def test_a_condemned_version_is_left_by_whoever_reads_the_record():
    assert not verdict.is_going_back(TRIAL)
    assert verdict.goal_of(TRIAL) == "2"
    condemned = verdict.condemn(TRIAL, "it is mute")
    assert verdict.is_going_back(condemned)
    assert verdict.goal_of(condemned) == "1"
    kept = verdict.advance(TRIAL, "passed")
    assert (kept.previous, verdict.goal_of(kept)) == ("1", "2")
    assert verdict.goal_of(verdict.condemn(kept, "asked for")) == "1"
    gone = verdict.advance(verdict.condemn(kept, "asked for"), "back", "asked for")
    assert (gone.state, gone.from_, gone.previous) == ("rolled-back", "1", "")
    assert gone.state in ENDED


def test_what_failed_is_remembered_by_version_and_attempt():
    record = verdict.advance(replace(TRIAL, attempt=3), "worse", "it is mute")
    assert verdict.find_failure(record, replace(WANTED, attempt=3)) == "it is mute"
    assert verdict.find_failure(record, replace(WANTED, attempt=4)) == ""
    assert verdict.find_failure(record, replace(WANTED, version="3")) == ""
    assert verdict.next_attempt(record, "2") == 4
    for number in range(MOST_REMEMBERED):
        record = verdict.advance(replace(TRIAL, to=f"3.{number}"), "worse", "too")
        record = replace(record, state="trial")
    assert len(record.failed) <= MOST_REMEMBERED


def test_versions_that_may_be_needed_stay():
    assert verdict.kept_versions(TRIAL, "2") == {"1", "2"}
    kept = verdict.advance(TRIAL, "passed")
    assert verdict.kept_versions(kept, "2") == {"1", "2"}
    next_one = replace(verdict.take_wish(kept, replace(WANTED, version="3"), "2"), state="staged")
    assert verdict.kept_versions(next_one, "2") == {"1", "2", "3"}
    assert verdict.kept_versions(replace(next_one, state="refused"), "2") == {"1", "2"}
    assert verdict.known_serials({"1": 1, "2": 2, "3": 3}, frozenset({"1", "3"})) == {"1": 1, "3": 3}
