"""Bounds on what a device says of itself: so many entries, so much text, nothing that could forge a line of a log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from shared.protocol.inference.rollout import MOST_MODELS, ModelStatus, Releases
from shared.protocol.measurements import Absent, Cost, Provenance, Reading, Spent
from shared.protocol.messages import Message, Report, Status, Update

MOST_ENTRIES = 256
"""Readings of a report, or absences, or facts: a board with forty sensors has sixty figures."""
MOST_EARLIER, MOST_PROVENANCE = 32, 32
NAME, TEXT, FAILURE = 128, 300, 500
"""Characters of a name, of a source or a cause, and of a failure."""

V = TypeVar("V")
S = TypeVar("S", bound=msgspec.Struct)


def printable(text: str, most: int = TEXT) -> str:
    """Return a text on one line: its beginning, with what a terminal or a log would act on written out."""
    if len(text) <= most and text.isprintable():
        return text
    text = text[:most]
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def clip(message: Message) -> Message:
    """Return a message of a device within its bounds; what is beyond them is left out."""
    match message:
        case Report():
            return _clip_report(message)
        case Update():
            failure = None if message.failure is None else printable(message.failure, FAILURE)
            step = message.step and msgspec.structs.replace(message.step, provenance=_origins(message.step.provenance))
            texts = {"failure": failure, "trained_on": printable(message.trained_on, NAME)}
            return _replaced(message, {**texts, "cost": _clip_cost(message.cost), "step": step})
        case Status():
            texts = {name: printable(getattr(message, name), NAME) for name in ("instance", "state", "version")}
            return _replaced(message, texts)
        case Releases():
            return clip_releases(message)
    return message


def _replaced(message: S, fields: Mapping[str, object]) -> S:
    """Return a message with other fields; itself where these are its own, which nearly all that devices say is."""
    others = {name: found for name, found in fields.items() if found is not getattr(message, name)}
    return msgspec.structs.replace(message, **others) if others else message


def clip_releases(message: Releases) -> Releases:
    """Return what a device says of its models within its bounds."""
    models = tuple(_clip_model(one) for one in message.models[:MOST_MODELS])
    texts = {name: printable(getattr(message, name), NAME) for name in ("instance", "ahead")}
    return msgspec.structs.replace(message, **texts, models=models)


def _clip_model(one: ModelStatus) -> ModelStatus:
    return msgspec.structs.replace(
        one,
        name=printable(one.name, NAME),
        state=printable(one.state, NAME),
        deployment=printable(one.deployment, NAME),
        reason=printable(one.reason, FAILURE),
        figures={
            name: figure for name, figure in _entries(one.figures.items(), MOST_PROVENANCE) if math.isfinite(figure)
        },
    )


def _clip_report(report: Report) -> Report:
    return msgspec.structs.replace(
        report,
        board=printable(report.board, NAME),
        readings={name: _clip_reading(one) for name, one in _entries(report.readings.items())},
        absent={
            name: Absent(lack=one.lack, cause=printable(one.cause)) for name, one in _entries(report.absent.items())
        },
        facts={name: printable(fact) for name, fact in _entries(report.facts.items())},
        spent=report.spent and _clip_spent(report.spent),
        earlier=[_clip_spent(one) for one in report.earlier[-MOST_EARLIER:]],
        instance=printable(report.instance, NAME),
    )


def _entries(items: Iterable[tuple[str, V]], most: int = MOST_ENTRIES) -> Iterable[tuple[str, V]]:
    return ((printable(name, NAME), one) for name, one in islice(items, most))


def _clip_reading(one: Reading) -> Reading:
    unit, source = printable(one.unit, NAME), printable(one.source)
    return one if (unit, source) == (one.unit, one.source) else msgspec.structs.replace(one, unit=unit, source=source)


def _clip_spent(spent: Spent) -> Spent:
    return msgspec.structs.replace(spent, run=printable(spent.run, NAME), cost=_clip_cost(spent.cost))


def _clip_cost(cost: Cost) -> Cost:
    """Return a cost without figures that are NaN or infinite: a figure that nobody measured is absent."""
    figures = ((name, getattr(cost, name)) for name in cost.__struct_fields__)
    odd = {name: None for name, one in figures if isinstance(one, float) and not math.isfinite(one)}
    return _replaced(cost, {**odd, "provenance": _origins(cost.provenance)} if cost.provenance else odd)


def _origins(provenance: dict[str, Provenance]) -> dict[str, Provenance]:
    return {
        name: msgspec.structs.replace(one, source=printable(one.source), uncertainty=_finite(one.uncertainty))
        for name, one in _entries(provenance.items(), MOST_PROVENANCE)
    }


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and math.isfinite(figure) else None
