"""Sum power rails into a total without double counting."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec

from device_agent.profile.schema import Power
from shared.errors import NoData
from shared.protocol.measurements import Absent
from shared.protocol.plausible import LEAST_RAIL_W

NAME_PROFILE = "name the board's firmware profile in [board], see `device-agent profile list`"
NAME_CHIP = 'name the chip that measures it in [board.meter] (kind = "chip")'


class Rails(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a sensor's rails.

    Attributes:
        watts: By label; negative if the current flows backwards.
        lacks: Existing rails that cannot be read, by label.
        total_labels: Rails that make the total, if the sensor knows this without a profile.
        volts: By label, if the sensor measures voltage.
    """

    watts: dict[str, float]
    lacks: dict[str, Absent] = {}
    total_labels: tuple[str, ...] = ()
    volts: dict[str, float] = {}


RailReader: TypeAlias = Callable[[Collection[str] | None], Rails]
"""Reads the rails with the given labels, or with None all of a sensor; raises NoData."""


def choose_summands(power: Power, rails: Rails, *, by_profile: bool) -> tuple[str, ...]:
    """Choose the labels whose sum is the total.

    Args:
        by_profile: True if only the profile knows the meaning of the sensor's rails; an added meter that the profile
            does not name measures the total itself.

    Raises:
        NoData: It is unknown which rails make the total, or they would count something twice.
    """
    named = bool(power.total) and set(power.total) <= rails.watts.keys() | rails.lacks.keys()
    labels = power.total if power.total and (by_profile or named) else rails.total_labels
    if not labels:
        available = ", ".join(sorted(rails.watts)) or "none"
        remedy = f"{NAME_PROFILE}, or {NAME_CHIP}" if by_profile else NAME_CHIP
        raise NoData(f"it is unknown which of the rails ({available}) make the total; {remedy}", lack="invalid")
    if not (by_profile or named):
        refuse_other_supply(labels, rails, power.supply_v)
    if twice := find_double_count(labels, {rail.label: rail.child_of for rail in power.rails}):
        raise NoData(f"the total would count {twice} twice", lack="invalid")
    return labels


def find_double_count(labels: Sequence[str], parents: Mapping[str, str]) -> str:
    """Return a label that is listed twice, or together with a rail that contains it; else empty."""
    for index, label in enumerate(labels):
        if label in labels[:index]:
            return label
        visited, ancestor = {label}, parents.get(label, "")
        while ancestor and ancestor not in visited:
            if ancestor in labels:
                return label
            visited.add(ancestor)
            ancestor = parents.get(ancestor, "")
    return ""


def sum_rails(labels: Sequence[str], rails: Rails) -> float:
    """Sum rails in watts; raises NoData if one is missing, instead of returning a smaller sum."""
    for label in labels:
        if label not in rails.watts:
            lack = rails.lacks.get(label, Absent(lack="not_present", cause="the sensor has no such rail"))
            raise NoData(f"{label}, a part of the total: {lack.cause}", lack=lack.lack)
    return math.fsum(rails.watts[label] for label in labels)


def refuse_other_supply(labels: Sequence[str], rails: Rails, supply_v: tuple[float, float]) -> None:
    """Refuse an added chip that does not measure the board's supply, such as one at the battery of a UPS.

    Args:
        supply_v: Voltage range of the board's input.

    Raises:
        NoData: The current flows backwards, or the voltage is out of range.
    """
    for label in labels:
        if rails.watts.get(label, 0.0) < 0:
            raise NoData(
                f"{label}: the current flows backwards ({rails.watts[label]:.3g} W): a battery charges, or the chip's "
                "inputs are swapped",
                lack="busy",
            )
        volts = rails.volts.get(label)
        if volts is not None and not supply_v[0] <= volts <= supply_v[1]:
            raise NoData(
                f"{label}: {volts:.3g} V is not this board's supply ({supply_v[0]:g} to {supply_v[1]:g} V), perhaps a "
                f"battery; if it feeds the board alone, {NAME_CHIP}",
                lack="invalid",
            )


def refuse_implausible(rails: Rails, power: Power) -> Rails:
    """Turn rails with implausible watts into lacks.

    Rails named by the profile only deliver power; on others, such as a battery's, current may flow either way.
    """
    least_w = dict.fromkeys((rail.label for rail in power.rails), LEAST_RAIL_W)
    most_w = power.valid_w[1]
    implausible = {
        label: Absent(lack="invalid", cause=f"{watts:g} W is implausible for a rail of this board")
        for label, watts in rails.watts.items()
        if not least_w.get(label, -most_w) <= watts <= most_w
    }
    if not implausible:
        return rails
    plausible = {label: watts for label, watts in rails.watts.items() if label not in implausible}
    return msgspec.structs.replace(rails, watts=plausible, lacks=rails.lacks | implausible)


def correct_watts(watts: float, power: Power) -> float:
    """Correct the total of a sensor that misses part of the board: gain * watts + offset_w."""
    return power.gain * watts + power.offset_w


def validate_watts(watts: float, bounds_w: tuple[float, float]) -> float:
    """Return a plausible total unchanged; raises NoData if it is not positive, not finite or out of bounds."""
    low, high = bounds_w
    if not (0 < watts < math.inf and low <= watts <= high):
        raise NoData(f"{watts:g} W is not within {low:g} to {high:g} W", lack="invalid")
    return watts
