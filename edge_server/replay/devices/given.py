"""Compute, link and power models with constants from the plan."""

from __future__ import annotations

from edge_server.plan.links import GivenLink
from edge_server.plan.simulated_devices import GivenPower
from edge_server.replay.devices.components import ComputeCost, ComputeModel, EnergyModel, LinkModel, steady_radio
from edge_server.replay.devices.curve import Curve, constant

MEGA = 1e6


def constant_compute(seconds: float, source: str = "plan, compute given") -> ComputeModel:
    """Return a compute model in which every task takes the same seconds."""
    busy = ComputeCost(seconds)
    return ComputeModel(takes=lambda _work, _t: busy, source=source, least=lambda _work: [busy])


def constant_link(table: GivenLink, source: str = "plan, link given") -> LinkModel:
    """Return a link model of two fixed rates."""
    up, down = constant_rate(table.up_mbit_s), constant_rate(table.down_mbit_s)
    return LinkModel(up=up, down=down, delay_s=table.delay_s, loss=table.loss, source=source)


def constant_rate(rate: float | None) -> Curve | None:
    """Return a fixed rate from Mbit/s; None for no limit."""
    return None if rate is None else constant(rate * MEGA)


def constant_power(table: GivenPower) -> EnergyModel:
    """Return an energy model of fixed computing, idle, transmit and receive power."""
    return EnergyModel(
        charge=lambda busy: table.busy_w * busy.seconds,
        idle_w=table.idle_w,
        radio=steady_radio(table.tx_w, table.rx_w),
        source="plan, power given",
    )
