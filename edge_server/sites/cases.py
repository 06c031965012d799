"""The case of a round of one site, as it travels to its coordinator; all of them as one; and a decision's parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Decision, Figure, Given
from shared.errors import WireError

ROUND_JOULES, DEADLINE = "round_joules", "deadline_s"
"""Limits of a case: joules of all its devices together, and seconds of a task."""


class CaseOfSite(msgspec.Struct, frozen=True, kw_only=True):
    """A `Case` as it travels."""

    devices: tuple[str, ...]
    limits: dict[str, float]
    figures: dict[str, dict[str, Figure]]
    ladder: list[tuple[float, int]] = []
    places: dict[str, int] = {}


def pack_case(case: Case) -> bytes:
    """Return a case as it travels."""
    told = CaseOfSite(
        devices=tuple(case.names),
        limits=dict(case.limits),
        figures={device: dict(known) for device, known in case.figures.items()},
        ladder=list(case.ladder),
        places=dict(case.places),
    )
    return msgspec.msgpack.encode(told)


def read_case(data: bytes) -> Case:
    """Return a case that came.

    Raises:
        WireError: It is none.
    """
    try:
        told = msgspec.msgpack.decode(data, type=CaseOfSite)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"case of {len(data)} bytes: {error}") from error
    return Case(told.devices, told.limits, told.figures, tuple(told.ladder), told.places)


def merged(own: str, cases: Mapping[str, Case], joules: float | None) -> Case:
    """Return the case of all sites together: each device keeps the deadline of its site.

    Args:
        own: The coordinator's site, whose limits are those of all but for times and joules.
        cases: By site; of a device that two sites claim, the first has it.
        joules: Of all together; None for no such limit.
    """
    limits, figures, places = dict(cases[own].limits), dict[str, dict[str, Figure]](), dict[str, int]()
    for name in (DEADLINE, "joules"):
        if told := [case.limits[name] for case in cases.values() if name in case.limits]:
            limits[name] = min(told)
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


def read_decision(data: bytes) -> Decision:
    """Return a decision that came.

    Raises:
        WireError: It is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=Decision)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"decision of {len(data)} bytes: {error}") from error
