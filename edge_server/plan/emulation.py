"""The table `[emulation]` of a plan: what of their tables `[[device]]` agents on this machine are held to."""

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
    """What of their tables `[[device]]` agents on this machine are held to; how fast they compute is never changed.

    Devices that connect from elsewhere have links and meters of their own.

    Attributes:
        links: Every agent reaches its broker through a relay that passes bytes at the rates of its device's link, and
            as late, which needs no rights; sites reach each other at the backhaul's. Links of fixed rates alone.
        power: An agent's joules are modelled: idle watts all the while, busy ones by the CPU seconds of its trainer,
            those of its radio while it sends and receives. Tables `power` of kind `given`, or `cycles` at one clock,
            where a busy core draws kappa * hertz^3.
    """

    links: bool = False
    power: bool = False


class GivenRates(NamedTuple):
    """A link of fixed rates, in Mbit/s, None for no limit; its delay each way, in seconds."""

    up_mbit_s: float | None
    down_mbit_s: float | None
    delay_s: float


class Watts(NamedTuple):
    """What a device draws: all the while, and besides that for each busy core, while sending, while receiving."""

    idle_w: float
    busy_w: float
    tx_w: float | None
    rx_w: float | None


def emulated_link(device: DevicePlan) -> GivenRates:
    """Return the link that an agent is held to.

    Raises:
        ValueError: It has no fixed rates, or loses frames.
    """
    link = device.link
    if link is None:
        return GivenRates(device.up_mbit_s, device.down_mbit_s, device.delay_s)
    if not isinstance(link, GivenLink) or link.loss:
        raise ValueError('its link is not emulated: give it kind = "given" without loss')
    return GivenRates(link.up_mbit_s, link.down_mbit_s, link.delay_s)


def emulated_power(device: DevicePlan) -> Watts | None:
    """Return what a device draws; None where the plan does not say.

    Raises:
        ValueError: It follows from what no agent on another board has.
    """
    power, compute = device.power, device.compute
    match power:
        case None:
            return None
        case GivenPower():
            idle_w = power.idle_w or 0.0
            above = (None if watts is None else max(0.0, watts - idle_w) for watts in (power.tx_w, power.rx_w))
            return Watts(idle_w, max(0.0, power.busy_w - idle_w), *above)
        case CyclesPower() if isinstance(compute, RangeCompute):
            if isinstance(compute.hertz, float) and not isinstance(power.tx_w, tuple):
                return Watts(power.idle_w, power.kappa * compute.hertz**3, power.tx_w, power.rx_w)
    raise ValueError('its power is not emulated: give it kind = "given", or "cycles" with one clock and one tx_w')


def check_emulation(emulation: EmulationPlan, devices: Sequence[DevicePlan], path: Path) -> None:
    """Refuse devices whose tables no agent can be held to.

    Args:
        devices: Of the plan, each by itself.

    Raises:
        ConfigError: As said; the message names the device.
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
