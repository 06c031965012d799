"""Plan table `[emulation]`: link and power emulation for local agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import GivenLink
from edge_server.plan.sections import Section
from edge_server.plan.simulated_devices import CyclesPower, GivenPower, RangeCompute
from shared.errors import ConfigError


class EmulationPlan(Section, frozen=True, kw_only=True):
    """Emulation of tables of `[[device]]` for agents on this machine; compute speed is not emulated.

    Remote devices keep their real links and meters.

    Attributes:
        links: Every agent reaches its broker through a relay with the rates and delay of its device's link; needs no
            privileges. Sites reach each other at the backhaul's rate. Fixed rates only.
        power: An agent's joules are modelled: idle watts always, busy watts by the CPU seconds of its trainer, radio
            watts while it sends and receives. Tables `power` of kind `given`, or `cycles` at one clock, where a busy
            core draws kappa * hertz^3.
    """

    links: bool = False
    power: bool = False


class GivenRates(NamedTuple):
    """Link with fixed rates in Mbit/s (None: no limit) and a one-way delay in seconds."""

    up_mbit_s: float | None
    down_mbit_s: float | None
    delay_s: float


class Watts(NamedTuple):
    """Power of a device: idle, and in addition to that per busy core, while sending and while receiving."""

    idle_w: float
    busy_w: float
    tx_w: float | None
    rx_w: float | None


def emulated_link(device: DevicePlan) -> GivenRates:
    """Return the link to emulate for a device.

    Raises:
        ValueError: It has no fixed rates, or loses frames.
    """
    link = device.link
    if link is None:
        return GivenRates(device.up_mbit_s, device.down_mbit_s, device.delay_s)
    if not isinstance(link, GivenLink) or link.loss:
        raise ValueError('its link cannot be emulated; use kind = "given" without loss')
    return GivenRates(link.up_mbit_s, link.down_mbit_s, link.delay_s)


def emulated_power(device: DevicePlan) -> Watts | None:
    """Return the power to emulate for a device; None if the plan has none.

    Raises:
        ValueError: The power model depends on figures that a local agent does not have.
    """
    power, compute = device.power, device.compute
    match power:
        case None:
            return None
        case GivenPower():
            idle_w = power.idle_w or 0.0
            tx_w, rx_w = (None if watts is None else max(0.0, watts - idle_w) for watts in (power.tx_w, power.rx_w))
            return Watts(idle_w, max(0.0, power.busy_w - idle_w), tx_w, rx_w)
        case CyclesPower() if isinstance(compute, RangeCompute):
            if isinstance(compute.hertz, float) and not isinstance(power.tx_w, tuple):
                return Watts(power.idle_w, power.kappa * compute.hertz**3, power.tx_w, power.rx_w)
    raise ValueError('its power cannot be emulated; use kind = "given", or "cycles" with one clock and one tx_w')


def check_emulation(emulation: EmulationPlan, devices: Sequence[DevicePlan], path: Path) -> None:
    """Reject devices whose tables cannot be emulated.

    Args:
        devices: Devices of the plan, expanded.

    Raises:
        ConfigError: The message names the device.
    """
    for device in devices:
        for key, is_enabled, emulate in (
            ("links", emulation.links, emulated_link),
            ("power", emulation.power, emulated_power),
        ):
            try:
                _ = emulate(device) if is_enabled else None
            except ValueError as error:
                raise ConfigError(f"{path}: emulation.{key}: device {device.name!r}: {error}") from error
