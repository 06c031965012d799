"""Read the last reports of a history of version 0.1: forms, full rows and rows of changed values."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edge_server.journal.sqlite import read_database
from shared.errors import CorruptFile
from shared.protocol.measurements import Absent, Quality, Reading, TaskCost
from shared.protocol.messages import Report

SINCE_FULL = """SELECT heard_utc_s, at, forms.body, reports.body FROM reports JOIN forms ON forms.id = form
    WHERE reports.device = :device
    AND seq >= (SELECT max(seq) FROM reports WHERE device = :device AND is_full) ORDER BY seq"""


class Form(msgspec.Struct, frozen=True, array_like=True):
    """Rarely changing part of a report; figures have name, unit, source and quality."""

    instance: str
    board: str
    figures: list[tuple[str, str, str, Quality]]
    absent: dict[str, Absent]
    facts: dict[str, str]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Changing part of a report, by index in the form."""

    values: dict[int, float]
    uncertainties: dict[int, float | None] = {}
    moments: dict[int, float] = {}
    spent: TaskCost | None = None
    most_at: float | None = None


def read_earlier(path: Path) -> list[tuple[float, Report]]:
    """Return each device's reports since its last full row, with the time of arrival; none of any other file."""
    try:
        return read_database(path, lambda connection: list(_read_reports(connection)))
    except (CorruptFile, msgspec.DecodeError, TypeError, ValueError):
        return []


def _read_reports(connection: sqlite3.Connection) -> Iterator[tuple[float, Report]]:
    for number, device in connection.execute("SELECT id, name FROM devices").fetchall():
        values, spreads, spent = dict[int, float](), dict[int, float | None](), None
        for heard_utc_s, at, form_body, body in connection.execute(SINCE_FULL, {"device": number}):
            form, row = msgspec.msgpack.decode(form_body, type=Form), msgspec.msgpack.decode(body, type=Row)
            values, spreads, spent = values | row.values, spreads | row.uncertainties, row.spent or spent
            readings = {
                name: Reading(
                    value=values[index],
                    unit=unit,
                    source=source,
                    quality=quality,
                    at=row.moments.get(index, at if row.most_at is None else row.most_at),
                    uncertainty=spreads.get(index),
                )
                for index, (name, unit, source, quality) in enumerate(form.figures)
                if index in values
            }
            texts = {"device": device, "board": form.board, "facts": form.facts, "instance": form.instance}
            yield heard_utc_s, Report(**texts, at=at, readings=readings, absent=form.absent, spent=spent)
