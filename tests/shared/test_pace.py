"""Patience with a link, from the pace of its frames."""

from __future__ import annotations

import pytest

from shared.pace import Pace


def test_before_the_first_frame():
    """Ten seconds from when it was asked for: nothing is known of the link yet."""
    pace = Pace(0.5, now=100.0)
    assert [pace.left_s(now) for now in (100.0, 104.0, 110.0, 200.0)] == [10.0, 6.0, 0.0, 0.0]


def test_a_fast_link_gets_the_floor_and_a_slow_one_four_times_its_pace():
    """Frames every 0.01 s: the floor of 0.5 s. Frames every 5 s: 20 s, counted from the last one."""
    for gap, patience in ((0.01, 0.5), (5.0, 20.0)):
        pace = Pace(0.5, now=0.0)
        for number in range(1, 6):
            pace.heard(number * gap)
        assert pace.left_s(5 * gap) == pytest.approx(patience)
        assert pace.left_s(5 * gap + 0.2) == pytest.approx(patience - 0.2)


def test_the_slowest_recent_gap_counts_and_fades():
    """A burst after a pause of 4 s does not shorten patience at once: 16, then 0.9 of it with each quick frame."""
    pace = Pace(0.5, now=0.0)
    pace.heard(4.0)
    left = []
    for _ in range(4):
        left.append(pace.left_s(4.0))
        pace.heard(4.0)
    assert left == pytest.approx([16.0, 16.0 * 0.9, 16.0 * 0.9**2, 16.0 * 0.9**3])


def test_each_silence_doubles_the_next_until_a_frame_comes():
    """1, 2, 4 s after one frame a 0.25 s pace, never more than a minute; one frame, and it is as before."""
    pace = Pace(0.5, now=0.0)
    pace.heard(0.25)
    left = [pace.left_s(0.25)]
    for _ in range(7):
        pace.gave_up(0.25)
        left.append(pace.left_s(0.25))
    assert left == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    pace.heard(0.5)
    assert pace.left_s(0.5) == 1.0


def test_a_silence_of_days():
    """A minute at a time, for months: still a minute, and no overflow."""
    pace = Pace(0.5, now=0.0)
    for minute in range(100_000):
        pace.gave_up(60.0 * minute)
    assert pace.left_s(60.0 * 99_999) == 60.0


def test_a_clock_that_stands_still_gives_patience_all_the_same():
    """In virtual time frames may come at once: the gap is zero, the floor holds."""
    pace = Pace(0.5, now=0.0)
    pace.heard(0.0)
    assert pace.left_s(0.0) == 0.5
