"""What counters say between two readings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.commands.diagnosis.board_text import compute_rates
from shared.protocol.measurements import Reading


def at(seconds: float, **values: float) -> dict[str, Reading]:
    return {
        name.replace("__", "."): Reading(value=value, unit="", source="s", quality="measured", at=seconds)
        for name, value in values.items()
    }


def test_joules_become_watts_and_bytes_bits() -> None:
    """100 J in 2 s are 50 W; 1000 bytes in 2 s are 4000 bit/s; 3 events in 2 s are 1.5 a second."""
    before = at(10.0, power__a_joules=5.0, net__x_sent_bytes=0, net__x_received_bytes=7, throttle__overcurrent_count=1)
    now = at(
        12.0, power__a_joules=105.0, net__x_sent_bytes=1000, net__x_received_bytes=7, throttle__overcurrent_count=4
    )
    assert {name: reading.value for name, reading in compute_rates(before, now).items()} == {
        "power.a_watts": 50.0,
        "net.x_sent_bits_per_s": 4000.0,
        "net.x_received_bits_per_s": 0.0,
        "throttle.overcurrent_per_s": 1.5,
    }


def test_the_load_is_busy_over_total_whatever_the_time_between() -> None:
    """3 s busy of 8 CPU seconds: 0.375; the clock of the readings does not come into it."""
    before = at(1.0, cputime__busy_seconds=10.0, cputime__total_seconds=100.0)
    now = at(3.0, cputime__busy_seconds=13.0, cputime__total_seconds=108.0)
    assert compute_rates(before, now)["cputime.load_ratio"].value == 0.375


def test_idle_time_that_goes_back_by_a_tick_leaves_a_full_load() -> None:
    """The kernel's iowait is not monotonic: 2.01 s busy of 2 s in all."""
    before = at(1.0, cputime__busy_seconds=10.0, cputime__total_seconds=100.0)
    now = at(2.0, cputime__busy_seconds=12.01, cputime__total_seconds=102.0)
    assert compute_rates(before, now)["cputime.load_ratio"].value == 1.0


def test_a_counter_that_went_back_or_was_not_there_gives_no_rate() -> None:
    """It wrapped, or the board started anew: how far it had come nobody knows."""
    before = at(1.0, power__a_joules=262143.0, cputime__busy_seconds=50.0, cputime__total_seconds=60.0)
    now = at(2.0, power__a_joules=3.0, power__new_joules=9.0, cputime__busy_seconds=1.0, cputime__total_seconds=2.0)
    assert compute_rates(before, now) == {}


def test_no_time_between_gives_no_rate() -> None:
    now = at(1.0, power__a_joules=3.0, cputime__busy_seconds=1.0, cputime__total_seconds=2.0)
    assert compute_rates(now, now) == {}


def test_what_is_no_counter_gives_no_rate() -> None:
    """Numbers of CPUs, free memory and temperatures go up and down."""
    before = at(1.0, cpu__online_count=2, memory__available_bytes=5, thermal__a_celsius=20)
    now = at(2.0, cpu__online_count=4, memory__available_bytes=9, thermal__a_celsius=30)
    assert compute_rates(before, now) == {}


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(1e-3, 1e6))
def test_the_rate_times_the_time_is_the_change(first, change, seconds) -> None:
    watts = compute_rates(at(0.0, power__a_joules=first), at(seconds, power__a_joules=first + change))["power.a_watts"]
    assert watts.value * seconds == pytest.approx(first + change - first)
