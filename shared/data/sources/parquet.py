"""Tables of a Parquet file, read with pyarrow."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import ReadPart
from shared.data.sources.cells import CellReader
from shared.data.sources.columns import find_columns
from shared.data.sources.csv_lines import require_file, split_paths
from shared.data.sources.sqlite_rows import label_text
from shared.data.sources.table import make_examples
from shared.data.spec import Data
from shared.errors import ConfigError, describe_cause
from shared.runtime.extras import install_command

SUFFIX = ".parquet"
BATCH_ROWS = 1 << 16
MICROSECONDS = 1e6


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read the first rows, with at most `most` features in all; None for no limit.

    Raises:
        ConfigError: pyarrow, the file or a column is missing, or a cell is not as expected; the message names the row.
    """
    path, _ = split_paths(spec, SUFFIX)
    arrow, parquet = _import_library()
    require_file(path)
    try:
        with parquet.ParquetFile(path) as file:
            header = list(file.schema_arrow.names)
            reader = CellReader(path, spec, header, find_columns(header, path, spec))
            for batch in file.iter_batches(BATCH_ROWS, columns=list(dict.fromkeys(reader.names)), use_threads=False):
                _add(reader, batch, arrow)
                if most is not None and reader.rows * len(reader.columns.features) >= most:
                    break
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path}: cannot be read as Parquet ({describe_cause(error)}); correct path or replace the file"
        ) from error
    table = reader.finish()
    if table.labels and not spec.classes and not all(label.isdigit() for label in set(table.labels)):
        raise ConfigError(
            f"{path}: column {spec.label_column!r} holds names, which an agent does not read from Parquet; list all "
            "classes in order under data.classes"
        )
    return make_examples(table, spec, path)


def _import_library() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - only this source needs it
        from pyarrow import parquet  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError(f"source parquet needs pyarrow, which is absent: {install_command('parquet')}") from error
    return pa, parquet


def _add(reader: CellReader, batch: Any, arrow: ModuleType) -> None:
    numbers = np.empty((batch.num_rows, len(reader.columns.numbers)))
    for place, at in enumerate(reader.columns.numbers):
        numbers[:, place] = _read_numbers(reader, batch.column(reader.header[at]), at, arrow)
    texts = [_read_texts(batch.column(reader.header[at]), arrow) for at in reader.columns.texts]
    reader.add(numbers, texts)


def _read_numbers(reader: CellReader, column: Any, at: int, arrow: ModuleType) -> NDArray[np.float64]:
    """Convert a column to numbers, NaN where one is null."""
    try:
        numbers = column.cast(arrow.float64(), safe=False)
    except arrow.ArrowException:
        cells = column.to_pylist()
        missing = {"", *(reader.spec.drop_missing or ())}
        parsed = np.empty(len(cells))
        for row, cell in enumerate(cells):
            try:
                parsed[row] = float("nan") if cell is None or cell in missing else float(cell)
            except (ValueError, TypeError) as error:
                raise reader.refuse(reader.rows + row + 1, at, cell) from error
        return parsed
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)


def _read_texts(column: Any, arrow: ModuleType) -> list[str]:
    """Convert labels, producers or times to text; times to seconds since 1970."""
    if arrow.types.is_timestamp(column.type):
        micros = column.cast(arrow.timestamp("us"), safe=False).cast(arrow.int64()).to_pylist()
        return ["" if cell is None else repr(cell / MICROSECONDS) for cell in micros]
    return ["" if cell is None else label_text(cell) for cell in column.to_pylist()]
