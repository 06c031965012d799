"""Wire format and validation of allocation cases and decisions between sites.

A case is another server's claim about its devices: it may name only its own. A decision is another server's allocation
for our devices: shares must lie in 0 to 1, and figures must be finite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from edge_server.allocation.inputs import SPREAD, Case
from edge_server.journal.decision import Decision, DeviceDecision, Figure, Source
from edge_server.journal.records import RoundOpened
from edge_server.journal.sqlite import encode
from shared.errors import WireError
from shared.protocol.bounded import MOST_FIGURE, Amount, Count, Name
from shared.protocol.measurements import JOULES, Cost
from shared.protocol.plausible import FIGURES

ROUND_JOULES, DEADLINE = "round_joules", "deadline_s"
"""Limits of a case: joules of all its devices together, and seconds of a task."""
LEAST_LIMIT = 0.25
"""Fraction of the coordinator's own limit below which another site's devices cannot push it."""
SHARES = frozenset({"keep", "prune", "sent", "share", "steps"})
"""Values of a decision between 0 and 1."""
MOST_WORD = 64

FigureName: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class TravellingFigure(msgspec.Struct, frozen=True, array_like=True):
    """Wire format of a `Figure`."""

    value: Amount
    source: Source


class CaseOfSite(msgspec.Struct, frozen=True, kw_only=True):
    """Wire format of a `Case`."""

    devices: tuple[Name, ...]
    limits: dict[FigureName, Amount]
    figures: dict[Name, dict[FigureName, TravellingFigure]]
    ladder: list[tuple[Share, Count]] = []
    places: dict[Name, Count] = {}


def pack_case(case: Case) -> bytes:
    """Encode a case."""
    return msgspec.msgpack.encode(
        {
            "devices": tuple(case.names),
            "limits": {name: limit for name, limit in case.limits.items() if name != SPREAD},
            "figures": {device: dict(known_figures) for device, known_figures in case.figures.items()},
            "ladder": list(case.ladder),
            "places": dict(case.places),
        }
    )


def read_case(data: bytes, devices: Collection[str]) -> Case:
    """Decode and validate a case.

    Args:
        data: As encoded by `pack_case`.
        devices: Devices of the sender's site.

    Raises:
        WireError: It is not a case, names another site's device, or has an impossible figure.
    """
    try:
        case = msgspec.msgpack.decode(data, type=CaseOfSite)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"case of {len(data)} bytes: {error}") from error
    site_devices = frozenset(devices)
    if strangers := sorted({*case.devices, *case.figures} - site_devices):
        raise WireError(f"case with {strangers[0]!r}, which is not a device of that site", reason="unknown-device")
    if case.limits.get(DEADLINE, 1.0) <= 0:
        raise WireError(f"case with {DEADLINE} = {case.limits[DEADLINE]}", reason="limit")
    figures = {
        device: {name: Figure(figure.value, figure.source) for name, figure in figures.items()}
        for device, figures in case.figures.items()
    }
    for device, each in figures.items():
        for name, figure in each.items():
            low, high = FIGURES.get(name, (0.0, 1.0 if name in SHARES else MOST_FIGURE))
            if not low <= figure.value <= high:
                raise WireError(f"{device}: {name} {figure.value:g} is not in {low:g} to {high:g}", reason="figure")
    places = {
        device: place for device, place in case.places.items() if device in site_devices
    }  # the order may include other sites' devices
    return Case(case.devices, case.limits, figures, tuple(case.ladder), places)


def merge_cases(coordinator: str, cases: Mapping[str, Case], joules: float | None) -> Case:
    """Return the joint case of all sites; each device keeps its site's deadline.

    Args:
        coordinator: Site whose limits apply to all, except for times and joules.
        cases: By site; a device claimed by two sites belongs to the first.
        joules: Limit for all together; None for no such limit.
    """
    limits = {name: limit for name, limit in cases[coordinator].limits.items() if name != SPREAD}
    figures, places = dict[str, dict[str, Figure]](), dict[str, int]()
    for name in (DEADLINE, "joules"):
        if values := [case.limits[name] for case in cases.values() if name in case.limits]:
            limits[name] = max(min(values), LEAST_LIMIT * cases[coordinator].limits.get(name, 0.0))
    if joules is not None:
        limits[ROUND_JOULES] = joules
    for case in cases.values():
        for device in case.names:
            device_figures = dict(case.figures.get(device, {}))
            if DEADLINE in case.limits and len(cases) > 1:
                device_figures.setdefault(DEADLINE, Figure(case.limits[DEADLINE], "measured"))
            figures.setdefault(device, device_figures)
            places.setdefault(device, len(places))
    return Case(tuple(figures), limits, figures, cases[coordinator].ladder, places)


def restrict_decision(decision: Decision, devices: Iterable[str]) -> Decision:
    """Return a decision with only some of its devices."""
    selected: dict[str, DeviceDecision] = {
        device: decision.devices[device] for device in devices if device in decision.devices
    }
    return msgspec.structs.replace(decision, devices=selected)


def read_decision(data: bytes, devices: Collection[str]) -> Decision:
    """Decode and validate a coordinator's decision.

    Args:
        data: A `Decision` in MessagePack.

    Raises:
        WireError: It is not a decision, names another site's device, or has an impossible value.
    """
    try:
        decision = msgspec.msgpack.decode(data, type=Decision)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"decision of {len(data)} bytes: {error}") from error
    if strangers := sorted(decision.devices.keys() - frozenset(devices)):
        raise WireError(f"decision for {strangers[0][:MOST_WORD]!a}, which is not ours", reason="unknown-device")
    for device, allocation in decision.devices.items():
        _check_allocation(device, allocation)
    names = [decision.optimizer, decision.coordinator, *decision.limits, *decision.enough]
    if any(len(name) > MOST_WORD or not name.isprintable() for name in names):
        raise WireError("a decision with invalid figure names", reason="figure")
    encode(RoundOpened(round=1, assignments={}, decision=decision))  # raises for unjournallable values
    return decision


def _check_allocation(device: str, allocation: DeviceDecision) -> None:
    """Refuse an allocation with impossible values."""
    for name, value in allocation.values.items():
        most = 1.0 if name in SHARES else MOST_FIGURE
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise WireError(f"{device}: {name[:MOST_WORD]!a} is {ascii(value)[:MOST_WORD]}", reason="figure")
    if not all(part is None or 0 <= part <= MOST_FIGURE for part in _list_costs(allocation.predicted)):
        raise WireError(f"{device}: predicted cost is not a valid figure", reason="figure")
    names = [allocation.binding, *allocation.values, *allocation.figures]
    if any(len(name) > MOST_WORD or not name.isprintable() for name in names):
        raise WireError(f"{device}: invalid figure names", reason="figure")


def _list_costs(cost: Cost) -> list[float | None]:
    return [cost.download_s, cost.compute_s, cost.upload_s, *(getattr(cost, name) for name in JOULES)]
