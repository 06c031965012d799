"""Compute, link and power models with constants from the plan."""

from __future__ import annotations

from edge_server.plan.links import GivenLink
from edge_server.plan.simulated_devices import GivenPower
from edge_server.replay.devices.components import Busy, Draw, Pace, Ways, steady_radio
from edge_server.replay.devices.curve import Curve, constant

MEGA = 1e6


def given_pace(seconds: float, source: str = "plan, compute given") -> Pace:
    """Return the pace of a device whose tasks all take as long."""
    busy = Busy(seconds)
    return Pace(takes=lambda _work, _t: busy, source=source, least=lambda _work: [busy])


def given_ways(table: GivenLink, source: str = "plan, link given") -> Ways:
    """Return the link with two fixed rates."""
    up, down = megabits(table.up_mbit_s), megabits(table.down_mbit_s)
    return Ways(up=up, down=down, delay_s=table.delay_s, loss=table.loss, source=source)


def megabits(rate: float | None) -> Curve | None:
    """Return a fixed rate; None for no limit."""
    return None if rate is None else constant(rate * MEGA)


def given_draw(table: GivenPower) -> Draw:
    """Return what a device draws that computes at one power, busy_w * t, and sends at another."""
    return Draw(
        charge=lambda busy: table.busy_w * busy.seconds,
        idle_w=table.idle_w,
        radio=steady_radio(table.tx_w, table.rx_w),
        source="plan, power given",
    )
