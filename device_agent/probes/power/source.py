"""Power probe and power sources: rails, and the total from the profile's best source."""

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
"""Chips that people add to a board; `[board.meter]` may name one."""
RAIL_SENSORS = ("ina3221", "pmic", "ina2xx", "battery")
"""Sensors whose rails are always read, even if another source gives the total."""
BUILT_IN_SENSORS = frozenset({"ina3221", "pmic", "tegrastats"})
"""Sensors whose rails and correction are described by the profile; the others measure the board's input."""

SHORTEST_PERIOD_S = {"battery": 5.0, "tegrastats": 5.0}
"""A battery's chip updates every few seconds; tegrastats starts a process per read."""

MAX_NAMED_RAILS = 3
"""Most rails listed by name in a source's description."""

TOTAL_WATTS = "power.total_watts"


class PowerSource(Protocol):
    """Stateful reader of the board's total power.

    Attributes:
        kind: `instant`: watts at the time of the read; `mean`: mean watts since the previous read, the first of which
            raises NoData with lack `busy`.
        provenance: Source, quality and relative uncertainty of its readings.
        uncertainty_w: Load-independent part of the uncertainty, in watts.
        period_s: Recommended pause between reads.
        cost_s: Approximate duration of a read.
    """

    kind: Literal["instant", "mean"]
    provenance: Provenance
    uncertainty_w: float
    period_s: float
    cost_s: float

    def read(self) -> Reading:
        """Read the total watts; raises NoData."""
        ...


class SensorSource:
    """Power source that reads only the rails that make the total."""

    kind: Literal["instant", "mean"] = "instant"

    def __init__(self, name: str, root: Path, power: Power, clock: Clock) -> None:
        """Find the sensor and read it once; raises NoData if it gives no total."""
        self._name, self._power, self.clock = name, power, clock
        self.uncertainty_w = power.uncertainty_w
        self._ask = open_sensor(name, root, power)
        self._labels = _choose_labels(name, power, self._ask(None))
        self.provenance = describe_total(name, power, self._labels)
        self.period_s = max(sample_period_s(power), SHORTEST_PERIOD_S.get(name, 0.0))
        start = clock()
        self.read()
        self.cost_s = clock() - start

    def read(self) -> Reading:
        return compute_total(self._name, self._power, self._ask(self._labels), self.clock())


class ChipSource:
    """Power source that reads the chip or channel named by `[board.meter]`, at any voltage."""

    kind: Literal["instant", "mean"] = "instant"
    uncertainty_w, cost_s = 0.0, 0.0

    def __init__(self, config: MeterConfig, root: Path, power: Power, clock: Clock) -> None:
        self._label, self._root, self._power, self._clock = config.chip, root, power, clock
        self._ask: RailReader | None = None  # opened at the first read, since its driver may be loaded later
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
    """Return the reader of the sensor with that chip or channel; raises NoData that lists the existing ones."""
    available: list[str] = []
    for name in ADDED_SENSORS:
        try:
            ask = open_sensor(name, root, power)
            rails = ask(None)
        except NoData:
            continue
        if chip in rails.watts or chip in rails.lacks:
            return ask
        available += [*rails.watts, *rails.lacks]
    choices = f"found: {', '.join(sorted(available))}" if available else "found none"
    raise NoData(f"no power chip {chip!r} ({choices}); correct `chip` of [board.meter]")


def open_sensor(name: str, root: Path, power: Power) -> RailReader:
    """Open a rail sensor that turns implausible watts into lacks; raises NoData if the board has none."""
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
    """Open the configured meter, else the profile's first source that answers.

    Args:
        meter: Network meter or chip from `[board.meter]`.
        calibrated: Power model fitted on this board, which replaces the profile's.

    Raises:
        NoData: No source answers.
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
    """Read `power.total_watts`, `power.<rail>_watts` of every sensor, and counters as `power.<zone>_joules`.

    The total is that of the source that `open_source` would choose. Counters and models need two reads, so that their
    total is absent here with the lack `busy`. Better sources that fail are absences too.
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
            result, total = _read_once(name, root, profile, at)
        except NoData as error:
            result, total = ProbeResult(), error
        readings, missing = result.readings | readings, result.absent | missing
        if decisive:
            continue
        if isinstance(total, Reading):
            readings[TOTAL_WATTS] = total
        else:
            refusals[name] = total
        if isinstance(total, Reading) or result.facts:
            decisive, facts = name, result.facts
    if TOTAL_WATTS not in readings:
        missing[TOTAL_WATTS] = describe_absence(_combine_refusals(refusals))
    missing |= {
        f"power.{name}": describe_absence(error)
        for name, error in refusals.items()
        if error.lack != "not_present" and name != decisive
    }
    return ProbeResult(readings=readings, absent=missing, facts=facts)


def compute_total(name: str, power: Power, rails: Rails, at: float) -> Reading:
    """Compute the total of a sensor's rails; raises NoData if they make none, or it is implausible."""
    labels = _choose_labels(name, power, rails)
    provenance = describe_total(name, power, labels)
    watts = validate_watts(sum_rails(labels, rails), (0.0, math.inf))
    watts = validate_watts(correct_watts(watts, power) if name in BUILT_IN_SENSORS else watts, power.valid_w)
    uncertainty = math.hypot(watts * (provenance.uncertainty or 0.0), power.uncertainty_w) or None
    return Reading(
        value=watts, unit="watts", source=provenance.source, quality=provenance.quality, at=at, uncertainty=uncertainty
    )


def describe_total(name: str, power: Power, labels: Sequence[str]) -> Provenance:
    """Describe the provenance of a sensor's total, with the names or the number of its rails."""
    rails = "+".join(labels) if len(labels) <= MAX_NAMED_RAILS else f"sum of {len(labels)} rails"
    is_corrected = name in BUILT_IN_SENSORS and (power.gain, power.offset_w) != (1, 0)
    quality: Quality = "corrected" if is_corrected else "measured"
    return Provenance(source=f"{name} {rails}", quality=quality, uncertainty=power.uncertainty)


def sample_period_s(power: Power) -> float:
    """Return the profile's recommended pause between reads."""
    return 1 / min(power.sample_hz, power.max_hz)


def _choose_labels(name: str, power: Power, rails: Rails) -> tuple[str, ...]:
    return choose_summands(power, rails, by_profile=name in BUILT_IN_SENSORS)


def _combine_refusals(refusals: Mapping[str, NoData]) -> NoData:
    """Combine the errors of all sources into one, of the fixable ones if there are any."""
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
    """Read a source once; return its result, and its total or why there is none (yet).

    The result has facts only if the source has a total, now or at the second read.

    Raises:
        NoData: The board does not have the source.
    """
    scope: dict[str, str] = {"power.scope": "machine" if name == "battery" else profile.power.scope}
    if name == "rapl":
        result = rapl.read_once(root, at, profile.power.scope)
        others = {key: lack for key, lack in result.absent.items() if key != TOTAL_WATTS}
        return msgspec.structs.replace(result, absent=others), NoData(result.absent[TOTAL_WATTS].cause, lack="busy")
    if name == "model":
        if profile.power.model is None:
            raise NoData(f"profile {profile.id} has no power model")
        return ProbeResult(facts=scope), NoData("the power model needs two reads", lack="busy")
    if name == "http":
        raise NoData("a meter is read by its address")
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
