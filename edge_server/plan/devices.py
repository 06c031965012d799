"""Plan table `[[device]]`: names and simulated hardware of devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edge_server.plan.links import Link, TraceLink
from edge_server.plan.sections import Section
from edge_server.plan.simulated_devices import Compute, CyclesPower, GivenCompute, Power, ProfilePower, TracePower
from shared.errors import ConfigError
from shared.protocol.topics import check_name

MAX_DEVICES = 1_000_000


class DevicePlan(Section, frozen=True, kw_only=True):
    """One device, or several equal ones: name, and for replay compute time, link and power.

    Attributes:
        name: Name of the device; with partition `client` also the client whose examples it gets.
        count: Number of equal devices, named `name-0`, `name-1` and so on; 0: one device with exactly this name.
        compute_s: Replay: time of one task.
        up_mbit_s: Replay: link rate from the device; absent for no limit.
        down_mbit_s: Replay: link rate to the device; absent for no limit.
        delay_s: Replay: one-way delay of the link.
        compute: Replay: model of the compute time, instead of `compute_s`.
        link: Replay: model of the link, instead of the two rates and `delay_s`.
        power: Replay: model of the power draw; absent: the energy is unknown.
    """

    name: str
    count: int = 0
    compute_s: float = 1.0
    up_mbit_s: float | None = None
    down_mbit_s: float | None = None
    delay_s: float = 0.0
    compute: Compute | None = None
    link: Link | None = None
    power: Power | None = None

    def __post_init__(self) -> None:
        """Reject values out of range, and a value beside the table that replaces it."""
        if not 0 <= self.count <= MAX_DEVICES:
            raise ValueError(f"count must be 0 to {MAX_DEVICES}")
        if not 0 <= self.compute_s < math.inf or not 0 <= self.delay_s < math.inf:
            raise ValueError("compute_s and delay_s must be >= 0")
        if not all(rate is None or 0 < rate < math.inf for rate in (self.up_mbit_s, self.down_mbit_s)):
            raise ValueError("up_mbit_s and down_mbit_s must be > 0 and finite; leave them out for no limit")
        if self.compute and self.compute_s != 1.0:
            raise ValueError("compute_s is set beside a table compute; remove one of them")
        if self.link and (self.up_mbit_s, self.down_mbit_s, self.delay_s) != (None, None, 0.0):
            raise ValueError("up_mbit_s, down_mbit_s or delay_s is set beside a table link; remove one of them")
        counts = not isinstance(self.compute, GivenCompute | None)
        if isinstance(self.power, CyclesPower | ProfilePower) and not counts:
            raise ValueError("power of this kind needs cycles; add a table compute with kind ranges or profile")


def expand_devices(planned: Sequence[DevicePlan]) -> list[DevicePlan]:
    """Return one entry per device, with entries of several devices expanded."""
    return [device for entry in planned for device in _expand(entry)]


def _expand(entry: DevicePlan) -> Iterator[DevicePlan]:
    if not entry.count:
        yield entry
    for index in range(entry.count):
        yield msgspec.structs.replace(entry, name=f"{entry.name}-{index}", count=0)


def check_devices(planned: Sequence[DevicePlan], path: Path) -> None:
    """Check device names.

    Raises:
        ConfigError: A name is invalid or used twice.
    """
    names = [check_name(device.name, f"{path}: device.name") for device in expand_devices(planned)]
    if len(set(names)) != len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise ConfigError(f"{path}: device: two devices have the name {repeated!r}; rename one of them")


def resolve_trace_paths(planned: Sequence[DevicePlan], data_root: Path) -> list[DevicePlan]:
    """Return the devices with trace paths relative to `data_root` resolved."""
    return [_resolve_trace_path(device, data_root) for device in planned]


def _resolve_trace_path(device: DevicePlan, data_root: Path) -> DevicePlan:
    replace, link, power = msgspec.structs.replace, device.link, device.power
    if isinstance(link, TraceLink):
        device = replace(device, link=replace(link, path=str(data_root / link.path)))
    if isinstance(power, TracePower):
        device = replace(device, power=replace(power, path=str(data_root / power.path)))
    return device
