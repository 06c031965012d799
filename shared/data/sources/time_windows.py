"""Cut windows of consecutive rows, without crossing a gap or a change of producer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from shared.data.formats import Window
from shared.data.identity import hash_texts, is_held_out
from shared.data.sources.arrays import FLOAT_BYTES, HOLDOUT_SEED, VALIDATION_SEED
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

USUAL_INTERVALS = 2
"""Intervals of usual length that a gap exceeds, where `max_gap_s` is absent."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeWindows:
    """Windows of a table's rows.

    Attributes:
        spec: Length, horizon and stride.
        order: Rows sorted by producer, in order of time, int64 of shape (R,).
        starts: Places in `order` where the windows start, int64 of shape (N,).
        identities: Hash of each window's block of time, uint64 of shape (N,); None unless held out by hash.
        notes: Warnings for the user.
    """

    spec: Window
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    path: Path
    identities: NDArray[np.uint64] | None = None
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> NDArray[np.int64]:
        """Last row of each window, int64 of shape (N,)."""
        return self.order[self.starts + self.spec.length - 1]

    def inputs(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Copy each window's features, float32 of shape (N, features, length)."""
        return self._cut(features, self.starts, self.spec.length)

    def targets(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Copy each window's targets, float32 of shape (N, targets), or (N, horizon * targets) row by row."""
        if not self.spec.horizon:
            return np.asarray(values[self.last], dtype=np.float32)
        cut = self._cut(values, self.starts + self.spec.length, self.spec.horizon)
        return np.ascontiguousarray(cut.transpose(0, 2, 1)).reshape(len(cut), -1)

    def _cut(self, values: NDArray[np.float32], starts: NDArray[np.int64], length: int) -> NDArray[np.float32]:
        require_room(len(starts) * values.shape[1] * length * FLOAT_BYTES, self.path)
        return sliding_window_view(values[self.order], length, axis=0)[starts]


def require_order(
    seconds: NDArray[np.float64], clients: Sequence[str], lines: NDArray[np.int64], spec: Data, path: Path
) -> None:
    """Refuse rows of one producer that are older than the row before.

    Args:
        lines: Number of each row in the file, for the error.

    Raises:
        ConfigError: A row is out of order; the message names both lines.
    """
    order, codes = _sort_by_client(clients, len(seconds))
    backwards = (np.diff(seconds[order]) < 0) & (np.diff(codes[order]) == 0)
    if backwards.any():
        place = int(np.flatnonzero(backwards)[0])
        row, before = order[place + 1], order[place]
        raise ConfigError(
            f"{path}: line {lines[row]}: column {spec.time_column!r} is earlier than in line {lines[before]}; sort the "
            "rows by time, name the column of their producer by client_column, or write local times with their zone"
        )


def cut_windows(
    clients: Sequence[str], seconds: NDArray[np.float64] | None, count: int, spec: Data, path: Path
) -> TimeWindows:
    """Cut windows from a table of `count` rows.

    Args:
        clients: Producer of each row; empty where unknown.
        seconds: Time of each row, in order for each producer; None where rows have no times.

    Raises:
        ConfigError: No window fits between the gaps.
    """
    assert spec.window
    order, codes = _sort_by_client(clients, count)
    is_break = np.diff(codes[order]) != 0
    gaps = 0
    if seconds is not None:
        steps = np.diff(seconds[order])
        usual = float(np.median(steps[~is_break])) if (~is_break).any() else 0.0
        is_gap = ~is_break & (steps > (spec.window.max_gap_s or USUAL_INTERVALS * usual))
        gaps = int(is_gap.sum())
        is_break |= is_gap
    begins = np.concatenate([[0], np.flatnonzero(is_break) + 1]).astype(np.int64)
    lengths = np.diff(np.concatenate([begins, [count]]))
    span = spec.window.length + spec.window.horizon
    numbers = np.maximum(0, (lengths - span) // spec.window.stride + 1)
    if not numbers.any():
        rows = f"{spec.window.length} rows" + (f" and {spec.window.horizon} after it" * bool(spec.window.horizon))
        raise ConfigError(
            f"{path}: holds no window of {rows}: the longest of {len(begins)} runs without a gap has {lengths.max()} "
            "rows; shorten data.window.length or horizon, or raise max_gap_s"
        )
    within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    starts = np.repeat(begins, numbers) + within * spec.window.stride
    notes = (f"gaps in the time column: {gaps}; no window spans one",) if gaps else ()
    windows = TimeWindows(spec.window, order, starts, path, notes=notes)
    return _identify(windows, clients, seconds, spec) if spec.is_held_out_by_hash else windows


def _sort_by_client(clients: Sequence[str], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows by producer, otherwise in order, and each row's number of its producer."""
    if not clients:
        return np.arange(count), np.zeros(count, dtype=np.int64)
    numbers = {client: number for number, client in enumerate(dict.fromkeys(clients))}
    codes = np.array([numbers[client] for client in clients], dtype=np.int64)
    return np.argsort(codes, kind="stable"), codes


def _identify(
    windows: TimeWindows, clients: Sequence[str], seconds: NDArray[np.float64] | None, spec: Data
) -> TimeWindows:
    """Give each window the identity of its block, and leave out windows whose rows are on different sides.

    Without times a block is that many rows of one producer.
    """
    window, order, count = windows.spec, windows.order, len(windows.order)
    span = window.length + window.horizon
    times = np.arange(count) if seconds is None else seconds
    blocks = np.floor_divide(times, 10 * span if seconds is None else window.block_s).astype(np.int64).tolist()
    names = clients or [""] * count
    keys = list(zip(names, blocks, strict=True))
    hashes = dict(zip(dict.fromkeys(keys), hash_texts(f"{a}/{b}" for a, b in dict.fromkeys(keys)), strict=True))
    rows = np.array([hashes[key] for key in keys], dtype=np.uint64)[order]
    is_whole = np.ones(len(windows.starts), dtype=np.bool_)
    for share, seed in ((spec.holdout, HOLDOUT_SEED), (spec.validation, VALIDATION_SEED)):
        before = np.concatenate([[0], np.cumsum(is_held_out(rows, share, seed))])
        inside = before[windows.starts + span] - before[windows.starts]
        is_whole &= (inside == 0) | (inside == span)
    starts = windows.starts[is_whole]
    return TimeWindows(window, order, starts, windows.path, rows[starts + window.length - 1], windows.notes)
