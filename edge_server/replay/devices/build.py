"""Build a device's behaviour from its tables in the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import GivenLink, RangeLink, TraceLink, WirelessLink
from edge_server.plan.simulated_devices import (
    CyclesPower,
    GivenCompute,
    GivenPower,
    ProfileCompute,
    ProfilePower,
    RangeCompute,
    TracePower,
)
from edge_server.replay.devices import given, link_trace, power_trace, profile, ranges, wireless
from edge_server.replay.devices.behaviour import Behaviour, Effort
from edge_server.replay.devices.components import ComputeCost, ComputeModel, EnergyModel, LinkModel
from shared.errors import ConfigError
from shared.protocol.measurements import Provenance


def build_behaviour(device: DevicePlan, index: int, seed: int) -> Behaviour:
    """Return the behaviour of a device of a plan.

    Args:
        index: Index in the fleet.
        seed: Seed of the random draws.

    Raises:
        ConfigError: A trace or profile of the device cannot be used.
    """
    try:
        link = build_link(device, index, seed)
        return combine(build_compute(device, seed), link, build_power(device, link.tx_w, index, seed))
    except ConfigError as error:
        raise ConfigError(f"device {device.name}: {error}") from error


def combine(pace: ComputeModel, link: LinkModel, draw: EnergyModel) -> Behaviour:
    """Return the behaviour made of a compute, a link and an energy model."""
    return Behaviour(
        compute=lambda work, t: _effort(pace.takes(work, t), pace, draw),
        least=lambda work: _cheapest([_effort(busy, pace, draw) for busy in pace.least(work)]),
        up=link.up,
        down=link.down,
        delay_s=link.delay_s,
        loss=link.loss,
        radio=draw.radio,
        of_round=link.of_round,
        provenance=_modelled_provenance(download_s=link.source, upload_s=link.source)
        | _modelled_provenance(download_joules=draw.source, upload_joules=draw.source),
        warnings=link.warnings,
    )


def _effort(busy: ComputeCost, pace: ComputeModel, draw: EnergyModel) -> Effort:
    joules = draw.charge(busy)
    provenance = _modelled_provenance(
        compute_s=pace.source,
        cycles=pace.source if busy.cycles is not None else "",
        compute_joules=draw.source if joules is not None else "",
    )
    return Effort(busy.seconds, busy.cycles, joules, draw.idle_w, provenance)


def _cheapest(efforts: list[Effort]) -> Effort:
    """Return the smallest seconds and the smallest joules, possibly of different efforts."""
    joules = [effort.joules for effort in efforts if effort.joules is not None]
    return replace(min(efforts, key=lambda effort: effort.seconds), joules=min(joules, default=None))


def _modelled_provenance(**sources: str) -> dict[str, Provenance]:
    return {name: Provenance(source=source, quality="modelled") for name, source in sources.items() if source}


def build_compute(device: DevicePlan, seed: int) -> ComputeModel:
    """Return the compute model of a device."""
    match device.compute:
        case None:
            return given.constant_compute(device.compute_s, source="")
        case GivenCompute():
            return given.constant_compute(device.compute.seconds)
        case RangeCompute():
            return ranges.range_compute(device.compute, seed, device.name)
        case ProfileCompute():
            return profile.profile_compute(device.compute, seed, device.name)
        case never:
            assert_never(never)


def build_link(device: DevicePlan, index: int, seed: int) -> LinkModel:
    """Return the link model of a device.

    Args:
        index: Index in the fleet.
    """
    match device.link:
        case None:
            rates = GivenLink(up_mbit_s=device.up_mbit_s, down_mbit_s=device.down_mbit_s, delay_s=device.delay_s)
            return given.constant_link(rates, source="")
        case GivenLink():
            return given.constant_link(device.link)
        case RangeLink():
            return ranges.range_link(device.link, seed, device.name)
        case WirelessLink():
            return wireless.wireless_link(device.link, seed, device.name)
        case TraceLink():
            return link_trace.trace_link(device.link, index, seed, device.name)
        case never:
            assert_never(never)


def build_power(device: DevicePlan, tx_w: float | None, index: int, seed: int) -> EnergyModel:
    """Return the energy model of a device.

    Args:
        tx_w: Transmit power of its link, in watts; None if unknown.
        index: Index in the fleet.
    """
    match device.power:
        case None:
            return EnergyModel()
        case GivenPower():
            return given.constant_power(device.power)
        case CyclesPower():
            return ranges.cycles_power(device.power, tx_w, seed, device.name)
        case ProfilePower():
            return profile.profile_power(device.power)
        case TracePower():
            return power_trace.trace_power(device.power, index)
        case never:
            assert_never(never)
