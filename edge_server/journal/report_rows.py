"""Delta encoding of reports: a form, which seldom changes and is kept once, and a row of the figures that changed."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import msgspec

from edge_server.journal.claims import plausible
from shared.errors import CorruptFile
from shared.protocol.measurements import Absent, Quality, Reading, Spent
from shared.protocol.messages import Report
from shared.protocol.topics import is_name

T = TypeVar("T")

MAX_FIGURES = 256
MAX_FORM_BYTES = 16 << 10
"""A hundred figures with their sources take 6 KiB; of a report that says much more, only a part is kept."""

AT_ONCE_S = 1.0
"""Probes are asked one after another; what lies closer together than this was measured at once."""

_NAME, _WORD, _TEXT = 96, 32, 160
"""Characters of a name, of a word such as a unit, and of a source, cause or fact; longer texts are cut."""


class FormFigure(NamedTuple):
    """What of a reading seldom changes."""

    name: str
    unit: str
    source: str
    quality: Quality


class Form(msgspec.Struct, frozen=True, array_like=True):
    """What of a report seldom changes."""

    instance: str
    board: str
    figures: tuple[FormFigure, ...]
    absent: dict[str, Absent]
    facts: dict[str, str]


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """What of a report changes.

    Attributes:
        values: By place in the form; of a row that is not full, those that differ from the row before.
        moments: When a figure was measured, where that was more than `AT_ONCE_S` from when most were.
        spent: None in a row that is not full means that it did not change.
        most_at: When most figures were measured; None where that was when the report was made.
    """

    values: dict[int, int | float]
    uncertainties: dict[int, float | None] = {}
    moments: dict[int, float] = {}
    spent: Spent | None = None
    most_at: float | None = None


_encoder = msgspec.msgpack.Encoder()
_forms: msgspec.msgpack.Decoder[Form] = msgspec.msgpack.Decoder(Form)
_rows: msgspec.msgpack.Decoder[ReportRow] = msgspec.msgpack.Decoder(ReportRow)


def split_report(report: Report) -> tuple[Form, ReportRow]:
    """Return a report's form and its full row, bounded whatever a device says.

    A figure that is not finite becomes an absence: it cannot be true.
    """
    kept = {name: one for name, one in report.readings.items() if len(name) <= _NAME}
    kept = dict(list(kept.items())[:MAX_FIGURES])
    untrue = {name: Absent(lack="invalid", cause="not finite") for name, one in kept.items() if not _is_finite(one)}
    absent = {name: Absent(lack=one.lack, cause=one.cause[:_TEXT]) for name, one in report.absent.items()}
    readings = {name: one for name, one in kept.items() if name not in untrue}
    form = Form(
        report.instance[:_WORD],
        report.board[:_NAME],
        tuple(FormFigure(name, one.unit[:_WORD], one.source[:_TEXT], one.quality) for name, one in readings.items()),
        _first(absent | untrue, MAX_FIGURES),
        _first({name: fact[:_TEXT] for name, fact in report.facts.items()}, MAX_FIGURES),
    )
    while len(encode_part(form)) > MAX_FORM_BYTES:
        half = len(form.figures) // 2
        form = Form(
            *(form.instance, form.board, form.figures[:half]),
            *(_first(form.absent, len(form.absent) // 2), _first(form.facts, len(form.facts) // 2)),
        )
    return form, _full([readings[figure.name] for figure in form.figures], report)


def _full(readings: list[Reading], report: Report) -> ReportRow:
    spent = report.spent if report.spent and is_name(report.spent.run) else None
    moments = sorted(one.at for one in readings)
    most_at = moments[len(moments) // 2] if moments else report.at
    if _is_at_once(most_at, report.at):
        most_at = report.at
    return ReportRow(
        values={index: _short(one.value) for index, one in enumerate(readings)},
        uncertainties={i: one.uncertainty for i, one in enumerate(readings) if _is_spread(one.uncertainty)},
        moments={i: one.at for i, one in enumerate(readings) if not _is_at_once(one.at, most_at)},
        spent=msgspec.structs.replace(spent, cost=plausible(spent.cost)) if spent else None,
        most_at=None if most_at == report.at else most_at,
    )


def row_changes(before: ReportRow, row: ReportRow) -> ReportRow:
    """Return what of a full row differs from the full row before it."""
    lost = dict.fromkeys(before.uncertainties.keys() - row.uncertainties.keys())
    return ReportRow(
        values={i: value for i, value in row.values.items() if before.values.get(i) != value},
        uncertainties=lost | {i: one for i, one in row.uncertainties.items() if before.uncertainties.get(i) != one},
        moments=row.moments,
        most_at=row.most_at,
        spent=row.spent if row.spent != before.spent else None,
    )


def apply_changes(before: ReportRow, changed: ReportRow) -> ReportRow:
    """Return the full row that `changes` was made of."""
    spreads = {**before.uncertainties, **changed.uncertainties}
    return ReportRow(
        values={**before.values, **changed.values},
        uncertainties={i: one for i, one in spreads.items() if one is not None},
        moments=changed.moments,
        most_at=changed.most_at,
        spent=changed.spent or before.spent,
    )


def join_report(device: str, at: float, form: Form, row: ReportRow) -> Report:
    """Return the report; of a row whose full row is gone, only with the figures that are known.

    Args:
        at: When the report was made, on the device's clock.
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
    """Return one figure of a report, None where it was not measured or is not known.

    Args:
        at: When the report was made, on the device's clock.
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
    """Return a part's bytes."""
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
        raise CorruptFile(f"a kept report is not as it was written: {error}") from error


def _first(found: dict[str, T], count: int) -> dict[str, T]:
    return dict([(name, one) for name, one in found.items() if len(name) <= _NAME][:count])


def _is_at_once(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= AT_ONCE_S


def _is_finite(reading: Reading) -> bool:
    return math.isfinite(reading.value) and math.isfinite(reading.at)


def _is_spread(uncertainty: float | None) -> bool:
    return uncertainty is not None and math.isfinite(uncertainty) and uncertainty >= 0


def _short(value: float) -> int | float:
    """Return a whole number as one: it takes fewer bytes, and reads back as the same float."""
    return int(value) if value.is_integer() and value != 0 and abs(value) < 1 << 53 else value
