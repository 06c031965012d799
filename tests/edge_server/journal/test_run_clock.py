"""A run's seconds go on over the server's restarts, whatever the clocks of the gateway do."""

from __future__ import annotations

import pytest

from edge_server.journal.records import Joined, RoundOpened, RunClosed, ServerBegan
from edge_server.journal.run_clock import FAR_S, Elapsed, elapsed_since, server_began, timed_records

FIRST = ServerBegan(at=500.0, run_s=0.0, utc_s=1e9)
SEEN = [FIRST, Joined(device="a", at=530.0)]


def test_a_first_process_begins_at_second_zero():
    assert server_began([], at=500.0, utc_s=1e9) == FIRST


@pytest.mark.parametrize(
    ("utc_s", "run_s"),
    [
        (1e9 + 90, 90.0),  # the calendar says how long nobody served
        (1e9 + 10, 30.0),  # it went back a little: not before what was recorded last
        (1e9 - 5000, 30.0),  # it was set back
        (1e9 + FAR_S + 1, 30.0),  # it was 1970 when the first one began
        (None, 30.0),  # there is none, as in replay
    ],
)
def test_a_later_process_begins_when_the_calendar_says_if_that_can_be(utc_s, run_s):
    """30 s after the beginning something happened, so that nothing begins before."""
    assert server_began(SEEN, at=7.0, utc_s=utc_s).run_s == run_s


def test_a_third_process_is_told_from_the_second():
    second = server_began(SEEN, at=7.0, utc_s=1e9 + 90)
    assert server_began([*SEEN, second], at=1.0, utc_s=1e9 + 100).run_s == 100.0


def test_every_record_has_its_second_of_the_run():
    """500 s of the first clock are 0, 7 s of the second are 90; what has no moment has none."""
    records = [*SEEN, ServerBegan(at=7.0, run_s=90.0), Joined(device="a", at=8.5), RunClosed(outcome="finished")]
    assert [second for _, second in timed_records(records)] == [0.0, 30.0, 90.0, 91.5, None]


def test_of_a_journal_without_processes_no_second_is_known():
    """One of an earlier version: its clock's zero was never told."""
    assert [second for _, second in timed_records([Joined(device="a", at=8.5)])] == [None]


OPENED = RoundOpened(round=3, assignments={}, at=510.0)


@pytest.mark.parametrize(
    ("utc_s", "elapsed"),
    [
        (1e9 + 90, Elapsed(85.0, is_known=True, away_s=60.0)),
        (1e9 + 10, Elapsed(25.0, is_known=False)),
        (1e9 + FAR_S + 1, Elapsed(25.0, is_known=False)),
        (None, Elapsed(25.0, is_known=False)),
    ],
)
def test_a_round_is_as_old_as_the_calendar_says_or_at_least_as_what_is_recorded(utc_s, elapsed):
    """Opened at second 10, the last word at 30; the next process began at 90, or nobody knows, and is 5 s old.

    Where the calendar says so, up to 60 s of these had no server.
    """
    records = [FIRST, OPENED, Joined(device="a", at=530.0)]
    records.append(server_began(records, at=7.0, utc_s=utc_s))
    assert elapsed_since(records, OPENED, 12.0) == elapsed


def test_of_two_restarts_both_must_be_known():
    records = [FIRST, OPENED]
    for at, utc_s in ((7.0, None), (3.0, 1e9 + 50), (4.0, 1e9 + 60)):
        records.append(server_began(records, at=at, utc_s=utc_s))
    assert elapsed_since(records, OPENED, 5.0) == Elapsed(11.0, is_known=False, away_s=10.0)


def test_what_was_not_known_before_a_round_began_does_not_matter():
    records = [FIRST, server_began([FIRST], at=500.0), OPENED]
    assert elapsed_since(records, OPENED, 512.0) == Elapsed(2.0, is_known=True)


def test_a_round_of_an_old_journal_has_no_age():
    old = RoundOpened(round=3, assignments={})
    assert (
        elapsed_since([FIRST, old], old, 12.0) == elapsed_since([OPENED], OPENED, 12.0) == Elapsed(0.0, is_known=False)
    )


def test_a_round_that_was_opened_anew_is_as_old_as_its_last_opening():
    """It was made void after a restart of which nobody knows how long it took, and began once more."""
    records = [FIRST, OPENED]
    records += [server_began(records, at=7.0), RoundOpened(round=3, assignments={}, at=9.0)]
    assert elapsed_since(records, OPENED, 12.0) == Elapsed(3.0, is_known=True)
