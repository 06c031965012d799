"""Typed cells of a database or Parquet file as table rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import is_finite
from shared.data.sources.columns import Columns
from shared.data.sources.table import TableRows
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

TEXT_BYTES = 64
"""Memory of a short text."""


@dataclass
class CellReader:
    """Collect batches of rows into a table.

    Attributes:
        header: Names of all columns of the file.
        columns: Indices of the columns by their use.
        rows: Rows seen so far.
    """

    path: Path
    spec: Data
    header: Sequence[str]
    columns: Columns
    rows: int = 0
    _features: list[NDArray[np.float32]] = field(default_factory=list)
    _targets: list[NDArray[np.float32]] = field(default_factory=list)
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _places: list[NDArray[np.int64]] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns to read: those of numbers, then those of texts."""
        return tuple(self.header[at] for at in (*self.columns.numbers, *self.columns.texts))

    def add(self, numbers: NDArray[np.float64], texts: Sequence[Sequence[str]]) -> None:
        """Add a batch of rows.

        Args:
            numbers: Of shape (rows, columns), NaN where a cell is missing.
            texts: Cells of each text column; empty where one is missing.

        Raises:
            ConfigError: A number is missing or not finite and `drop_missing` does not name it, or a text is missing.
        """
        places = np.arange(self.rows + 1, self.rows + 1 + len(numbers))
        self.rows += len(numbers)
        is_missing = self._find_missing(numbers)
        if is_missing.any():
            complete = np.flatnonzero(~is_missing)
            numbers, places = numbers[complete], places[complete]
            texts = [[column[row] for row in complete.tolist()] for column in texts]
        with np.errstate(over="ignore"):  # too large for float32 becomes infinite
            values = numbers.astype(np.float32)
        if not is_finite(values):
            row, column = (int(place[0]) for place in np.nonzero(~np.isfinite(values)))
            raise self.refuse(int(places[row]), self.columns.numbers[column], numbers[row, column])
        for at, cells in zip(self.columns.texts, texts, strict=True):
            if not all(cells):
                row = next(row for row, cell in enumerate(cells) if not cell)
                raise self.refuse(int(places[row]), at, "")
            self._texts.setdefault(at, []).extend(cells)
        width = len(self.columns.features)
        self._features.append(values[:, :width])
        self._targets.append(values[:, width:])
        self._places.append(places)
        count = sum(map(len, self._places))
        require_room(8 * count * numbers.shape[1] + TEXT_BYTES * count * len(texts), self.path)

    def _find_missing(self, numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Find the rows that lack a number, by `drop_missing`."""
        is_missing = np.zeros(len(numbers), dtype=np.bool_)
        for cell in self.spec.drop_missing or ():
            value = _parse(cell)
            is_equal = np.isnan(numbers) if np.isnan(value) else numbers == value
            is_missing |= is_equal.any(axis=1)
        return is_missing

    def refuse(self, row: int, at: int, cell: object) -> ConfigError:
        """Return the error of a cell that is not a finite number, or empty."""
        name = self.header[at]
        what = "target column" if name in (self.spec.target_columns or ()) else "column"
        if cell is None or cell == "" or (isinstance(cell, float) and np.isnan(cell)):
            return ConfigError(
                f'{self.path}: row {row}, {what} {name!r}: empty; fill it in, or set drop_missing = [""]'
            )
        text = repr(cell) if isinstance(cell, str | bytes) else str(cell)
        remedy = "a class goes to label_column" if what == "target column" else "leave the column out by skip_columns"
        return ConfigError(
            f"{self.path}: row {row}, {what} {name!r}: {text:.60} is not a finite number; correct it, or {remedy}"
        )

    def finish(self) -> TableRows:
        """Return the rows.

        Raises:
            ConfigError: There is none.
        """
        if not self._places or not sum(map(len, self._places)):
            raise ConfigError(f"{self.path}: holds no row; add examples or correct path")
        labels, clients, times = (
            [] if at is None else self._texts.get(at, [])
            for at in (self.columns.label, self.columns.client, self.columns.time)
        )
        features, targets = (np.concatenate(part) for part in (self._features, self._targets))
        return TableRows(features, targets, labels, clients, times, np.concatenate(self._places))


def _parse(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")
