"""A run's seconds go on over the server's restarts, whatever the clocks of the gateway do."""

from __future__ import annotations

import pytest

from edge_server.run_time import FAR_S, began, timed
from edge_server.store.base import RunClosed
from edge_server.store.observed import Joined, ServerBegan

FIRST = ServerBegan(at=500.0, run_s=0.0, utc_s=1e9)
SEEN = [FIRST, Joined(device="a", at=530.0)]


def test_a_first_process_begins_at_second_zero():
    assert began([], at=500.0, utc_s=1e9) == FIRST


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
    assert began(SEEN, at=7.0, utc_s=utc_s).run_s == run_s


def test_a_third_process_is_told_from_the_second():
    second = began(SEEN, at=7.0, utc_s=1e9 + 90)
    assert began([*SEEN, second], at=1.0, utc_s=1e9 + 100).run_s == 100.0


def test_every_record_has_its_second_of_the_run():
    """500 s of the first clock are 0, 7 s of the second are 90; what has no moment has none."""
    records = [*SEEN, ServerBegan(at=7.0, run_s=90.0), Joined(device="a", at=8.5), RunClosed(outcome="finished")]
    assert [second for _, second in timed(records)] == [0.0, 30.0, 90.0, 91.5, None]


def test_of_a_journal_without_processes_no_second_is_known():
    """One of an earlier version: its clock's zero was never told."""
    assert [second for _, second in timed([Joined(device="a", at=8.5)])] == [None]
