"""From measured figures to the papers' symbols."""

from __future__ import annotations

import pytest

from edge_server.allocation.device_facts import MeasuredResources, measured_resources
from shared.protocol.measurements import Cost, Reading, StepCost, TaskCost
from shared.protocol.messages import Report

STEP = StepCost(steps=10, seconds=0.25, joules=2.0, idle_w=3.0, cycles=4e8, hertz=1.6e9, weights=200_000, flops=7)


def report(*, rate: float | None = None, cost: Cost | None = None) -> Report:
    readings = {}
    if rate is not None:
        readings["link.up_bits_per_s"] = Reading(value=rate, unit="bit/s", source="tcp", quality="measured", at=1.0)
    spent = TaskCost(run="run", round=1, cost=cost) if cost else None
    return Report(device="pi", at=1.0, readings=readings, spent=spent)


def test_every_symbol():
    """alpha = 2.0 - 3.0*0.25; C = 4e8/2e5; nu = 8*1e6/4e6; p = (9.0 - 3.0*2.0)/2.0."""
    found = measured_resources(
        STEP, report(rate=4e6, cost=Cost(upload_s=2.0, upload_joules=9.0, idle_w=3.0)), 1_000_000
    )
    assert found == MeasuredResources(
        mu_s=0.25,
        alpha_joules=pytest.approx(1.25),
        nu_s=pytest.approx(2.0),
        tx_w=pytest.approx(1.5),
        cycles_per_weight=pytest.approx(2000.0),
        f_hertz=1.6e9,
        up_bits_per_s=4e6,
        weights=200_000,
        flops=7,
    )


def test_what_nobody_measured_is_none():
    """Not zero: a link of 0 bit/s, or no word at all, leaves nu open; without a sensor there is no alpha."""
    assert measured_resources(None, None, 1_000_000) == MeasuredResources()
    assert measured_resources(None, report(rate=0.0), 1_000_000) == MeasuredResources()
    bare = StepCost(steps=1, seconds=0.5, weights=10, flops=7)
    assert measured_resources(bare, report(), 1) == MeasuredResources(mu_s=0.5, weights=10, flops=7)
    assert measured_resources(None, report(cost=Cost(upload_s=0.0, upload_joules=1.0, idle_w=1.0)), 1).tx_w is None


def test_what_cannot_be_true_is_none():
    """A device may say anything."""
    assert measured_resources(None, report(rate=float("inf")), 1_000_000) == MeasuredResources()
    for cost in (
        Cost(upload_s=-1.0, upload_joules=2.0, idle_w=1.0),
        Cost(upload_s=1.0, upload_joules=float("inf"), idle_w=1.0),
    ):
        assert measured_resources(None, report(cost=cost), 1).tx_w is None


def test_noise_makes_no_negative_cost():
    """A step that drew less than the idle board before it costs nothing beyond idle."""
    quiet = StepCost(steps=1, seconds=1.0, joules=2.9, idle_w=3.0, weights=1, flops=1)
    assert measured_resources(quiet, None, 1).alpha_joules == 0.0
