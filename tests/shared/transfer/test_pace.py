"""Patience with a link, from the pace of its frames."""

from __future__ import annotations

import pytest

from shared.protocol.messages import BLOCK_BYTES, Room
from shared.transfer.pace import SMALLEST_FRAME_BYTES, Pace
from shared.transfer.receiver import Allowance, Policy, push_credit

FRAME = 256 * 1024


def test_before_the_first_frame():
    """Ten seconds from when it was asked for: nothing is known of the link yet."""
    pace = Pace(0.5, now=100.0, frame_bytes=FRAME)
    assert [pace.remaining_s(now) for now in (100.0, 104.0, 110.0, 200.0)] == [10.0, 6.0, 0.0, 0.0]


def test_a_fast_link_gets_the_floor_and_a_slow_one_four_times_its_pace():
    """Frames every 0.01 s: the floor of 0.5 s. Frames every 5 s: 20 s, counted from the last one."""
    for gap, patience in ((0.01, 0.5), (5.0, 20.0)):
        pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
        for number in range(1, 6):
            pace.note_frame(number * gap)
        assert pace.remaining_s(5 * gap) == pytest.approx(patience)
        assert pace.remaining_s(5 * gap + 0.2) == pytest.approx(patience - 0.2)


def test_the_slowest_recent_gap_counts_and_fades():
    """A burst after a pause of 4 s does not shorten patience at once: 16, then 0.9 of it with each quick frame."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    pace.note_frame(4.0)
    left = []
    for _ in range(4):
        left.append(pace.remaining_s(4.0))
        pace.note_frame(4.0)
    assert left == pytest.approx([16.0, 16.0 * 0.9, 16.0 * 0.9**2, 16.0 * 0.9**3])


def test_each_silence_doubles_the_next_until_a_frame_comes():
    """1, 2, 4 s after one frame a 0.25 s pace, never more than a minute; one frame, and it is as before."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    pace.note_frame(0.25)
    left = [pace.remaining_s(0.25)]
    for _ in range(7):
        pace.time_out(0.25)
        left.append(pace.remaining_s(0.25))
    assert left == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    pace.note_frame(0.5)
    assert pace.remaining_s(0.5) == 1.0


def test_a_silence_of_days():
    """A minute at a time, for months: still a minute, and no overflow."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    for minute in range(100_000):
        pace.time_out(60.0 * minute)
    assert pace.remaining_s(60.0 * 99_999) == 60.0


def test_a_clock_that_stands_still_gives_patience_all_the_same():
    """In virtual time frames may come at once: the gap is zero, the floor holds."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    pace.note_frame(0.0)
    assert pace.remaining_s(0.0) == 0.5


def test_a_sender_that_is_back_is_waited_for_as_at_first():
    """An outage doubled the patience twice; what counts from its return is the pace it had before."""
    pace = Pace(1.0, now=0.0, frame_bytes=FRAME)
    pace.note_frame(0.5)
    for now in (10.0, 20.0):
        pace.time_out(now)
    assert pace.remaining_s(20.0) == 8.0
    pace.note_outage(30.0)
    assert pace.remaining_s(30.0) == 2.0


def test_what_is_under_way_on_a_slow_link_stays_short():
    """Frames every 0.5 s: six of them, 3 s, so that no task or ping waits longer behind them; every 9 s: still two."""
    for gap, window in ((0.01, 16), (0.5, 6), (9.0, 2)):
        pace = Pace(1.0, now=0.0, frame_bytes=FRAME)
        assert pace.window(16) == 16
        pace.note_frame(gap)
        assert pace.window(16) == window


def test_a_frame_that_takes_too_long_is_asked_for_in_halves():
    """6 s, 5.5 s: halved twice; after four quick ones they grow again to what the sender sends, and not beyond."""
    pace = Pace(1.0, now=0.0, frame_bytes=FRAME)
    sizes, now = [], 0.0
    for gap in (3.0, 6.0, 5.5, 2.0, *[0.5] * 8):
        now += gap
        pace.note_frame(now)
        sizes.append(pace.frame_bytes)
    assert sizes == [FRAME, FRAME // 2, *[FRAME // 4] * 5, *[FRAME // 2] * 3, FRAME, FRAME]


def test_frames_that_never_come_whole_are_asked_for_smaller():
    """One silence may be a broker that restarts; from the second on they are halved, down to 16 KiB."""
    pace, sizes = Pace(1.0, now=0.0, frame_bytes=FRAME), []
    for now in range(8):
        pace.time_out(float(now))
        sizes.append(pace.frame_bytes // 1024)
    assert sizes == [256, 128, 64, 32, 16, 16, 16, 16]


@pytest.mark.parametrize("usual", [1024, 5 * 1024])
def test_small_frames_stay_whole_blocks(usual):
    pace = Pace(1.0, now=0.0, frame_bytes=usual)
    for now in range(4):
        pace.time_out(float(now))
        assert pace.frame_bytes == usual


def test_a_sender_that_comes_back_before_any_frame_is_asked_for_smaller_ones():
    """They outlast its keep-alive: each return halves them until one comes; after that a return changes nothing."""
    pace, sizes = Pace(1.0, now=0.0, frame_bytes=FRAME), []
    for now in (10.0, 20.0):
        pace.note_outage(now)
        sizes.append(pace.frame_bytes)
    pace.note_frame(22.0)
    pace.note_outage(30.0)
    assert [*sizes, pace.frame_bytes] == [FRAME // 2, FRAME // 4, FRAME // 4]


def test_frames_that_begin_small_grow_while_they_come_quickly():
    """16 KiB, then twice as much each, up to what the sender sends; a slower one stays as it is."""
    pace, sizes = Pace(1.0, now=0.0, frame_bytes=FRAME), []
    pace.begin_small()
    for now in (0.1, 0.2, 1.2, 1.3, 1.4, 1.5):
        sizes.append(pace.frame_bytes // 1024)
        pace.note_frame(now)
    assert [*sizes, pace.frame_bytes // 1024] == [16, 32, 64, 64, 128, 256, 256]


@pytest.mark.parametrize("held", [1, 2, 3])
@pytest.mark.parametrize("rate", [12e3, 24e3, 48e3, 100e3, 300e3, 3e6])
def test_no_more_is_under_way_than_passes_in_a_keep_alive_of_five_seconds(rate, held):
    """From 12 kB/s on, also where lost packets hold frames up so that several come at once: less than 3 s of it."""
    pace = Pace(1.0, now=0.0, frame_bytes=FRAME)
    pace.begin_small()
    now, waiting, longest_s = 0.02, [], 0.0
    for _ in range(80):
        now += pace.frame_bytes / rate
        waiting.append(pace.frame_bytes)
        if len(waiting) >= held:
            for size in waiting:
                pace.note_frame(now, size)
                longest_s = max(longest_s, pace.window(16) * pace.frame_bytes / rate)
            waiting.clear()
    assert longest_s < 3.0
    assert pace.frame_bytes == FRAME or pace.frame_bytes / rate > 0.6


def test_a_short_piece_that_comes_quickly_is_no_quick_frame():
    """What is left of a window: 16 of the 64 KiB asked for in 0.5 s are no reason to ask for 128."""
    for size, grown in ((16 * 1024, 1), (64 * 1024, 2), (None, 2)):
        pace = Pace(1.0, now=0.0, frame_bytes=FRAME)
        for now in (6.0, 12.0):
            pace.note_frame(now)
        assert pace.frame_bytes == 64 * 1024
        for number in range(4):
            pace.note_frame(12.5 + number / 2, size)
        assert pace.frame_bytes == 64 * 1024 * grown


def test_larger_frames_are_fewer_under_way():
    """0.5 s each while small: six; twice as large they will take 1 s each: three, before the first of them has come."""
    pace = Pace(1.0, now=0.0, frame_bytes=FRAME)
    pace.begin_small()
    assert pace.window(16) == 16
    pace.note_frame(0.5)
    assert (pace.frame_bytes, pace.window(16)) == (32 * 1024, 3)


@pytest.mark.parametrize(("gap", "expected"), [(5.0, FRAME), (5.01, FRAME // 2)])
def test_a_frame_may_take_five_seconds_and_no_more(gap, expected):
    """Far below the keep-alive: one that takes longer is asked for at half the size from then on."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    pace.note_frame(gap)
    assert pace.frame_bytes == expected


def test_another_payload_begins_with_no_silence_behind_it():
    """Whatever its predecessor's end was like: its first patience is not doubled."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    pace.time_out(10.0)
    pace.begins(100.0)
    assert pace.remaining_s(100.0) == 10.0


@pytest.mark.parametrize(("senders", "frames"), [(0, 16), (1, 16), (3, 16), (4, 12), (10, 4), (1000, 2)])
def test_all_senders_together_have_no_more_under_way_than_the_budget(senders: int, frames: int) -> None:
    """But two frames each: one that travels and one that waits."""
    assert Policy(16, 2.0, 1 << 20, budget=48).share(senders) == frames


def test_a_receiver_has_room_once_it_knows_the_pace_and_no_more_than_three_seconds_of_it() -> None:
    """Derivation: frames of 16 KiB each second leave room for three; each 0.01 s, for all of the window."""
    slow, quick = Pace(2.0, 0.0, SMALLEST_FRAME_BYTES), Pace(2.0, 0.0, SMALLEST_FRAME_BYTES)
    assert push_credit(slow, 16) == Room(blocks=0, frame_bytes=SMALLEST_FRAME_BYTES)
    slow.note_frame(1.0, SMALLEST_FRAME_BYTES)
    quick.note_frame(0.01, SMALLEST_FRAME_BYTES)
    assert push_credit(slow, 16).blocks == 3 * 16
    assert push_credit(quick, 16).blocks == 16 * 16


def test_while_nothing_comes_little_is_asked_for():
    """Two frames after a silence, and the whole window again as soon as one comes."""
    pace, windows = Pace(1.0, now=0.0, frame_bytes=FRAME), []
    for step in (lambda: None, lambda: pace.time_out(10.0), lambda: pace.note_frame(10.1), lambda: pace.doubt(12.0)):
        step()
        windows.append(pace.window(16))
    assert windows == [16, 2, 16, 2]


def test_a_word_of_the_sender_makes_patience_short_again():
    """A minute after silences, as at the pace of before after a word; frames never grow by it."""
    pace, left = Pace(1.0, now=0.0, frame_bytes=FRAME), []
    pace.note_frame(0.5)
    for now in range(10, 20):
        pace.time_out(float(now))
    before = pace.frame_bytes
    for now in (20.0, 30.0):
        left.append(pace.remaining_s(now))
        pace.doubt(now)
    assert left[0] > 50.0
    assert (left[1], pace.remaining_s(30.0)) == (0.0, 2.0)
    assert pace.frame_bytes <= before


def test_the_first_frame_of_a_link_that_is_known_is_waited_for_less_long():
    for gap, first in ((0.01, 3.0), (1.5, 6.0), (5.0, 10.0)):
        before, pace = Pace(1.0, now=0.0, frame_bytes=FRAME), Pace(1.0, now=50.0, frame_bytes=FRAME)
        pace.remember(before)
        assert pace.remaining_s(50.0) == 10.0
        before.note_frame(gap)
        pace.remember(before)
        assert pace.remaining_s(50.0) == pytest.approx(first)


def test_a_sender_that_is_there_in_vain_is_asked_for_less_the_second_time():
    """Nothing of what was asked for will come: a window of two, and from the next such answer on half the frame."""
    pace = Pace(0.5, now=0.0, frame_bytes=FRAME)
    sizes = []
    for now in (1.0, 2.0):
        pace.doubt(now)
        sizes.append((pace.frame_bytes, pace.window(64)))
    assert sizes == [(FRAME, 2), (FRAME // 2, 2)]


def test_bytes_are_expected_until_as_many_have_come_as_were_asked_for():
    expected = Allowance(most=8 * BLOCK_BYTES)
    assert not expected.take(1)
    expected.ask((0, 2))
    assert [expected.take(BLOCK_BYTES) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("small", [True, False])
def test_frames_that_never_come_while_smaller_ones_do_are_asked_for_no_more(small):
    """As from a broker that acknowledges and drops large messages: each growth cost a silence, for ever."""
    pace, now, silences = Pace(5.0, 0.0, 256 << 10), 0.0, 0
    if small:
        pace.begin_small()
    for _ in range(40):
        if pace.frame_bytes > 100 << 10:
            now, silences = now + pace.remaining_s(now), silences + 1
            pace.time_out(now)
        else:
            now += 0.01
            pace.note_frame(now, pace.frame_bytes)
    assert pace.frame_bytes == pace.ceiling == 64 << 10
    assert silences <= (1 if small else 4)
    later = Pace(5.0, now, 256 << 10)
    later.remember(pace)
    for _ in range(20):
        now += 0.01
        later.note_frame(now, later.frame_bytes)
    assert later.frame_bytes == 64 << 10


def test_a_link_that_was_away_keeps_its_large_frames():
    """Frames of that size had come before: the silence says nothing of them."""
    pace, now = Pace(5.0, 0.0, 256 << 10), 0.0
    for _ in range(4):
        now += 0.01
        pace.note_frame(now, pace.frame_bytes)
    for _ in range(4):
        now += 60
        pace.time_out(now)
    for _ in range(40):
        now += 0.01
        pace.note_frame(now, pace.frame_bytes)
    assert (pace.frame_bytes, pace.ceiling) == (256 << 10, None)


def test_frames_that_are_small_by_choice_limit_no_later_ones():
    """A sender may cut its next payload larger: only frames that did not come are held against a size."""
    small, now = Pace(5.0, 0.0, 64 << 10), 0.0
    for _ in range(8):
        now += 0.01
        small.note_frame(now, small.frame_bytes)
    larger = Pace(5.0, now, 256 << 10)
    larger.remember(small)
    assert (small.ceiling, larger.ceiling, larger.frame_bytes) == (None, None, 256 << 10)
