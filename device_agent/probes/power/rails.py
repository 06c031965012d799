"""Sum power rails into a total: never one together with another that already contains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec

from device_agent.hardware.bounds import LEAST_RAIL_W
from device_agent.profile.schema import Power
from shared.errors import NoData
from shared.protocol.measurements import Absent

NAME_PROFILE = "name the board's firmware profile in [board], see `device-agent profile list`"
NAME_CHIP = 'name the chip that measures it in [board.meter] (kind = "chip")'


class Rails(msgspec.Struct, frozen=True, kw_only=True):
    """Watts of a sensor's rails now.

    Attributes:
        watts: By label; negative where the current flows backwards.
        lacks: Rails that are there and do not answer, by label.
        whole: Labels that together are all the sensor is there for, where it knows so without a profile.
        volts: By label, where the sensor says them.
    """

    watts: dict[str, float]
    lacks: dict[str, Absent] = {}
    whole: tuple[str, ...] = ()
    volts: dict[str, float] = {}


RailReader: TypeAlias = Callable[[Collection[str] | None], Rails]
"""Asks a sensor for some of its rails, or with None for all of them; raises NoData."""


def choose_summands(power: Power, rails: Rails, *, by_profile: bool) -> tuple[str, ...]:
    """Choose the labels whose sum is the total.

    Args:
        power: The profile's table of power.
        rails: All rails of the sensor.
        by_profile: Whether only the profile can know the sensor's rails; a meter that was added to the board, and
            that the profile does not name, is the total by itself.

    Raises:
        NoData: Nothing says which rails make the total, or they would count something twice.
    """
    named = bool(power.total) and set(power.total) <= rails.watts.keys() | rails.lacks.keys()
    labels = power.total if power.total and (by_profile or named) else rails.whole
    if not labels:
        known = ", ".join(sorted(rails.watts)) or "none"
        remedy = f"{NAME_PROFILE}, or {NAME_CHIP}" if by_profile else NAME_CHIP
        raise NoData(f"nothing says which of the rails ({known}) make the total: {remedy}", lack="invalid")
    if not (by_profile or named):
        refuse_other_supply(labels, rails, power.supply_v)
    if twice := find_double_count(labels, {rail.label: rail.child_of for rail in power.rails}):
        raise NoData(f"the total would count {twice} twice", lack="invalid")
    return labels


def find_double_count(labels: Sequence[str], parents: Mapping[str, str]) -> str:
    """Return a label that is there twice, or together with a rail that contains it; empty where there is none."""
    for place, label in enumerate(labels):
        if label in labels[:place]:
            return label
        seen, above = {label}, parents.get(label, "")
        while above and above not in seen:
            if above in labels:
                return label
            seen.add(above)
            above = parents.get(above, "")
    return ""


def sum_rails(labels: Sequence[str], rails: Rails) -> float:
    """Sum these rails in watts; raises NoData where one of them is missing, never a smaller sum."""
    for label in labels:
        if label not in rails.watts:
            lack = rails.lacks.get(label, Absent(lack="not_present", cause="the sensor has no such rail"))
            raise NoData(f"{label}, a part of the total: {lack.cause}", lack=lack.lack)
    return math.fsum(rails.watts[label] for label in labels)


def refuse_other_supply(labels: Sequence[str], rails: Rails, supply_v: tuple[float, float]) -> None:
    """Refuse a chip that does not measure the board's supply, such as one at the battery of a UPS.

    Args:
        labels: Of an added chip that would be the total.
        supply_v: Least and most volts at the board's input.

    Raises:
        NoData: The current flows backwards, or the voltage is another one.
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
    """Return rails without those whose watts cannot be, each a lack then.

    A rail that the profile names only delivers; on another one, such as that of a battery, current may flow either way.
    """
    least_w = dict.fromkeys((rail.label for rail in power.rails), LEAST_RAIL_W)
    most_w = power.valid_w[1]
    untrue = {
        label: Absent(lack="invalid", cause=f"{watts:g} W is nothing that a rail of this board carries")
        for label, watts in rails.watts.items()
        if not least_w.get(label, -most_w) <= watts <= most_w
    }
    if not untrue:
        return rails
    kept = {label: watts for label, watts in rails.watts.items() if label not in untrue}
    return msgspec.structs.replace(rails, watts=kept, lacks=rails.lacks | untrue)


def correct_watts(watts: float, power: Power) -> float:
    """Correct the total of a sensor that does not see everything: gain * watts + offset_w."""
    return power.gain * watts + power.offset_w


def validate_watts(watts: float, bounds_w: tuple[float, float]) -> float:
    """Return a total that can be true; a board that reads this draws something, so zero never is.

    Raises:
        NoData: It is zero or less, not finite, or out of bounds.
    """
    low, high = bounds_w
    if not (0 < watts < math.inf and low <= watts <= high):
        raise NoData(f"{watts:g} W is not within {low:g} to {high:g} W", lack="invalid")
    return watts
