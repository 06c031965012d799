"""SQLite tables, in the order of their time column or else of the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.data.sources.arrays import ReadPart
from shared.data.sources.cells import CellReader
from shared.data.sources.columns import find_columns
from shared.data.sources.csv_lines import split_paths
from shared.data.sources.sqlite_rows import (
    find_table,
    label_text,
    open_database,
    read_header,
    read_label_names,
    read_rows,
)
from shared.data.sources.table import make_examples
from shared.data.spec import Data
from shared.protocol.messages import MAX_CLASSES

SUFFIX = ".sqlite"


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read the first rows, with at most `most` features in all; None for no limit.

    Raises:
        ConfigError: The file, table or a column is missing, or a cell is not as expected; the message names the row.
    """
    path, sibling = split_paths(spec, SUFFIX)
    with open_database(path) as database:
        table = find_table(database, path, spec)
        header = read_header(database, table)
        reader = CellReader(path, spec, header, find_columns(header, path, spec))
        order_by = (spec.time_column or "") if not spec.time_format else ""
        for rows in read_rows(database, table, reader.names, order_by):
            _add(reader, rows)
            if most is not None and reader.rows * len(reader.columns.features) >= most:
                break
    reads_both = spec.reads_labels and not spec.target_columns and not spec.classes
    others = read_label_names(sibling, spec, MAX_CLASSES) if sibling and reads_both else ()
    return make_examples(reader.finish(), spec, path, others)


def _add(reader: CellReader, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add a batch of rows, numbers first; a number is NaN where a cell is NULL, empty, or named by `drop_missing`."""
    columns, count = list(zip(*rows, strict=True)), len(reader.columns.numbers)
    numbers = np.empty((len(rows), count))
    for at, column in enumerate(columns[:count]):
        try:
            numbers[:, at] = np.array(column, dtype=np.float64)
        except (ValueError, TypeError):
            numbers[:, at] = [_read_number(reader, row, at, cell) for row, cell in enumerate(column)]
    reader.add(numbers, [["" if cell is None else label_text(cell) for cell in column] for column in columns[count:]])


def _read_number(reader: CellReader, row: int, at: int, cell: Any) -> float:
    if cell is None or (isinstance(cell, str) and cell.strip() in {"", *(reader.spec.drop_missing or ())}):
        return float("nan")
    try:
        return float(cell)
    except (ValueError, TypeError) as error:
        raise reader.refuse(reader.rows + row + 1, reader.columns.numbers[at], cell) from error
