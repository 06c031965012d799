"""Columns of a table by their use: label, targets, time, producer, features; without numpy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.data.name_text import show_name
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.spelling import guess

SEPARATORS = (";", "\t", "|", ",")
MAX_LISTED = 12
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")
_PANDAS_INDEX = re.compile(r"Unnamed: \d+")
"""Name that pandas gives to a column without a name, such as an index written by `to_csv`."""


@dataclass(frozen=True)
class Columns:
    """Indices of a table's columns.

    Attributes:
        label: Column of the class; None where none is read.
        client: Column of the example's producer; None where none is configured.
        time: Column of the time; None where none is configured.
        targets: Columns of the numbers to predict, in order; empty where none is read.
        features: Columns of the inputs, in order.
    """

    label: int | None
    client: int | None
    time: int | None
    targets: tuple[int, ...]
    features: tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Columns of the inputs, then those of the targets; a column may be both."""
        return self.features + self.targets

    @property
    def texts(self) -> tuple[int, ...]:
        """Columns read as text."""
        return tuple(at for at in (self.label, self.client, self.time) if at is not None)


def find_columns(header: Sequence[str], path: Path, spec: Data) -> Columns:
    """Locate the columns of a table; a label or target that is not read may be missing.

    Raises:
        ConfigError: A column is missing, duplicate, or has no name, or there are no features.
    """
    header, skipped, target_names = list(header), set(spec.skip_columns or ()), spec.target_columns or ()
    names = [name for name in header if name not in skipped]
    if unknown := sorted(skipped - set(header)):
        raise ConfigError(
            f"{path}: has no column {unknown[0]!r} to leave out, only {_format_names(header)}; correct skip_columns"
        )
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ConfigError(f"{path}: has two columns {twice[0]!r}; rename one")
    required = _required_columns(spec)
    for key, name in required:
        if name not in names:
            remedy = _find_separator(header, name, spec) or guess(name, header) or f"; correct {key} or the header"
            raise ConfigError(f"{path}: has no column {name!r}, only {_format_names(header)}{remedy}")
    _require_one_use(required, spec, path)
    label_name = "" if spec.target_columns else spec.label_column
    label, client, time = (
        header.index(name) if name and name in names else None
        for name in (label_name, spec.client_column, spec.time_column or "")
    )
    targets = tuple(header.index(name) for name in target_names if name in names)
    features = _find_features(header, (label, client, time), targets, spec)
    _require_names({at: header[at] for at in features}, path)
    if not features:
        raise ConfigError(f"{path}: has no columns of features beside the label; add some")
    reads = spec.reads_labels
    return Columns(label if reads else None, client, time, targets if reads else (), features)


def _required_columns(spec: Data) -> list[tuple[str, str]]:
    """List keys with the columns that they name and that must exist."""
    required = [("client_column", spec.client_column)] if spec.client_column else []
    required += [("time_column", spec.time_column)] if spec.time_column else []
    required += [("feature_columns", name) for name in spec.feature_columns or ()]
    if spec.reads_labels and not spec.target_columns:
        required.insert(0, ("label_column", spec.label_column))
    if spec.reads_labels:
        required += [("target_columns", name) for name in spec.target_columns or ()]
    return required


def _require_one_use(required: Sequence[tuple[str, str]], spec: Data, path: Path) -> None:
    """Refuse a column that two keys name; the past of a target may be a feature of a window."""
    used: dict[str, str] = {"": ""} if spec.target_columns else {spec.label_column: "label_column"}
    for key, name in required:
        first = used.setdefault(name, key)
        if key != first and {key, first} != {"feature_columns", "target_columns"}:
            raise ConfigError(f"{path}: {first} and {key} are both {name!r}; correct one")


def _find_features(
    header: list[str], others: tuple[int | None, ...], targets: tuple[int, ...], spec: Data
) -> tuple[int, ...]:
    if spec.feature_columns:
        return tuple(map(header.index, spec.feature_columns))
    used, skipped = set(others), set(spec.skip_columns or ())
    if not (spec.window and spec.window.horizon):
        used |= set(targets)
    return tuple(at for at, name in enumerate(header) if name not in skipped and at not in used)


def _require_names(features: Mapping[int, str], path: Path) -> None:
    """Refuse features without a name, such as the index column that pandas writes."""
    for at, name in features.items():
        if not name or _PANDAS_INDEX.fullmatch(name):
            what = f"is called {name!r}, as pandas calls one without a name" if name else "has no name"
            remedy = f'name it, write the file with index=False, or leave it out: skip_columns = ["{name}"]'
            raise ConfigError(f"{path}: column {at + 1} {what}; {remedy}")


def _format_names(header: list[str]) -> str:
    more = f" and {len(header) - MAX_LISTED} more" if len(header) > MAX_LISTED else ""
    return ", ".join(map(show_name, header[:MAX_LISTED])) + more or "none"


def _find_separator(header: list[str], name: str, spec: Data) -> str:
    """Suggest a header, or the separator with which it has a column of that name; empty where none fits."""
    text = (spec.separator or ",").join(header)
    for separator in SEPARATORS:
        if name in (cell.strip(' "') for cell in text.split(separator)):
            return f"; set separator = {separator!r}".replace("'", '"')
    if header and all(_NUMBER.fullmatch(cell) for cell in header):
        return "; the first line must hold the names of the columns: add it"
    return ""
