"""The board's power: the best source of its profile that answers, rails apart, the total without double counting."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from device_agent.config import MeterConfig
from device_agent.probes.base import Found, absent
from device_agent.probes.power import battery, ina2xx, ina3221, pmic, rapl, tegrastats
from device_agent.probes.power.http_meter import HttpMeter
from device_agent.probes.power.model import Modelled
from device_agent.probes.power.rails import Ask, Rails, checked, corrected, summands, summed
from device_agent.profile.schema import Power, PowerModel, Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Provenance, Quality, Reading
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

SENSORS: Mapping[str, Callable[[Path], Ask]] = {
    "ina3221": ina3221.find,
    "pmic": pmic.find,
    "ina2xx": ina2xx.find,
    "battery": battery.find,
    "tegrastats": tegrastats.find,
}
BUILT_IN = frozenset({"ina3221", "pmic", "tegrastats"})
"""Sensors whose rails only the profile can know, and which its correction is for; the others measure what flows into
the board, from outside."""

SHORTEST_PERIOD_S = {"battery": 5.0, "tegrastats": 5.0}
"""A battery's chip says something new every few seconds; tegrastats is a process of its own for every line."""

NAMED = 3
"""So many rails a source's name lists; more are counted."""

TOTAL = "power.total_watts"


class PowerSource(Protocol):
    """Reads the board's total power, again and again; keeps what it needs between two reads.

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
    """Reads the rails that make the total, and no others."""

    kind: Literal["instant", "mean"] = "instant"

    def __init__(self, name: str, root: Path, power: Power, clock: Clock) -> None:
        """Find the sensor and read it; raises NoData where it gives no total."""
        self._name, self._power, self._clock = name, power, clock
        self._ask = SENSORS[name](root)
        self._labels = _labels(name, power, self._ask(None))
        self.provenance = provenance(name, power, self._labels)
        self.period_s = max(period_s(power), SHORTEST_PERIOD_S.get(name, 0.0))
        began = clock()
        self.read()
        self.cost_s = clock() - began

    def read(self) -> Reading:
        return total(self._name, self._power, self._ask(self._labels), self._clock())


def open_source(  # noqa: D417 - the first three are everybody's
    root: Path,
    profile: Profile,
    clock: Clock,
    *,
    meter: MeterConfig | None = None,
    calibrated: PowerModel | None = None,
) -> PowerSource:
    """Return the network meter if one is given, else the first source of the profile that answers.

    Args:
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
            return _open(name, root, profile, clock, calibrated)
        except NoData as error:
            log.debug("power source %s: %s", name, error)
            refusals[name] = error
    raise _none(refusals)


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return `power.total_watts`, and `power.<rail>_watts` of every rail; counters as `power.<zone>_joules`.

    The total is that of the source that `open_source` would choose. With counters and models it takes two reads, which
    only an open source can make: here it is `busy` then. A better source that was passed over is an absence too.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    refusals: dict[str, NoData] = {}
    facts: dict[str, str] = {}
    for name in profile.power.sources:
        try:
            found = _once(name, root, profile, at)
        except NoData as error:
            refusals[name] = error
            continue
        readings, missing = found.readings | readings, found.absent | missing
        if name in SENSORS and TOTAL not in found.readings:
            refusals[name] = NoData(missing[TOTAL].cause, lack=missing.pop(TOTAL).lack)
            continue
        facts = found.facts
        break
    else:
        if not readings and not missing:
            raise _none(refusals)
        missing[TOTAL] = absent(_none(refusals))
    missing |= {f"power.{name}": absent(error) for name, error in refusals.items() if error.lack != "not_present"}
    return Found(readings=readings, absent=missing, facts=facts)


def total(name: str, power: Power, rails: Rails, at: float) -> Reading:
    """Return the total of a sensor's rails; raises NoData."""
    labels = _labels(name, power, rails)
    told = provenance(name, power, labels)
    watts = checked(summed(labels, rails), (0.0, math.inf))
    watts = checked(corrected(watts, power) if name in BUILT_IN else watts, power.valid_w)
    uncertainty = None if told.uncertainty is None else watts * told.uncertainty
    return Reading(value=watts, unit="watts", source=told.source, quality=told.quality, at=at, uncertainty=uncertainty)


def provenance(name: str, power: Power, labels: Sequence[str]) -> Provenance:
    """Return where a sensor's total comes from: its rails by name, or how many there are."""
    rails = "+".join(labels) if len(labels) <= NAMED else f"sum of {len(labels)} rails"
    right = name in BUILT_IN and (power.gain, power.offset_w) != (1, 0)
    quality: Quality = "corrected" if right else "measured"
    return Provenance(source=f"{name} {rails}", quality=quality, uncertainty=power.uncertainty)


def period_s(power: Power) -> float:
    """Return the pause between reads that a profile recommends."""
    return 1 / min(power.sample_hz, power.max_hz)


def _labels(name: str, power: Power, rails: Rails) -> tuple[str, ...]:
    return summands(power, rails, by_profile=name in BUILT_IN)


def _none(refusals: Mapping[str, NoData]) -> NoData:
    """Return why no source gives a total; what could be put right names the lack."""
    lacks = [error.lack for error in refusals.values() if error.lack != "not_present"]
    causes = "; ".join(f"{name}: {error}" for name, error in refusals.items())
    return NoData(causes or "the profile names no source", lack=lacks[0] if lacks else "not_present")


def _open(name: str, root: Path, profile: Profile, clock: Clock, calibrated: PowerModel | None) -> PowerSource:
    if name == "rapl":
        return rapl.Counters(root, profile.power, clock, period_s=period_s(profile.power))
    if name == "model":
        model = calibrated or profile.power.model
        return Modelled(root, profile, clock, model=model, calibrated=calibrated is not None)
    if name == "http":
        raise NoData("no meter is configured")
    return SensorSource(name, root, profile.power, clock)


def _once(name: str, root: Path, profile: Profile, at: float) -> Found:
    """Return what one source says without a second read; raises NoData."""
    scope: dict[str, str] = {"power.scope": "machine" if name == "battery" else profile.power.scope}
    if name == "rapl":
        return rapl.once(root, at, profile.power.scope)
    if name == "model":
        if profile.power.model is None:
            raise NoData(f"profile {profile.id} has no power model")
        return Found(absent={TOTAL: Absent(lack="busy", cause="a model of busy CPUs needs two reads")}, facts=scope)
    if name == "http":
        raise NoData("a meter is read by its own address")
    rails = SENSORS[name](root)(None)
    readings = {
        f"power.{label}_watts": Reading(value=watts, unit="watts", source=f"{name} {label}", quality="measured", at=at)
        for label, watts in rails.watts.items()
    }
    missing = {f"power.{label}_watts": lack for label, lack in rails.lacks.items()}
    try:
        readings[TOTAL] = total(name, profile.power, rails, at)
    except NoData as error:
        missing[TOTAL] = absent(error)
    return Found(readings=readings, absent=missing, facts=scope)
