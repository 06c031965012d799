"""Convert trace rows to CSV cells and back, without loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from edge_server.record.rows import PROVENANCE, TABLES, columns, cost_figures, unit_of
from shared.errors import ConfigError
from shared.protocol.measurements import Cost, Provenance, StepCost

T = TypeVar("T")
# Three hundred years: no run is longer, and a float clock would lose its microseconds.
MAX_S = 1e10
# First characters that make a spreadsheet compute a text, and the mark ' that is put before such texts.
FORMULA = ("=", "+", "-", "@", "'")
# Columns whose cells are JSON objects.
TREES = ("metrics", "refused", "values")
# Figures of costs, none of which is negative.
COSTS = {*Cost.__struct_fields__, *StepCost.__struct_fields__, "hertz"}
_encoder = msgspec.json.Encoder(order="deterministic")


def format_row(table: str, row: Struct) -> list[str]:
    """Return a row's cells in the order of `columns`."""
    values: dict[str, Any] = {name: getattr(row, name) for name in row.__struct_fields__}
    for figure, provenance in values.pop("provenance", {}).items():
        values |= {f"{figure}_{part}": getattr(provenance, part) for part in PROVENANCE}
    return [_format_cell(values.get(column)) for column in columns(table)]


def _format_cell(value: object) -> str:
    if isinstance(value, dict):
        return _encoder.encode(value).decode() if value else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        line = "".join(character if character.isprintable() else " " for character in value)  # one line per row
        return f"'{line}" if line.startswith(FORMULA) else line
    return "" if value is None else repr(value)


def parse_row(table: str, texts: Mapping[str, str], *, marked: bool = True) -> Struct:
    """Parse a row from its cells by column; unknown columns are ignored.

    Args:
        marked: Remove the mark ' before texts, as `format_row` puts one before texts that look like formulas.

    Raises:
        ConfigError: A cell does not fit its column; the message names the column.
    """
    filled = {column: texts[column].removeprefix("'" * marked) for column in columns(table) if texts.get(column)}
    fields: dict[str, Any] = {name: cell for name, cell in filled.items() if name in TABLES[table].__struct_fields__}
    for name in TREES:
        if name in fields:
            fields[name] = _decode_cell(partial(msgspec.json.decode, fields[name]), f"{name}`")
    provenance = {figure: _provenance(figure, filled) for figure in cost_figures(table)}
    if any(provenance.values()):
        fields["provenance"] = {figure: entry for figure, entry in provenance.items() if entry}
    row = _decode_cell(lambda: msgspec.convert(fields, TABLES[table], strict=False), "")
    for name in row.__struct_fields__:
        value = getattr(row, name)
        _require_plausible(name, value)
        try:
            msgspec.msgpack.encode(value)  # also nested integers must fit a record
        except OverflowError as error:
            raise ConfigError(f"column `{name}`: an integer of more than 64 bits") from error
    return row


def _decode_cell(read: Callable[[], T], column: str) -> T:
    """Call `read`; add the column's name to its errors."""
    try:
        return read()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        cause, _, place = str(error).rstrip("`").partition(" - at `$")
        raise ConfigError(f"column `{column or place.removeprefix('.') + '`'}: {cause}") from error


def _provenance(figure: str, filled: Mapping[str, str]) -> Provenance | None:
    parts = {part: filled[f"{figure}_{part}"] for part in PROVENANCE if f"{figure}_{part}" in filled}
    read = partial(msgspec.convert, {"source": ""} | parts, Provenance, strict=False)
    return _decode_cell(read, f"{figure}_quality` or its neighbours") if parts else None


def _require_plausible(name: str, value: object) -> None:
    values = list(value.values()) if isinstance(value, dict) else [value]
    for number in (getattr(entry, "uncertainty", entry) for entry in values):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"column `{name}`: {number} is not finite")
        if isinstance(number, float) and unit_of(name) == "s" and number > MAX_S:
            raise ConfigError(f"column `{name}`: {number:g} s is more than {MAX_S:g} s")
        if isinstance(number, int | float) and number < 0 and name in COSTS:
            raise ConfigError(f"column `{name}`: {number} is negative")
