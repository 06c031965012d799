"""Power probe: the best source of the profile that answers, rails apart, the total without double counting."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from device_agent.config import MeterConfig
from device_agent.probes.base import ProbeResult, describe_absence
from device_agent.probes.power import battery, ina2xx, ina3221, pmic, rapl, tegrastats
from device_agent.probes.power.http_meter import HttpMeter
from device_agent.probes.power.model import ModelSource
from device_agent.probes.power.rails import (
    RailReader,
    Rails,
    choose_summands,
    correct_watts,
    refuse_implausible,
    sum_rails,
    validate_watts,
)
from device_agent.profile.schema import Power, PowerModel, Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Provenance, Quality, Reading
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

OPENERS: Mapping[str, Callable[[Path], RailReader]] = {
    "ina3221": ina3221.open_sensor,
    "pmic": pmic.open_sensor,
    "ina2xx": ina2xx.open_sensor,
    "battery": battery.open_sensor,
    "tegrastats": tegrastats.open_sensor,
}
BUILT_IN_SENSORS = frozenset({"ina3221", "pmic", "tegrastats"})
"""Sensors whose rails only the profile can know, and which its correction is for; the others measure what flows into
the board, from outside."""

SHORTEST_PERIOD_S = {"battery": 5.0, "tegrastats": 5.0}
"""A battery's chip says something new every few seconds; tegrastats is a process of its own for every line."""

MAX_NAMED_RAILS = 3
"""So many rails a source's name lists; more are counted."""

TOTAL_WATTS = "power.total_watts"


class PowerSource(Protocol):
    """Read the board's total power, again and again, keeping what is needed between two reads.

    Attributes:
        kind: `instant`: watts at the moment of the read; `mean`: mean watts since the read before (energy counters;
            their first read raises NoData with lack `busy`).
        provenance: Source, quality and uncertainty of every figure it gives.
        period_s: Pause between reads that the profile recommends.
        cost_s: What one read costs about, in seconds.
    """

    kind: Literal["instant", "mean"]
    provenance: Provenance
    period_s: float
    cost_s: float

    def read(self) -> Reading:
        """Return watts now. Raises NoData."""
        ...


class SensorSource:
    """Source that reads the rails that make the total, and no others.

    Attributes:
        clock: Of its readings.
    """

    kind: Literal["instant", "mean"] = "instant"

    def __init__(self, name: str, root: Path, power: Power, clock: Clock) -> None:
        """Find the sensor and read it; raises NoData where it gives no total."""
        self._name, self._power, self.clock = name, power, clock
        self._ask = open_sensor(name, root, power)
        self._labels = _choose_labels(name, power, self._ask(None))
        self.provenance = describe_total(name, power, self._labels)
        self.period_s = max(sample_period_s(power), SHORTEST_PERIOD_S.get(name, 0.0))
        began = clock()
        self.read()
        self.cost_s = clock() - began

    def read(self) -> Reading:
        return compute_total(self._name, self._power, self._ask(self._labels), self.clock())


def open_sensor(name: str, root: Path, power: Power) -> RailReader:
    """Open a sensor of rails, of which those whose watts cannot be are lacks.

    Args:
        name: Of the sensor.
        root: The board's root folder.
        power: The profile's table of power, which knows what the board cannot exceed.

    Raises:
        NoData: There is none.
    """
    ask = OPENERS[name](root)
    return lambda labels: refuse_implausible(ask(labels), power.valid_w[1])


def open_source(
    root: Path,
    profile: Profile,
    clock: Clock,
    *,
    meter: MeterConfig | None = None,
    calibrated: PowerModel | None = None,
) -> PowerSource:
    """Open the network meter if one is given, else the first source of the profile that answers.

    Args:
        root: The board's root folder.
        profile: Its firmware profile.
        clock: Monotonic seconds, for the readings.
        meter: A power meter on the network.
        calibrated: A power model fitted on this very board, which then stands for the profile's.

    Raises:
        NoData: None answers.
    """
    if meter is not None:
        return HttpMeter(meter, clock)
    refusals: dict[str, NoData] = {}
    for name in profile.power.sources:
        try:
            return _open_named(name, root, profile, clock, calibrated)
        except NoData as error:
            log.debug("power source %s: %s", name, error)
            refusals[name] = error
    raise _combine_refusals(refusals)


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `power.total_watts`, and `power.<rail>_watts` of every rail; counters as `power.<zone>_joules`.

    The total is that of the source that `open_source` would choose. With counters and models it takes two reads, which
    only an open source can make: here it is `busy` then. A better source that was passed over is an absence too.

    Args:
        root: The board's root folder.
        profile: Its firmware profile.
        at: Monotonic seconds of the readings.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    refusals: dict[str, NoData] = {}
    facts: dict[str, str] = {}
    for name in profile.power.sources:
        try:
            found = _read_once(name, root, profile, at)
        except NoData as error:
            refusals[name] = error
            continue
        readings, missing = found.readings | readings, found.absent | missing
        if name in OPENERS and TOTAL_WATTS not in found.readings:
            refusals[name] = NoData(missing[TOTAL_WATTS].cause, lack=missing.pop(TOTAL_WATTS).lack)
            continue
        facts = found.facts
        break
    else:
        if not readings and not missing:
            raise _combine_refusals(refusals)
        missing[TOTAL_WATTS] = describe_absence(_combine_refusals(refusals))
    missing |= {
        f"power.{name}": describe_absence(error) for name, error in refusals.items() if error.lack != "not_present"
    }
    return ProbeResult(readings=readings, absent=missing, facts=facts)


def compute_total(name: str, power: Power, rails: Rails, at: float) -> Reading:
    """Compute the total of a sensor's rails, in watts.

    Args:
        name: Of the sensor.
        power: The profile's table of power.
        rails: What the sensor reads now.
        at: Monotonic seconds of the reading.

    Raises:
        NoData: The rails make no total, or one that cannot be.
    """
    labels = _choose_labels(name, power, rails)
    provenance = describe_total(name, power, labels)
    watts = validate_watts(sum_rails(labels, rails), (0.0, math.inf))
    watts = validate_watts(correct_watts(watts, power) if name in BUILT_IN_SENSORS else watts, power.valid_w)
    uncertainty = None if provenance.uncertainty is None else watts * provenance.uncertainty
    return Reading(
        value=watts, unit="watts", source=provenance.source, quality=provenance.quality, at=at, uncertainty=uncertainty
    )


def describe_total(name: str, power: Power, labels: Sequence[str]) -> Provenance:
    """Return the provenance of a sensor's total: its rails by name, or how many there are.

    Args:
        name: Of the sensor.
        power: The profile's table of power.
        labels: Rails that are summed.
    """
    rails = "+".join(labels) if len(labels) <= MAX_NAMED_RAILS else f"sum of {len(labels)} rails"
    is_corrected = name in BUILT_IN_SENSORS and (power.gain, power.offset_w) != (1, 0)
    quality: Quality = "corrected" if is_corrected else "measured"
    return Provenance(source=f"{name} {rails}", quality=quality, uncertainty=power.uncertainty)


def sample_period_s(power: Power) -> float:
    """Return the pause between reads that a profile recommends."""
    return 1 / min(power.sample_hz, power.max_hz)


def _choose_labels(name: str, power: Power, rails: Rails) -> tuple[str, ...]:
    return choose_summands(power, rails, by_profile=name in BUILT_IN_SENSORS)


def _combine_refusals(refusals: Mapping[str, NoData]) -> NoData:
    """Return why no source gives a total; what could be put right names the lack."""
    lacks = [error.lack for error in refusals.values() if error.lack != "not_present"]
    causes = "; ".join(f"{name}: {error}" for name, error in refusals.items())
    return NoData(causes or "the profile names no source", lack=lacks[0] if lacks else "not_present")


def _open_named(name: str, root: Path, profile: Profile, clock: Clock, calibrated: PowerModel | None) -> PowerSource:
    if name == "rapl":
        return rapl.RaplSource(root, profile.power, clock, period_s=sample_period_s(profile.power))
    if name == "model":
        model = calibrated or profile.power.model
        return ModelSource(root, profile, clock, model=model, calibrated=calibrated is not None)
    if name == "http":
        raise NoData("no meter is configured")
    return SensorSource(name, root, profile.power, clock)


def _read_once(name: str, root: Path, profile: Profile, at: float) -> ProbeResult:
    """Return what one source gives without a second read; raises NoData."""
    scope: dict[str, str] = {"power.scope": "machine" if name == "battery" else profile.power.scope}
    if name == "rapl":
        return rapl.read_once(root, at, profile.power.scope)
    if name == "model":
        if profile.power.model is None:
            raise NoData(f"profile {profile.id} has no power model")
        return ProbeResult(
            absent={TOTAL_WATTS: Absent(lack="busy", cause="a model of busy CPUs needs two reads")}, facts=scope
        )
    if name == "http":
        raise NoData("a meter is read by its own address")
    rails = open_sensor(name, root, profile.power)(None)
    readings = {
        f"power.{label}_watts": Reading(value=watts, unit="watts", source=f"{name} {label}", quality="measured", at=at)
        for label, watts in rails.watts.items()
    }
    missing = {f"power.{label}_watts": lack for label, lack in rails.lacks.items()}
    try:
        readings[TOTAL_WATTS] = compute_total(name, profile.power, rails, at)
    except NoData as error:
        missing[TOTAL_WATTS] = describe_absence(error)
    return ProbeResult(readings=readings, absent=missing, facts=scope)
