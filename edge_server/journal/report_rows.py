"""Delta encoding of reports: a rarely changing form and rows of changed values."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import msgspec

from edge_server.journal.claims import drop_implausible
from shared.errors import CorruptFile
from shared.protocol.measurements import Absent, Quality, Reading, TaskCost
from shared.protocol.messages import Report
from shared.protocol.topics import is_name

T = TypeVar("T")

MAX_FIGURES = 256
MAX_FORM_BYTES = 16 << 10
"""A hundred readings with their sources take 6 KiB; larger forms are truncated."""

AT_ONCE_S = 1.0
"""Readings closer together than this count as simultaneous: probes run one after another."""

_NAME, _WORD, _TEXT = 96, 32, 160
"""Maximum characters of a name, of a word such as a unit, and of a source, cause or fact."""


class FormFigure(NamedTuple):
    """Rarely changing part of a reading."""

    name: str
    unit: str
    source: str
    quality: Quality


class Form(msgspec.Struct, frozen=True, array_like=True):
    """Rarely changing part of a report."""

    instance: str
    board: str
    figures: tuple[FormFigure, ...]
    absent: dict[str, Absent]
    facts: dict[str, str]


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """Changing part of a report.

    Attributes:
        values: By index in the form; in a row that is not full, those that differ from the previous row.
        moments: Times of readings more than `AT_ONCE_S` from the median time.
        spent: In a row that is not full, None means unchanged.
        most_at: Median time of the readings; None if it is that of the report.
    """

    values: dict[int, int | float]
    uncertainties: dict[int, float | None] = {}
    moments: dict[int, float] = {}
    spent: TaskCost | None = None
    most_at: float | None = None


_encoder = msgspec.msgpack.Encoder()
_forms: msgspec.msgpack.Decoder[Form] = msgspec.msgpack.Decoder(Form)
_rows: msgspec.msgpack.Decoder[ReportRow] = msgspec.msgpack.Decoder(ReportRow)


def split_report(report: Report) -> tuple[Form, ReportRow]:
    """Return a report's form and its full row, bounded in size whatever a device sends.

    A value that is not finite becomes an absence with the cause.
    """
    bounded = {name: reading for name, reading in report.readings.items() if len(name) <= _NAME}
    bounded = dict(list(bounded.items())[:MAX_FIGURES])
    invalid = {
        name: Absent(lack="invalid", cause="not finite") for name, reading in bounded.items() if not _is_finite(reading)
    }
    absent = {name: Absent(lack=reading.lack, cause=reading.cause[:_TEXT]) for name, reading in report.absent.items()}
    readings = {name: reading for name, reading in bounded.items() if name not in invalid}
    form = Form(
        report.instance[:_WORD],
        report.board[:_NAME],
        tuple(
            FormFigure(name, reading.unit[:_WORD], reading.source[:_TEXT], reading.quality)
            for name, reading in readings.items()
        ),
        _truncate(absent | invalid, MAX_FIGURES),
        _truncate({name: fact[:_TEXT] for name, fact in report.facts.items()}, MAX_FIGURES),
    )
    while len(encode_part(form)) > MAX_FORM_BYTES:
        half = len(form.figures) // 2
        form = Form(
            *(form.instance, form.board, form.figures[:half]),
            *(_truncate(form.absent, len(form.absent) // 2), _truncate(form.facts, len(form.facts) // 2)),
        )
    return form, _full_row([readings[figure.name] for figure in form.figures], report)


def _full_row(readings: list[Reading], report: Report) -> ReportRow:
    spending = report.spent if report.spent and is_name(report.spent.run) else None
    moments = sorted(reading.at for reading in readings)
    most_at = moments[len(moments) // 2] if moments else report.at
    if _is_at_once(most_at, report.at):
        most_at = report.at
    return ReportRow(
        values={index: _compact(reading.value) for index, reading in enumerate(readings)},
        uncertainties={i: reading.uncertainty for i, reading in enumerate(readings) if _is_spread(reading.uncertainty)},
        moments={i: reading.at for i, reading in enumerate(readings) if not _is_at_once(reading.at, most_at)},
        spent=msgspec.structs.replace(spending, cost=drop_implausible(spending.cost)) if spending else None,
        most_at=None if most_at == report.at else most_at,
    )


def row_changes(before: ReportRow, row: ReportRow) -> ReportRow:
    """Return the differences of a full row from the previous full row."""
    removed = dict.fromkeys(before.uncertainties.keys() - row.uncertainties.keys())
    return ReportRow(
        values={i: value for i, value in row.values.items() if before.values.get(i) != value},
        uncertainties=removed
        | {i: spread for i, spread in row.uncertainties.items() if before.uncertainties.get(i) != spread},
        moments=row.moments,
        most_at=row.most_at,
        spent=row.spent if row.spent != before.spent else None,
    )


def apply_changes(before: ReportRow, changed: ReportRow) -> ReportRow:
    """Return the full row from the previous one and its changes."""
    spreads = {**before.uncertainties, **changed.uncertainties}
    return ReportRow(
        values={**before.values, **changed.values},
        uncertainties={i: spread for i, spread in spreads.items() if spread is not None},
        moments=changed.moments,
        most_at=changed.most_at,
        spent=changed.spent or before.spent,
    )


def join_report(device: str, at: float, form: Form, row: ReportRow) -> Report:
    """Return the report; if its full row is gone, with the known readings only.

    Args:
        at: Time of the report on the device's clock.
    """
    readings = {
        figure.name: _reading(figure, index, at, row)
        for index, figure in enumerate(form.figures)
        if index in row.values
    }
    return Report(
        device=device,
        at=at,
        board=form.board,
        readings=readings,
        absent=form.absent,
        facts=form.facts,
        spent=row.spent,
        instance=form.instance,
    )


def row_reading(name: str, at: float, form: Form, row: ReportRow) -> Reading | None:
    """Return one reading of a report; None if it was not measured or is unknown.

    Args:
        at: Time of the report on the device's clock.
    """
    index = next((index for index, figure in enumerate(form.figures) if figure.name == name), -1)
    return _reading(form.figures[index], index, at, row) if index in row.values else None


def _reading(figure: FormFigure, index: int, at: float, row: ReportRow) -> Reading:
    return Reading(
        value=float(row.values[index]),
        unit=figure.unit,
        source=figure.source,
        quality=figure.quality,
        at=row.moments.get(index, at if row.most_at is None else row.most_at),
        uncertainty=row.uncertainties.get(index),
    )


def encode_part(part: Form | ReportRow) -> bytes:
    """Return a part as bytes."""
    return _encoder.encode(part)


def decode_form(data: bytes) -> Form:
    """Read a form. Raises CorruptFile."""
    return _read(_forms, data)


def decode_row(data: bytes) -> ReportRow:
    """Read a row. Raises CorruptFile."""
    return _read(_rows, data)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise CorruptFile(f"a stored report is damaged: {error}") from error


def _truncate(entries: dict[str, T], count: int) -> dict[str, T]:
    return dict([(name, value) for name, value in entries.items() if len(name) <= _NAME][:count])


def _is_at_once(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= AT_ONCE_S


def _is_finite(reading: Reading) -> bool:
    return math.isfinite(reading.value) and math.isfinite(reading.at)


def _is_spread(uncertainty: float | None) -> bool:
    return uncertainty is not None and math.isfinite(uncertainty) and uncertainty >= 0


def _compact(value: float) -> int | float:
    """Return integral values as int: fewer bytes, and the same float when read back."""
    return int(value) if value.is_integer() and value != 0 and abs(value) < 1 << 53 else value
