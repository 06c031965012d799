"""Cases and decisions of a round as they travel between a site and its coordinator, with the bounds on both.

A site's case is what another site's server says of its devices: it may name its own devices alone, and of other sites'
tasks it says nothing. A decision is what another server gives our devices: shares are shares, and figures are finite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from edge_server.allocation.figures import BOUNDS
from edge_server.allocation.inputs import SPREAD, Case
from edge_server.journal.decision import Decision, Figure, Given, Source
from edge_server.journal.records import RoundOpened
from edge_server.journal.sqlite import encode
from shared.errors import WireError
from shared.protocol.bounded import MOST_FIGURE, Amount, Count, Name
from shared.protocol.measurements import JOULES, Cost

ROUND_JOULES, DEADLINE = "round_joules", "deadline_s"
"""Limits of a case: joules of all its devices together, and seconds of a task."""
LEAST_LIMIT = 0.25
"""Of a limit of the coordinator's own devices: another site's devices do not press it further down."""
SHARES = frozenset({"keep", "prune", "sent", "share", "steps"})
"""Values of a decision between 0 and 1."""
MOST_WORD = 64

Word: TypeAlias = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,63}\Z")]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class TravellingFigure(msgspec.Struct, frozen=True, array_like=True):
    """A `Figure` as it travels."""

    value: Amount
    source: Source


class CaseOfSite(msgspec.Struct, frozen=True, kw_only=True):
    """A `Case` as it travels."""

    devices: tuple[Name, ...]
    limits: dict[Word, Amount]
    figures: dict[Name, dict[Word, TravellingFigure]]
    ladder: list[tuple[Share, Count]] = []
    places: dict[Name, Count] = {}


def pack_case(case: Case) -> bytes:
    """Return a case as it travels."""
    return msgspec.msgpack.encode(
        {
            "devices": tuple(case.names),
            "limits": {name: limit for name, limit in case.limits.items() if name != SPREAD},
            "figures": {device: dict(known) for device, known in case.figures.items()},
            "ladder": list(case.ladder),
            "places": dict(case.places),
        }
    )


def read_case(data: bytes, devices: Collection[str]) -> Case:
    """Return a case that came.

    Args:
        data: As `pack_case` makes it.
        devices: Those of the site that sent it.

    Raises:
        WireError: It is not a case, names a device of another site, or has a figure that cannot be true.
    """
    try:
        case = msgspec.msgpack.decode(data, type=CaseOfSite)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"case of {len(data)} bytes: {error}") from error
    known = frozenset(devices)
    if strangers := sorted({*case.devices, *case.figures} - known):
        raise WireError(f"case with {strangers[0]!r}, which is not a device of that site", reason="unknown-device")
    if case.limits.get(DEADLINE, 1.0) <= 0:
        raise WireError(f"case with {DEADLINE} = {case.limits[DEADLINE]}", reason="limit")
    figures = {
        device: {name: Figure(one.value, one.source) for name, one in figures.items()}
        for device, figures in case.figures.items()
    }
    for device, each in figures.items():
        for name, figure in each.items():
            low, high = BOUNDS.get(name, (0.0, 1.0 if name in SHARES else MOST_FIGURE))
            if not low <= figure.value <= high:
                raise WireError(f"{device}: {name} {figure.value:g} is not in {low:g} to {high:g}", reason="figure")
    places = {device: place for device, place in case.places.items() if device in known}  # a plan's order has all
    return Case(case.devices, case.limits, figures, tuple(case.ladder), places)


def merged(own: str, cases: Mapping[str, Case], joules: float | None) -> Case:
    """Return the case of all sites together: each device keeps the deadline of its site.

    Args:
        own: The coordinator's site, whose limits are those of all but for times and joules.
        cases: By site; of a device that two sites claim, the first has it.
        joules: Of all together; None for no such limit.
    """
    limits = {name: limit for name, limit in cases[own].limits.items() if name != SPREAD}
    figures, places = dict[str, dict[str, Figure]](), dict[str, int]()
    for name in (DEADLINE, "joules"):
        if values := [case.limits[name] for case in cases.values() if name in case.limits]:
            limits[name] = max(min(values), LEAST_LIMIT * cases[own].limits.get(name, 0.0))
    if joules is not None:
        limits[ROUND_JOULES] = joules
    for case in cases.values():
        for device in case.names:
            known = dict(case.figures.get(device, {}))
            if DEADLINE in case.limits and len(cases) > 1:
                known.setdefault(DEADLINE, Figure(case.limits[DEADLINE], "measured"))
            figures.setdefault(device, known)
            places.setdefault(device, len(places))
    return Case(tuple(figures), limits, figures, cases[own].ladder, places)


def part_of(decision: Decision, devices: Iterable[str]) -> Decision:
    """Return a decision for some of its devices."""
    ours: dict[str, Given] = {one: decision.devices[one] for one in devices if one in decision.devices}
    return msgspec.structs.replace(decision, devices=ours)


def read_decision(data: bytes, devices: Collection[str]) -> Decision:
    """Return what a coordinator decided for a site's devices.

    Args:
        data: A `Decision` in MessagePack.
        devices: Of the site that asked.

    Raises:
        WireError: It is not a decision, is for a device of another site, or gives what no device can be given.
    """
    try:
        decision = msgspec.msgpack.decode(data, type=Decision)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"decision of {len(data)} bytes: {error}") from error
    if strangers := sorted(decision.devices.keys() - frozenset(devices)):
        raise WireError(f"decision for {strangers[0][:MOST_WORD]!a}, which is not ours", reason="unknown-device")
    for device, given in decision.devices.items():
        _require_given(device, given)
    words = [decision.optimizer, decision.coordinator, *decision.limits, *decision.enough]
    if any(len(word) > MOST_WORD or not word.isprintable() for word in words):
        raise WireError("a decision with names that no figure has", reason="figure")
    encode(RoundOpened(round=1, assignments={}, decision=decision))  # refuses what a journal could not read back
    return decision


def _require_given(device: str, given: Given) -> None:
    """Refuse what no device can be given."""
    for name, value in given.values.items():
        most = 1.0 if name in SHARES else MOST_FIGURE
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise WireError(f"{device}: {name[:MOST_WORD]!a} is {ascii(value)[:MOST_WORD]}", reason="figure")
    if not all(part is None or 0 <= part <= MOST_FIGURE for part in _predicted(given.predicted)):
        raise WireError(f"{device}: what its task should cost is no figure", reason="figure")
    words = [given.binding, *given.values, *given.figures]
    if any(len(word) > MOST_WORD or not word.isprintable() for word in words):
        raise WireError(f"{device}: names that no figure has", reason="figure")


def _predicted(cost: Cost) -> list[float | None]:
    return [cost.download_s, cost.compute_s, cost.upload_s, *(getattr(cost, name) for name in JOULES)]
