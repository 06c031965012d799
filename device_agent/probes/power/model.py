"""Power model for boards without a sensor: watts from CPU load, clock and traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from device_agent.probes import cpufreq, cputime, network
from device_agent.profile.schema import PowerModel, Profile
from shared.errors import NoData
from shared.protocol.measurements import Provenance, Reading
from shared.runtime.clock import Clock

SHORTEST_S = 0.1
"""The kernel counts CPU time in hundredths of a second."""
PERIOD_S = 1.0
"""Longer than a sensor's period: the model gives means, which lose no energy, and reading clocks is expensive."""
RADIO_BITS_PER_S = 20e6
"""Assumed full rate of interfaces that report no speed, such as radios."""


def compute_watts(
    model: PowerModel, *, busy_cores: float, hertz: float, sending: float = 0.0, receiving: float = 0.0
) -> float:
    """Compute the watts of a board, clamped to idle_w and max_w.

    P = idle_w + busy_cores * core_w(f) + tx_w * sending + rx_w * receiving,
    core_w(f) = core_joules_per_cycle * max_hertz * (f / max_hertz) ** exponent.

    Args:
        sending: Ratio to the full rate, 0 to 1; likewise `receiving`.
    """
    core_w: float = model.core_joules_per_cycle * model.max_hertz * (hertz / model.max_hertz) ** model.exponent
    power = model.idle_w + busy_cores * core_w + model.tx_w * sending + model.rx_w * receiving
    return min(max(power, model.idle_w), model.max_w)


class BoardState:
    """Snapshot of busy CPU seconds, clock and network counters."""

    def __init__(self, root: Path, profile: Profile, at: float, *, radio: bool) -> None:
        """Read the board; raises NoData."""
        self.at = at
        self.busy_s = cputime.read(root, profile, at).readings["cputime.busy_seconds"].value
        cpu = cpufreq.read(root, profile, at)
        if "cpu.f_hertz" not in cpu.readings:
            lack = cpu.absent["cpu.f_hertz"]
            raise NoData(f"no clock: {lack.cause}", lack=lack.lack)
        self.hertz = cpu.readings["cpu.f_hertz"].value
        self.net = _read_traffic(root, profile, at) if radio else {}


def _read_traffic(root: Path, profile: Profile, at: float) -> Mapping[str, Reading]:
    try:
        return network.read(root, profile, at).readings
    except NoData:
        return {}  # no interface, no traffic


def compute_share(before: Mapping[str, Reading], after: Mapping[str, Reading], direction: str, seconds: float) -> float:
    """Return the highest utilisation (0 to 1) of an interface; not a sum, since bridges count the same bytes.

    Args:
        before: Earlier readings of the network probe.
        direction: `sent` or `received`, as in the names of the readings.
    """
    shares = [0.0]
    for name in after.keys() & before.keys():
        if name.endswith(f"_{direction}_bytes"):
            speed = after.get(name.replace(f"_{direction}_bytes", "_speed_bits_per_s"))
            full = speed.value if speed and speed.value > 0 else RADIO_BITS_PER_S
            shares.append(8 * (after[name].value - before[name].value) / seconds / full)
    return min(1.0, max(shares))


class ModelSource:
    """Power source that models the mean watts between two reads; see `PowerSource`."""

    kind: Literal["instant", "mean"] = "mean"

    def __init__(
        self, root: Path, profile: Profile, clock: Clock, *, model: PowerModel | None, calibrated: bool
    ) -> None:
        """Check that CPU time and clock are readable; raises NoData if not, or without a model."""
        if model is None:
            raise NoData(f"profile {profile.id} has no power model")
        self._root, self._profile, self._clock, self._model = root, profile, clock, model
        self._before: BoardState | None = None
        start = clock()
        self._state()
        self.cost_s, self.period_s = clock() - start, max(PERIOD_S, 1 / profile.power.sample_hz)
        origin = "calibrated model" if calibrated else "model"
        source = f"{origin}: {model.provenance}" if model.provenance else origin
        self.provenance = Provenance(source=source, quality="modelled", uncertainty=model.uncertainty)
        self.uncertainty_w = model.uncertainty_w

    def read(self) -> Reading:
        now, before = self._state(), self._before
        seconds = now.at - before.at if before else 0.0
        if before is None or seconds < SHORTEST_S:
            self._before = before or now
            raise NoData("the power model needs a second read, somewhat later", lack="busy")
        self._before = now
        value = compute_watts(
            self._model,
            busy_cores=max(0.0, now.busy_s - before.busy_s) / seconds,
            hertz=(before.hertz + now.hertz) / 2,
            sending=compute_share(before.net, now.net, "sent", seconds),
            receiving=compute_share(before.net, now.net, "received", seconds),
        )
        return Reading(
            value=value,
            unit="watts",
            source=self.provenance.source,
            quality="modelled",
            at=now.at,
            uncertainty=math.hypot(value * self._model.uncertainty, self.uncertainty_w),
        )

    def _state(self) -> BoardState:
        radio = bool(self._model.tx_w or self._model.rx_w)
        return BoardState(self._root, self._profile, self._clock(), radio=radio)
