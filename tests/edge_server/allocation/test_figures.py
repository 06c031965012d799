"""Which figure is decided from: by hand, and for whatever a device may say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.allocation.figures import Estimate, choose_figure
from edge_server.journal.decision import Figure
from shared.protocol.plausible import FIGURES

GOOD = Figure(1e6, "measured")


def pick(estimate: Estimate, last: Figure | None = None, *, jump: float = 8.0, smoothing: float = 0.0) -> Figure | None:
    return choose_figure("up_bits_per_s", estimate, last, jump=jump, smoothing=smoothing)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, None])
def test_what_cannot_be_true_gives_way_to_the_last_good_one_then_the_profile_then_a_default(nonsense):
    assert pick(Estimate(nonsense, profile=5.0, default=7.0), GOOD) == Figure(1e6, "last_good")
    assert pick(Estimate(nonsense, profile=5.0, default=7.0), Figure(1e6, "last_good")) == Figure(1e6, "last_good")
    assert pick(Estimate(nonsense, profile=5.0, default=7.0), Figure(9.0, "default")) == Figure(5.0, "profile")
    assert pick(Estimate(nonsense, profile=math.nan, default=7.0)) == Figure(7.0, "default")
    assert pick(Estimate(nonsense)) is None


def test_a_stale_reading_is_no_measurement():
    assert pick(Estimate(2e6, is_stale=True), GOOD) == Figure(1e6, "last_good")
    assert pick(Estimate(2e6, is_stale=True)) == Figure(2e6, "last_good")


def test_a_jump_is_taken_in_steps_and_smoothing_mixes():
    assert pick(Estimate(1e9), GOOD) == Figure(8e6, "measured")
    assert pick(Estimate(1e9), Figure(8e6, "measured")) == Figure(6.4e7, "measured")
    assert pick(Estimate(10.0), GOOD) == Figure(1.25e5, "measured")
    assert pick(Estimate(1e9), Figure(5.0, "profile")) == Figure(1e9, "measured")
    assert pick(Estimate(2e6), GOOD, smoothing=0.75) == Figure(1.25e6, "measured")


@given(
    measured=st.none() | st.floats(),
    profile=st.none() | st.floats(),
    last=st.none() | st.builds(Figure, st.floats(1.0, 1e12), st.sampled_from(["measured", "last_good", "profile"])),
    stale=st.booleans(),
)
def test_whatever_is_said_the_figure_can_be_true(measured, profile, last, stale):
    found = pick(Estimate(measured, stale, profile, 1e6), last)
    low, high = FIGURES["up_bits_per_s"]
    assert found is not None
    assert low <= found.value <= high
    if last and last.source != "profile" and found.source == "measured":
        assert last.value / 8.0001 <= found.value <= last.value * 8.0001
