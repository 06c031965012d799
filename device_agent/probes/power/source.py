"""Power probe: the best source of the profile that answers, rails apart, the total without double counting."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

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
    refuse_other_supply,
    sum_rails,
    validate_watts,
)
from device_agent.profile.schema import Power, PowerModel, Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Lack, Provenance, Quality, Reading
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)

OPENERS: Mapping[str, Callable[[Path], RailReader]] = {
    "ina3221": ina3221.open_sensor,
    "pmic": pmic.open_sensor,
    "ina2xx": ina2xx.open_sensor,
    "battery": battery.open_sensor,
    "tegrastats": tegrastats.open_sensor,
}
ADDED_SENSORS = ("ina2xx", "ina3221")
"""Whose chips people add to a board; `[board.meter]` may name one."""
RAIL_SENSORS = ("ina3221", "pmic", "ina2xx", "battery")
"""Sensors whose rails are read also where another one has the total; tegrastats, a process, reads the same chips."""
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
        provenance: Source, quality and uncertainty of every figure it gives, as a share.
        uncertainty_w: The part of its uncertainty that is the same at every load, in watts; 0 for none.
        period_s: Pause between reads that the profile recommends.
        cost_s: What one read costs about, in seconds.
    """

    kind: Literal["instant", "mean"]
    provenance: Provenance
    uncertainty_w: float
    period_s: float
    cost_s: float

    def read(self) -> Reading:
        """Return watts now. Raises NoData."""
        ...


class SensorSource:
    """Source that reads the rails that make the total, and no others."""

    kind: Literal["instant", "mean"] = "instant"

    def __init__(self, name: str, root: Path, power: Power, clock: Clock) -> None:
        """Find the sensor and read it; raises NoData where it gives no total."""
        self._name, self._power, self.clock = name, power, clock
        self.uncertainty_w = power.uncertainty_w
        self._ask = open_sensor(name, root, power)
        self._labels = _choose_labels(name, power, self._ask(None))
        self.provenance = describe_total(name, power, self._labels)
        self.period_s = max(sample_period_s(power), SHORTEST_PERIOD_S.get(name, 0.0))
        began = clock()
        self.read()
        self.cost_s = clock() - began

    def read(self) -> Reading:
        return compute_total(self._name, self._power, self._ask(self._labels), self.clock())


class ChipSource:
    """Source that reads the one chip, or channel, that `[board.meter]` names; whatever its voltage."""

    kind: Literal["instant", "mean"] = "instant"
    uncertainty_w, cost_s = 0.0, 0.0

    def __init__(self, config: MeterConfig, root: Path, power: Power, clock: Clock) -> None:
        self._label, self._root, self._power, self._clock = config.chip, root, power, clock
        self._ask: RailReader | None = None  # found at the first read, since its driver may be loaded later
        self.period_s = config.period_s
        self.provenance = Provenance(source=f"chip {config.chip}", quality="measured", uncertainty=power.uncertainty)

    def read(self) -> Reading:
        self._ask = self._ask or _find_chip(self._label, self._root, self._power)
        rails = self._ask((self._label,))
        refuse_other_supply((self._label,), rails, (0.0, math.inf))
        watts = validate_watts(sum_rails((self._label,), rails), self._power.valid_w)
        return Reading(
            value=watts,
            unit="watts",
            source=self.provenance.source,
            quality="measured",
            at=self._clock(),
            uncertainty=watts * self._power.uncertainty,
        )


def _find_chip(chip: str, root: Path, power: Power) -> RailReader:
    """Return the reader of the sensor that has a chip or channel of that name; raises NoData, says which there are."""
    known: list[str] = []
    for name in ADDED_SENSORS:
        try:
            ask = open_sensor(name, root, power)
            rails = ask(None)
        except NoData:
            continue
        if chip in rails.watts or chip in rails.lacks:
            return ask
        known += [*rails.watts, *rails.lacks]
    there = f"there is {', '.join(sorted(known))}" if known else "there is none"
    raise NoData(f"no power chip is called {chip!r} here ({there}): correct `chip` of [board.meter]")


def open_sensor(name: str, root: Path, power: Power) -> RailReader:
    """Open a sensor of rails, of which those whose watts cannot be are lacks.

    Args:
        root: The board's root folder.
        power: The profile's table of power, which knows what the board cannot exceed.

    Raises:
        NoData: There is none.
    """
    ask = OPENERS[name](root)
    return lambda labels: refuse_implausible(ask(labels), power)


def open_source(
    root: Path,
    profile: Profile,
    clock: Clock,
    *,
    meter: MeterConfig | None = None,
    calibrated: PowerModel | None = None,
) -> PowerSource:
    """Open the meter if one is given, else the first source of the profile that answers.

    Args:
        root: The board's root folder.
        clock: Monotonic seconds, for the readings.
        meter: A power meter on the network, or a chip.
        calibrated: A power model fitted on this very board, which then stands for the profile's.

    Raises:
        NoData: None answers.
    """
    if meter is not None:
        return ChipSource(meter, root, profile.power, clock) if meter.kind == "chip" else HttpMeter(meter, clock)
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

    Rails are those of all sensors of the profile. The total is that of the source that `open_source` would choose.
    With counters and models it takes two reads, which only an open source can make: here it is `busy` then. A better
    source that was passed over is an absence too.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    refusals: dict[str, NoData] = {}
    decisive = ""
    facts: dict[str, str] = {}
    for name in profile.power.sources:
        if decisive and name not in RAIL_SENSORS:
            continue
        try:
            found, total = _read_once(name, root, profile, at)
        except NoData as error:
            found, total = ProbeResult(), error
        readings, missing = found.readings | readings, found.absent | missing
        if decisive:
            continue
        if isinstance(total, Reading):
            readings[TOTAL_WATTS] = total
        else:
            refusals[name] = total
        if isinstance(total, Reading) or found.facts:
            decisive, facts = name, found.facts
    if TOTAL_WATTS not in readings:
        missing[TOTAL_WATTS] = describe_absence(_combine_refusals(refusals))
    missing |= {
        f"power.{name}": describe_absence(error)
        for name, error in refusals.items()
        if error.lack != "not_present" and name != decisive
    }
    return ProbeResult(readings=readings, absent=missing, facts=facts)


def compute_total(name: str, power: Power, rails: Rails, at: float) -> Reading:
    """Compute the total of a sensor's rails, in watts.

    Args:
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
    uncertainty = math.hypot(watts * (provenance.uncertainty or 0.0), power.uncertainty_w) or None
    return Reading(
        value=watts, unit="watts", source=provenance.source, quality=provenance.quality, at=at, uncertainty=uncertainty
    )


def describe_total(name: str, power: Power, labels: Sequence[str]) -> Provenance:
    """Return the provenance of a sensor's total: its rails by name, or how many there are.

    Args:
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
    """Return why no source gives a total: what could be put right, where there is something, and its lack."""
    curable = {name: error for name, error in refusals.items() if error.lack != "not_present"}
    causes = "; ".join(f"{name}: {error}" for name, error in (curable or refusals).items())
    lack: Lack = next((error.lack for error in curable.values()), "not_present")
    return NoData(causes or "the profile names no source", lack=lack)


def _open_named(name: str, root: Path, profile: Profile, clock: Clock, calibrated: PowerModel | None) -> PowerSource:
    if name == "rapl":
        return rapl.RaplSource(root, profile.power, clock, period_s=sample_period_s(profile.power))
    if name == "model":
        model = calibrated or profile.power.model
        return ModelSource(root, profile, clock, model=model, calibrated=calibrated is not None)
    if name == "http":
        raise NoData("no meter is configured")
    return SensorSource(name, root, profile.power, clock)


def _read_once(name: str, root: Path, profile: Profile, at: float) -> tuple[ProbeResult, Reading | NoData]:
    """Return what one source gives without a second read, and its total, or why there is none yet.

    Facts are those of a source that has a total, now or at the second read.

    Raises:
        NoData: It is not there.
    """
    scope: dict[str, str] = {"power.scope": "machine" if name == "battery" else profile.power.scope}
    if name == "rapl":
        found = rapl.read_once(root, at, profile.power.scope)
        others = {key: lack for key, lack in found.absent.items() if key != TOTAL_WATTS}
        return msgspec.structs.replace(found, absent=others), NoData(found.absent[TOTAL_WATTS].cause, lack="busy")
    if name == "model":
        if profile.power.model is None:
            raise NoData(f"profile {profile.id} has no power model")
        return ProbeResult(facts=scope), NoData("a model of busy CPUs needs two reads", lack="busy")
    if name == "http":
        raise NoData("a meter is read by its own address")
    rails = open_sensor(name, root, profile.power)(None)
    readings = {
        f"power.{label}_watts": Reading(value=watts, unit="watts", source=f"{name} {label}", quality="measured", at=at)
        for label, watts in rails.watts.items()
    }
    missing = {f"power.{label}_watts": lack for label, lack in rails.lacks.items()}
    try:
        total = compute_total(name, profile.power, rails, at)
    except NoData as error:
        return ProbeResult(readings=readings, absent=missing), error
    if name in ADDED_SENSORS and not set(profile.power.total) & rails.watts.keys():
        scope = {"power.scope": "board"}
    return ProbeResult(readings=readings, absent=missing, facts=scope), total
