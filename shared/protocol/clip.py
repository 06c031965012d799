"""Clip device messages to bounded sizes and printable text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from shared.protocol.inference.rollout import MOST_MODELS, ModelStatus, Releases
from shared.protocol.measurements import Absent, Cost, Provenance, Reading, TaskCost
from shared.protocol.messages import Message, Report, Status, Update
from shared.protocol.plausible import finite_or_none, is_plausible

MOST_ENTRIES = 256
"""Limit of a report's readings, absences or facts: a board with forty sensors has sixty figures."""
MOST_EARLIER, MOST_PROVENANCE = 32, 32
NAME, TEXT, FAILURE = 128, 300, 500
"""Most characters of a name, of a source or cause, and of a failure."""

V = TypeVar("V")
S = TypeVar("S", bound=msgspec.Struct)


def printable(text: str, most: int = TEXT) -> str:
    """Escape unprintable characters, and cut the text to `most` characters."""
    if len(text) <= most and text.isprintable():
        return text
    text = text[:most]
    return (
        text
        if text.isprintable()
        else "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    )


def clip(message: Message) -> Message:
    """Return a device's message within the bounds; surplus entries are dropped."""
    match message:
        case Report():
            return _clip_report(message)
        case Update():
            failure = None if message.failure is None else printable(message.failure, FAILURE)
            step = message.step and msgspec.structs.replace(
                message.step, provenance=_clip_provenance(message.step.provenance)
            )
            texts = {"failure": failure, "trained_on": printable(message.trained_on, NAME)}
            return _replace_changed(message, {**texts, "cost": _clip_cost(message.cost), "step": step})
        case Status():
            texts = {name: printable(getattr(message, name), NAME) for name in ("instance", "state", "version")}
            return _replace_changed(message, texts)
        case Releases():
            return clip_releases(message)
    return message


def _replace_changed(message: S, fields: Mapping[str, object]) -> S:
    """Replace fields of a message; return the message itself if nothing changes, as is usual."""
    others = {name: value for name, value in fields.items() if value is not getattr(message, name)}
    return msgspec.structs.replace(message, **others) if others else message


def clip_releases(message: Releases) -> Releases:
    """Return a device's model statuses within the bounds."""
    models = tuple(_clip_model(status) for status in message.models[:MOST_MODELS])
    texts = {name: printable(getattr(message, name), NAME) for name in ("instance", "ahead")}
    return msgspec.structs.replace(message, **texts, models=models)


def _clip_model(status: ModelStatus) -> ModelStatus:
    return msgspec.structs.replace(
        status,
        name=printable(status.name, NAME),
        state=printable(status.state, NAME),
        deployment=printable(status.deployment, NAME),
        reason=printable(status.reason, FAILURE),
        figures={
            name: figure
            for name, figure in _clip_entries(status.figures.items(), MOST_PROVENANCE)
            if math.isfinite(figure)
        },
    )


def _clip_report(report: Report) -> Report:
    """Clip a report; an implausible reading becomes an absence."""
    readings = {name: _clip_reading(reading) for name, reading in _clip_entries(report.readings.items())}
    absent = {
        name: Absent(lack=absence.lack, cause=printable(absence.cause))
        for name, absence in _clip_entries(report.absent.items())
    }
    for name, reading in list(readings.items()):
        if not is_plausible(name, reading.value) or not math.isfinite(reading.at):
            absent[name] = Absent(lack="invalid", cause=f"{readings.pop(name).value:g} is implausible")
    return msgspec.structs.replace(
        report,
        board=printable(report.board, NAME),
        readings=readings,
        absent=absent,
        facts={name: printable(fact) for name, fact in _clip_entries(report.facts.items())},
        spent=report.spent and _clip_spent(report.spent),
        earlier=[_clip_spent(entry) for entry in report.earlier[-MOST_EARLIER:]],
        instance=printable(report.instance, NAME),
    )


def _clip_entries(items: Iterable[tuple[str, V]], most: int = MOST_ENTRIES) -> Iterable[tuple[str, V]]:
    return ((printable(name, NAME), value) for name, value in islice(items, most))


def _clip_reading(reading: Reading) -> Reading:
    spread = finite_or_none(reading.uncertainty)
    changes = {"unit": printable(reading.unit, NAME), "source": printable(reading.source), "uncertainty": spread}
    return _replace_changed(reading, changes)


def _clip_spent(entry: TaskCost) -> TaskCost:
    return msgspec.structs.replace(entry, run=printable(entry.run, NAME), cost=_clip_cost(entry.cost))


def _clip_cost(cost: Cost) -> Cost:
    """Drop NaN and infinite figures of a cost, as if they had not been measured."""
    figures = ((name, getattr(cost, name)) for name in cost.__struct_fields__)
    odd = {name: None for name, figure in figures if isinstance(figure, float) and not math.isfinite(figure)}
    return _replace_changed(cost, {**odd, "provenance": _clip_provenance(cost.provenance)} if cost.provenance else odd)


def _clip_provenance(provenance: dict[str, Provenance]) -> dict[str, Provenance]:
    return {
        name: msgspec.structs.replace(
            origin, source=printable(origin.source), uncertainty=finite_or_none(origin.uncertainty)
        )
        for name, origin in _clip_entries(provenance.items(), MOST_PROVENANCE)
    }
